"""`sortedrl report` and the reading of runs: where the page goes, what runs are called."""

import json
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.cli import main
from sortedrl.core.events import EventFile
from sortedrl.core.meter import measure, numbers
from sortedrl.errors import ConfigError, DataError
from sortedrl.report.record import read_run, read_runs, run_names
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.settings import six


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
    assert "must be a run folder with events.jsonl" in capsys.readouterr().err
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
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=300)


# --- folders that are torn, partial, foreign or of another version --------------------------------

FILES = ("events.jsonl", "metrics.jsonl", "answers.jsonl", "config.toml")
ODD = st.sampled_from(
    [None, True, -1, 0, 3.7, 1e308, 2**70, 10**12, 10**400, "x", "\ud800", [], {}, [[1]], {"a": 1}]
)
ODD_TOML = ("-1", '"x"', "[]", "1e400", "{a = 1}", "nan", "9" * 30, "1979-05-27", "true", '""')


@pytest.fixture(scope="module")
def real(world, tmp_path_factory):
    """What a small run has left: the content of each file."""
    from run_worlds import Nursery, run_words

    held_out = "knights_knaves:people=2,count=4,style=compact,split=test"
    more = ("--max-updates", "4", "--evaluation.tasks", held_out, "--evaluation.every", "2")
    with Nursery(world) as nursery:
        nursery.run(run_words("real", *more))
    return {name: (world / "real" / name).read_text() for name in FILES}


def ends_well(folder, files):
    """Both commands end with a page or a trace, or with one sentence."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(
            content if isinstance(content, bytes) else content.encode(errors="surrogatepass")
        )
    for command in ("report", "trace"):
        told = StringIO()
        with redirect_stderr(told), redirect_stdout(StringIO()):
            code = main([command, str(folder)])
        if code:
            assert code == 2
            assert told.getvalue().startswith("sortedrl: ")


@pytest.mark.parametrize("name", FILES)
def test_a_folder_with_a_file_missing_cut_or_foreign_is_shown_or_refused(tmp_path, real, name):
    folder = tmp_path / "run"
    ends_well(folder, real)
    ends_well(folder, {other: text for other, text in real.items() if other != name})
    whole = real[name].encode()
    for cut in range(0, len(whole), len(whole) // 6):
        for end in (b"", b"\n"):
            ends_well(folder, {**real, name: whole[:cut] + end})
    for foreign in (b"\xff\xfe\0\n", b"[" * 100_000 + b"\n", b"null\n", b"{}\n", b"a,b\n1,2\n"):
        ends_well(folder, {**real, name: foreign})


@settings(max_examples=80)
@given(st.data())
def test_a_line_that_was_changed_in_any_way_is_shown_or_refused(tmp_path_factory, real, data):
    name = data.draw(st.sampled_from(FILES[:3]))
    lines = real[name].splitlines()
    number = data.draw(st.integers(0, len(lines) - 1))
    row = json.loads(lines[number])
    how = data.draw(st.sampled_from(["set", "set", "set", "inside", "delete", "drop", "double"]))
    key = data.draw(st.sampled_from(list(row)))
    if how == "set":
        row[key] = data.draw(ODD)
    elif how == "inside" and isinstance(row[key], list) and row[key]:
        place = data.draw(st.integers(0, len(row[key]) - 1))
        inner = row[key][place]
        if isinstance(inner, list):
            inner[data.draw(st.integers(0, len(inner) - 1))] = data.draw(ODD)
        else:
            row[key][place] = data.draw(ODD)
    elif how == "delete":
        del row[key]
    new = {"drop": [], "double": [lines[number]] * 2}.get(how, [json.dumps(row)])
    lines[number : number + 1] = new
    ends_well(tmp_path_factory.mktemp("changed") / "run", {**real, name: "\n".join(lines) + "\n"})


@settings(max_examples=40)
@given(st.data())
def test_settings_that_were_changed_in_any_way_are_shown_or_refused(tmp_path_factory, real, data):
    lines = real["config.toml"].splitlines()
    number = data.draw(st.sampled_from([n for n, line in enumerate(lines) if " = " in line]))
    value = data.draw(st.sampled_from([*ODD_TOML, None]))
    key = lines[number].partition(" = ")[0]
    lines[number : number + 1] = [] if value is None else [f"{key} = {value}"]
    files = {**real, "config.toml": "\n".join(lines) + "\n"}
    ends_well(tmp_path_factory.mktemp("changed") / "run", files)
