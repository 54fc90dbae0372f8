"""A run that is asked to stop: it finishes its round, saves, and says how to go on."""

import os
import signal
import threading

import pytest

from run_worlds import Nursery, checkpoints, events, metrics, run_words, weights, write_world
from sortedrl.runs.start import Stopping

UPDATES = 6


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    write_world(folder)
    with Nursery(folder) as nursery:
        nursery.folder = folder
        yield nursery


@pytest.fixture(scope="module")
def whole(nursery):
    """A run that nobody stopped, saving only at its end."""
    nursery.run(run_words("whole", "--saving.every", "99"))
    return nursery.folder / "whole"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_finishes_the_round_saves_and_can_be_gone_on_from(nursery, whole, number):
    out = f"asked-{int(number)}"
    child = nursery.start(run_words(out, "--saving.every", "99"))
    assert child.until(lambda: "update    2" in child.err)
    child.signal(number)
    assert child.wait() == 130, child.err
    assert "stopping after this round is finished and saved" in child.err
    assert f"resume with: sortedrl train {out} --resume" in child.out
    (only,) = checkpoints(nursery.folder / out)
    assert 2 <= int(only.name[-6:]) < UPDATES
    assert not (nursery.folder / out / "model").exists()
    nursery.run(["train", out, "--resume"])
    assert weights(nursery.folder / out) == weights(whole)
    assert events(nursery.folder / out) == events(whole)
    assert metrics(nursery.folder / out) == metrics(whole)


def test_a_stop_before_the_first_update_can_be_gone_on_from(nursery, whole):
    child = nursery.start(run_words("early", "--saving.every", "99"))
    assert child.until(lambda: (nursery.folder / "early" / "events.jsonl").exists())
    child.signal(signal.SIGTERM)
    assert child.wait() == 130, child.err
    (only,) = checkpoints(nursery.folder / "early")
    assert only.name in ("update-000000", "update-000001")
    nursery.run(["train", "early", "--resume"])
    assert weights(nursery.folder / "early") == weights(whole)
    assert events(nursery.folder / "early") == events(whole)


def test_a_second_ctrl_c_stops_at_once_and_the_last_checkpoint_stands(nursery, whole):
    child = nursery.start(run_words("twice", "--saving.every", "2", reward="slow"))
    last = nursery.folder / "twice" / "checkpoints" / "update-000002"
    assert child.until(last.exists)
    child.signal(signal.SIGINT)
    assert child.until(lambda: "stopping after" in child.err)
    child.signal(signal.SIGINT)
    assert child.wait() == 130
    assert child.err.endswith("stopped\n")
    assert child.out == ""
    assert [path.name for path in checkpoints(nursery.folder / "twice")] == ["update-000002"]
    nursery.run(["train", "twice", "--resume"])
    assert metrics(nursery.folder / "twice") == metrics(whole)
    assert weights(nursery.folder / "twice") == weights(whole)


def test_signals_are_left_to_whoever_had_them():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    lines = []
    with Stopping(lines.append) as stopping:
        assert not stopping.is_requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopping.is_requested
        os.kill(os.getpid(), signal.SIGTERM)  # again and again changes nothing
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert {number: signal.getsignal(number) for number in before} == before
    assert len(lines) == 2


def test_outside_of_the_main_thread_there_is_nothing_to_listen_to():
    found = []

    def enter():
        with Stopping(found.append) as stopping:
            found.append(stopping.is_requested)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [False]
