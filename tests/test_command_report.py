"""`sortedrl report` and the reading of runs: where the page goes, what runs are called."""

import json
import subprocess
import sys

import pytest

from sortedrl.cli import main
from sortedrl.compare import simulate
from sortedrl.errors import ConfigError, DataError
from sortedrl.events import EventFile
from sortedrl.meter import measure
from sortedrl.metrics import numbers
from sortedrl.report.record import read_run, read_runs, run_names
from sortedrl.simulate.presets import six


def write_run(folder, *, config="seed = 1\n"):
    folder.mkdir(parents=True)
    file = EventFile(folder / "events.jsonl")
    simulate(six(), record=file)
    file.close()
    (folder / "config.toml").write_text(config)
    return folder


def test_the_page_of_one_run_lies_in_its_folder(tmp_path, capsys):
    run = write_run(tmp_path / "logic")
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "<title>logic</title>" in page
    assert f"wrote {run / 'report.html'}" in capsys.readouterr().err


def test_the_page_of_several_runs_lies_here_and_names_them_all(tmp_path, monkeypatch):
    runs = [write_run(tmp_path / name) for name in ("a", "b", "c")]
    monkeypatch.chdir(tmp_path)
    assert main(["report", *map(str, runs)]) == 0
    assert "<title>a, b and c</title>" in (tmp_path / "report.html").read_text()
    assert main(["report", str(runs[0]), "--out", "other.html", "--title", "Mine"]) == 0
    assert "<title>Mine</title>" in (tmp_path / "other.html").read_text()


def test_a_script_gets_the_numbers_of_the_log(tmp_path, capsys):
    run = write_run(tmp_path / "logic")
    assert main(["report", str(run / "events.jsonl"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["page"] == str(run / "report.html")
    assert told["runs"] == {"logic": numbers(measure(read_run(run).events).run)}


def test_what_is_no_run_is_refused_and_nothing_is_written(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty")]) == 2
    assert "with events.jsonl in it" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert list((tmp_path / "empty").iterdir()) == []


def test_no_run_and_a_run_given_twice_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least one run"):
        read_runs([])
    run = write_run(tmp_path / "logic")
    with pytest.raises(ConfigError, match="twice"):
        read_runs([run, run / ".." / "logic"])


def test_runs_are_called_by_what_tells_them_apart(tmp_path):
    places = [tmp_path / "seed0" / "sorted", tmp_path / "seed1" / "sorted"]
    assert run_names(places) == ["seed0/sorted", "seed1/sorted"]
    assert run_names(places[:1]) == ["sorted"]
    assert run_names([places[0] / "events.jsonl", tmp_path / "own.jsonl"]) == ["sorted", "own"]


def test_settings_that_are_not_toml_are_named(tmp_path):
    run = write_run(tmp_path / "logic", config="seed = = 1\n")
    with pytest.raises(DataError, match=r"config\.toml: not TOML"):
        read_run(run)


def test_the_views_need_no_torch(tmp_path):
    write_run(tmp_path / "logic")
    program = (
        "import sys; from sortedrl.cli import main; "
        "assert main(['report', 'logic']) == 0; assert main(['trace', 'logic']) == 0; "
        "assert main(['plot', 'bubble', 'logic', '--out', 'b.svg']) == 0; "
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60)
