"""The fuzzers in small: each runs some cases, says what it did, and finds what is put before it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent / "fuzz"


def fuzz(*words, cwd):
    return subprocess.run(
        [sys.executable, str(FUZZ), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=cwd,
    )


@pytest.mark.parametrize(
    ("name", "cases"), [("config", 60), ("rows", 30), ("answers", 10), ("checkpoints", 2)]
)
def test_a_few_cases_find_nothing_and_leave_nothing(name, cases, tmp_path):
    done = fuzz("--only", name, "--cases", cases, "--seed", 0, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("seed 0; once more: python tests/fuzz --seed 0\n")
    row = next(line for line in done.stdout.splitlines() if line.startswith(f"{name} "))
    assert row.split()[1] == str(cases)
    assert list(tmp_path.iterdir()) == []


def test_a_finding_is_run_again_by_its_folder(tmp_path):
    case = {"command": "bogus", "words": []}
    (tmp_path / "case.json").write_text(json.dumps({"fuzzer": "config", "case": case}))
    done = fuzz("--replay", tmp_path, cwd=tmp_path)
    assert done.returncode == 1
    assert "KeyError" in done.stdout


def test_a_case_that_hangs_dies_or_raises_is_one_finding_each_and_the_others_run(tmp_path):
    words = ("--only", "faults", "--cases", 10, "--seed", 0)
    done = fuzz(*words, cwd=tmp_path)
    assert done.returncode == 1
    assert "took more than 1 seconds (hangs)" in done.stdout
    assert "the process died with code 7 (dies)" in done.stdout
    assert "Broken at on purpose" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("faults "))
    assert row.split()[1] == "10"
    assert row.split()[3] == "3"
    found = sorted(tmp_path.glob("fuzz-findings/*/case.json"))
    assert [json.loads(path.read_text())["fuzzer"] for path in found] == ["faults"] * 3
