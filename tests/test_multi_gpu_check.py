"""The check for machines with GPUs: `train` takes what it runs, and CPUs can try it."""

import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest

from run_worlds import said

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "multi_gpu_check.py"


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("multi_gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        # A child process finds what it runs by this name.
        patch.setitem(sys.modules, "multi_gpu_check", module)
        patch.syspath_prepend(SCRIPT.parent)
        spec.loader.exec_module(module)
        yield module


@pytest.mark.parametrize("gpus", [0, 2, 8])
def test_train_plans_the_run_of_every_part_that_its_gpus_allow(check, capsys, tmp_path, gpus):
    names = [
        name
        for name in check.CLUSTERS
        if check.PARTS[name].can_use_cpus or check.PARTS[name].gpus <= gpus
    ]
    assert len(names) >= 4
    for name in names:
        words = check.run_words(name, tmp_path / name, gpus=gpus)
        card = ["--card", "h100"] if gpus else []
        out, _ = said(capsys, ["train", *words, "--dry-run", *card])
        assert "trainer rank" in out or name == "controller"


@pytest.mark.slow
def test_without_gpus_a_part_says_what_it_needs_or_is_tried_on_cpus(check, capsys, tmp_path):
    names = ["sleep", "bits", "broadcast", "ipc"]
    given = ["--cpu", "--parts", *names, "--json", str(tmp_path / "found.json")]
    assert check.main(given) == 0
    out = capsys.readouterr().out
    assert "skipped  sleep" in out
    assert "tests GPUs only" in out
    parts = json.loads((tmp_path / "found.json").read_text())["parts"]
    assert [part["verdict"] for part in parts] == ["skipped", "ok", "ok", "ok"]
    assert parts[2]["words"].endswith("over gloo")
    assert "to the bit over shared files" in parts[3]["words"]


def test_a_part_that_hangs_leaves_no_process(check, monkeypatch, tmp_path):
    hanging = tmp_path / "hanging.py"
    hanging.write_text(
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(check, "__file__", str(hanging))
    verdict = check.tried("bits", seconds=10, on_cpu=True)
    assert (verdict.verdict, verdict.words) == ("failed", "timeout after 10 s")
    child = Path("/proc", (tmp_path / "child").read_text(), "stat")
    until = time.monotonic() + 30
    # A process that has ended may wait for the one above it.
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until, "the child of a part still runs"
        time.sleep(0.1)


def test_the_error_of_a_second_process_is_told(check):
    with pytest.raises(RuntimeError, match=r"in the second process: ValueError: .*'word'"):
        check._answer(check._second_process(int, "word"))
