"""The lines that a run prints, and what it records about itself."""

import json
import subprocess

import pytest

from sortedrl.core.meter import Figures
from sortedrl.runs.folder import RunFolder, commit, run_facts
from sortedrl.runs.output import evaluation_line, update_line

NUMBERS = {"reward/mean": -0.1234, "length/mean": 2048.0}


def figures(*, staleness=0):
    return Figures(
        rollout_seconds=10.0,
        busy_slot_seconds=9.5,
        seconds=12.0,
        staleness_max=staleness,
        staleness_sum=2 * staleness,
    )


@pytest.mark.parametrize("staleness", [0, 3, 12])
@pytest.mark.parametrize("done", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("more", [{}, {"skipped_steps": 1.0, "unusable_answers": 12345.0}])
def test_every_line_of_an_update_fits_80_columns(staleness, done, more):
    text = update_line(
        1234,
        numbers=NUMBERS | more,
        figures=figures(staleness=staleness),
        done=done,
        seconds=86_000.0,
    )
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.startswith("update 1234  reward -0.123  length 2048  bubble  5 %")
    assert ("stale" in text) == bool(staleness)
    assert ("skipped: " in text) == ("left out: " in text) == bool(more)


def test_a_short_line_says_when_the_run_will_be_over():
    line = update_line(3, numbers=NUMBERS, figures=figures(), done=0.25, seconds=30.0)
    assert line.endswith("/s  1 min 30 s left")


def test_an_evaluation_has_a_line_for_each_task_and_keeps_the_score_of_a_long_name():
    puzzles = "puzzles:" + 99 * "x"
    text = evaluation_line(7, {"sums": 0.5, puzzles: 0.25}, {puzzles: -1.5})
    assert text.splitlines()[0] == "after update 7: 50.0 %  sums"
    assert text.splitlines()[1].startswith("after update 7: 25.0 %, reward -1.500  puzzles:xxx")
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_run_records_when_and_on_what_it_started(tmp_path):
    facts = run_facts("cpu")
    assert {"started", "machine", "sortedrl"} <= set(facts)
    folder = RunFolder(tmp_path / "run")
    with folder.created("seed = 1\n", facts=facts):
        pass
    with folder.reopened():
        pass
    assert json.loads(folder.mark.read_text()) == {"format": "sortedrl-run", "version": 1} | facts


def test_a_package_that_git_does_not_track_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.delenv("SORTEDRL_COMMIT", raising=False)
    assert commit(tmp_path) is None
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "package.py").touch()
    assert commit(tmp_path / ".venv") is None
