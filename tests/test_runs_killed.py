"""A run killed at any instant and taken up again is the same run, bit for bit.

The processes are real and so is the signal: SIGKILL, which nothing can catch or clean up after.
"""

import random
import signal
import time
from collections import Counter

import pytest

from run_worlds import (
    Nursery,
    answers,
    checkpoints,
    events,
    metrics,
    num_resumes,
    run_words,
    trained,
    weights,
    write_world,
)
from sortedrl.core.buffer_file import load_buffer
from sortedrl.errors import BufferFileError

EPOCHS, ROWS = 5, 24
HELD_OUT = "knights_knaves:people=2,count=4,style=compact,split=test"
INSTANTS = ("starting",) * 2 + ("anywhere",) * 4 + ("saving",) * 4


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    write_world(folder)
    with Nursery(folder) as nursery:
        nursery.folder = folder
        yield nursery


def newest(out):
    return max((path.name for path in (out / "checkpoints").glob("update-??????")), default="")


def is_saving(out):
    """Whether a checkpoint is being written just now, and not an old one deleted."""
    partial = [path.stem for path in (out / "checkpoints").glob("*.partial")]
    return any(name > newest(out) for name in partial)


def killed(nursery, words, when, *, seconds=0.0):
    """Start a run and kill it that long after something happened, which must be before it ends."""
    child = nursery.start(words)
    assert child.until(when), child.err
    time.sleep(seconds)
    child.signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, child.err


def compare(one, other):
    """All that two runs leave behind, but for times."""
    assert weights(one) == weights(other)
    assert events(one) == events(other)
    assert metrics(one) == metrics(other)
    assert answers(one) == answers(other)
    last, other_last = checkpoints(one)[-1], checkpoints(other)[-1]
    assert last.name == other_last.name
    for path in last.rglob("*.safetensors"):
        assert path.read_bytes() == (other_last / path.relative_to(last)).read_bytes(), path


def learns(out):
    """Whether the weights moved, so that equal ones say something."""
    return weights(out) != (out.parent / "begun" / "model.safetensors").read_bytes()


def test_a_run_killed_ten_times_ends_as_one_that_was_left_alone(nursery):
    words = ("--epochs", str(EPOCHS))
    whole, cut = nursery.folder / "whole", nursery.folder / "cut"
    nursery.run(run_words(whole, *words))
    saving = 0
    for instant in random.sample(INSTANTS, len(INSTANTS)):
        again, seen = run_words(cut, *words, "--resume"), newest(cut)
        if instant == "starting":
            killed(nursery, again, lambda: True, seconds=random.uniform(0, 0.8))
        elif instant == "anywhere":
            saved = lambda seen=seen: newest(cut) > seen  # noqa: E731
            killed(nursery, again, saved, seconds=random.uniform(0, 0.1))
        else:
            killed(nursery, again, lambda: is_saving(cut))
        saving += is_saving(cut)
    assert saving >= 2, "some kills must fall into saving"
    left_alone = nursery.run(run_words(cut, *words, "--resume"))
    assert "resuming from" in left_alone.err
    assert num_resumes(cut) >= INSTANTS.count("anywhere")
    assert learns(whole)
    compare(whole, cut)
    ids = Counter(prompt for update in trained(cut) for prompt, _ in update)
    assert ids == Counter(range(EPOCHS * ROWS)), "every prompt once per epoch"


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ["--lora.rank", "4", "--algorithm.kl-coef", "0.1", "--schedule.mode", "on_policy"],
            id="lora",
        ),
        pytest.param(
            [
                *(
                    "--algorithm.name",
                    "ppo",
                    "--schedule.mode",
                    "coupled",
                    "--optimiser.mini-batches",
                    "2",
                ),
                *("--evaluation.tasks", HELD_OUT, "--evaluation.every", "1"),
            ],
            id="ppo",
        ),
        pytest.param(
            [
                *("--algorithm.kl-coef", "0.1", "--algorithm.whiten", "group"),
                *("--schedule.lookahead", "1", "--precision", "bfloat16"),
            ],
            id="bfloat16",
        ),
    ],
)
def test_whatever_is_trained_goes_on_bit_for_bit(nursery, words, request):
    name = request.node.callspec.id
    whole, cut = nursery.folder / f"{name}-whole", nursery.folder / f"{name}-cut"
    nursery.run(run_words(whole, *words))
    killed(nursery, run_words(cut, *words), lambda: newest(cut) >= "update-000002")
    killed(nursery, run_words(cut, *words, "--resume"), lambda: is_saving(cut))
    nursery.run(run_words(cut, *words, "--resume"))
    assert num_resumes(cut) >= 1
    assert learns(whole)
    compare(whole, cut)


def held(out):
    """How many answers the newest checkpoint holds back."""
    try:
        return len(load_buffer(out / "checkpoints" / newest(out) / "held.bin").ready)
    except BufferFileError:
        return 0  # not there yet, or not any more


def test_answers_held_back_by_dynamic_sampling_outlive_a_kill(nursery):
    words = [
        *("--algorithm.name", "dapo", "--schedule.harvest-unit", "prompt"),
        *("--schedule.samples-per-prompt", "2", "--schedule.update-batch", "6"),
    ]
    whole, cut = nursery.folder / "held-whole", nursery.folder / "held-cut"
    nursery.run(run_words(whole, *words, reward="rarely"))
    killed(nursery, run_words(cut, *words, reward="rarely"), lambda: held(cut) > 0)
    assert held(cut) > 0
    nursery.run(run_words(cut, *words, "--resume", reward="rarely"))
    assert num_resumes(cut) == 1
    assert any("held" in row for row in metrics(whole))
    assert learns(whole)
    compare(whole, cut)
