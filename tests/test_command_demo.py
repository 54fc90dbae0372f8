"""The demo, in small: warm start, two runs on the same puzzles, a table and a report."""

import shutil
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest

from sortedrl.cli import demo as command
from sortedrl.cli import main
from sortedrl.config.parsing import read_toml
from sortedrl.core.events import Update, read_events
from sortedrl.core.files import read_metrics

SMALL = ("--warm-steps", "4", "--answers", "40", "--held-out", "2")
SMALLEST = ("--warm-steps", "1", "--answers", "1", "--held-out", "1")


@pytest.fixture(scope="module", autouse=True)
def _small():
    """Few puzzles and short answers: an untrained model goes on to the limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_NUM_PUZZLES", 100)
        patch.setattr(command, "_MAX_TOKENS", 24)
        yield


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The folder of a demo, what it has shown, and what it has said meanwhile."""
    out = tmp_path_factory.mktemp("demos") / "demo"
    shown, progress = StringIO(), StringIO()
    with redirect_stdout(shown), redirect_stderr(progress):
        assert main(["demo", "--out", str(out), *SMALL]) == 0
    return out, shown.getvalue(), progress.getvalue()


def test_the_demo_ends_with_both_runs_side_by_side_and_a_report(demo):
    out, shown, progress = demo
    heading, *lines = shown.splitlines()
    assert heading.split() == ["synchronous", "predicted", "SortedRL", "gain"]
    rows = {line[:28].strip(): line[28:].split() for line in lines if line}
    assert rows["answers trained"] == ["40", "40"]
    assert {"right answers, before", "right answers, after", "idle slots"} <= rows.keys()
    sync, forecast, ours, gain, unit = rows["tokens per second of rollout"]
    assert unit == "x"
    assert float(gain) == pytest.approx(
        float(ours.replace(",", "")) / float(sync.replace(",", "")), abs=0.06
    )
    assert float(forecast.replace(",", "")) > 0
    assert str(out / "report.html") in lines[-1]
    assert "</svg>" in (out / "report.html").read_text()
    for step in ("1 of 5", "2 of 5", "5 of 5", "step    4 of 4", "after update 0"):
        assert step in progress
    sorted_config, sync_config = (
        read_toml(out / name / "config.toml") for name in ("sorted", "sync")
    )
    assert sorted_config["schedule"]["mode"] == "partial"
    assert sync_config["schedule"]["strategy"] == "sync"
    assert sorted_config["task"] == sync_config["task"]
    prompts = [
        sorted(
            trained.prompt
            for event in read_events(out / name / "events.jsonl")
            if isinstance(event, Update)
            for trained in event.trained
        )
        for name in ("sorted", "sync")
    ]
    assert prompts[0] == prompts[1] == list(range(40))


def test_a_second_demo_replaces_the_first(demo, tmp_path, capsys):
    out = shutil.copytree(demo[0], tmp_path / "demo")
    assert main(["demo", "--out", str(out), "--seed", "1", *SMALLEST]) == 0
    capsys.readouterr()
    assert "seed=2" in read_toml(out / "sync" / "config.toml")["task"]
    assert read_metrics(out / "sync" / "metrics.jsonl")[0]["update"] == 0


@pytest.mark.parametrize("name", ["warm", "sorted", "sync"])
def test_a_folder_that_no_demo_has_made_is_left_alone(tmp_path, capsys, name):
    """A run of the user's own may be called like one of the demo's."""
    mine = tmp_path / name
    mine.mkdir()
    (mine / "run.json").write_text('{"format": "sortedrl-run", "version": 1}')
    (mine / "config.toml").write_text("seed = 1")
    assert main(["demo", "--out", str(tmp_path), *SMALL]) == 2
    assert f"{mine} already exists and was not made by the demo" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {name}
    assert {path.name for path in mine.iterdir()} == {"run.json", "config.toml"}


def marked(folder):
    folder.mkdir(parents=True)
    (folder / "demo.json").write_text('{"format": "sortedrl-demo", "version": 1}')
    return folder


def test_what_was_put_into_a_folder_of_the_demo_is_left_alone(tmp_path, capsys):
    for name in ("warm", "sorted"):
        marked(tmp_path / name)
    (tmp_path / "sorted" / "notes.txt").write_text("mine")
    assert main(["demo", "--out", str(tmp_path), *SMALL]) == 2
    assert "holds files that the demo did not write: notes.txt" in capsys.readouterr().err
    assert (tmp_path / "warm" / "demo.json").exists(), "nothing is removed before all is looked at"


@pytest.mark.parametrize("mark", ["", "{}", "[", '{"format": "other", "version": 1}'])
def test_a_mark_that_is_not_the_demos_is_none(tmp_path, capsys, mark):
    (marked(tmp_path / "sync") / "demo.json").write_text(mark)
    assert main(["demo", "--out", str(tmp_path), *SMALL]) == 2
    assert "was not made by the demo" in capsys.readouterr().err


def test_a_link_and_a_page_of_the_users_own_are_left_alone(tmp_path, capsys):
    elsewhere = marked(tmp_path / "elsewhere")
    out = tmp_path / "demo"
    out.mkdir()
    (out / "warm").symlink_to(elsewhere)
    assert main(["demo", "--out", str(out), *SMALL]) == 2
    (out / "warm").unlink()
    (out / "report.html").write_text("<!DOCTYPE html><title>mine</title>")
    assert main(["demo", "--out", str(out), *SMALL]) == 2
    assert "report.html: is a file that this command did not write" in capsys.readouterr().err
    assert (elsewhere / "demo.json").exists()
    assert [path.name for path in out.iterdir()] == ["report.html"]


def test_a_demo_of_nothing_is_refused(capsys):
    assert main(["demo", "--answers", "0"]) == 2
    assert "answers must be at least 1, got 0" in capsys.readouterr().err
