"""A server that is killed in the middle of a round: the run goes on with the other one."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from served import sglang_servers, vllm_servers

import sortedrl
from run_worlds import events, run_words, write_world

pytestmark = pytest.mark.filterwarnings("default")

PROMPTS, SLOTS, CONTEXT = 24, 3, 256
PATIENCE_SECONDS = 300


def happened(out):
    """The events so far; the last line may be half written."""
    lines = (out / "events.jsonl").read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def wait_for_the_middle_of_a_round(run, out):
    """Until answers run after an update."""
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until and run.poll() is None:
        if (out / "events.jsonl").exists():
            kinds = [event["event"] for event in happened(out)]
            if kinds.count("update") >= 2 and kinds[-1] == "start":
                return
        time.sleep(0.002)
    pytest.fail("the run never got that far")


def test_a_run_goes_on_when_a_server_is_killed_and_trains_every_prompt_once(engine, tmp_path):
    # Without stop tokens the answers are long enough to be met in the middle.
    write_world(tmp_path, stops=(), hidden=64)
    out = tmp_path / "run"
    started = {"vllm": vllm_servers, "sglang": sglang_servers}[engine]
    with (
        started(tmp_path / "begun", count=2, slots=SLOTS, context=CONTEXT) as servers,
        (tmp_path / "said").open("w") as said,
    ):
        words = run_words(
            out,
            *("--task", f"knights_knaves:people=2-3,count={PROMPTS},style=compact"),
            *("--rollout.engine", "servers", "--rollout.urls", *(s.url for s in servers)),
            *("--engine.slots", str(SLOTS), "--engine.max-tokens", "100"),
            *("--schedule.mode", "partial"),
        )
        run = subprocess.Popen(
            [sys.executable, "-m", "sortedrl", *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(Path(sortedrl.__file__).parents[1])},
            stdout=said,
            stderr=said,
        )
        try:
            wait_for_the_middle_of_a_round(run, out)
            servers[0].kill()
            code = run.wait(PATIENCE_SECONDS)
        finally:
            run.kill()
            run.wait()
        words = (tmp_path / "said").read_text()
    assert code == 0, words
    warning = " ".join(words.split())
    assert f"engine 1 of 2 ({servers[0].url}) is lost" in warning, words
    assert f"{SLOTS} slots are left" in warning
    updates = [event for event in events(out) if event["event"] == "update"]
    trained = Counter(prompt for event in updates for prompt, *_ in event["trained"])
    assert trained == Counter(range(PROMPTS)), "every prompt is trained once"
    assert events(out)[-1]["event"] == "end"
