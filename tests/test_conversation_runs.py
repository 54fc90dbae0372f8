"""Whole training runs with conversations: every mode, rewards of both kinds, kill -9 and resume."""

import json
import signal
from pathlib import Path

import pytest

from run_worlds import Nursery, later_wins, num_resumes, run_words, said, trained, write_world

_ENVIRONMENTS = '''"""Environments over random letters."""

import time
from zlib import crc32

from sortedrl.environments.protocol import Opening, Reply


class Letters:
    """Replies with a checksum, and ends where it is a multiple of 3."""

    is_replayable = True

    def open(self, row):
        self.told = str(row["statements"])
        self.good = 0
        return Opening([{"role": "user", "content": row["prompt"]}])

    def reply(self, message):
        text = message["content"]
        time.sleep(len(text) % 3 * 0.005)
        self.told += text
        self.good += sum(letter.isascii() and letter.isalpha() for letter in text)
        found = crc32(self.told.encode())
        reward = self.good / (1 + len(self.told))
        if found % 3 == 0:
            return Reply(is_done=True, reward=reward, metrics={"letters": self.good})
        return Reply(messages=[{"role": "user", "content": f"{found % 1000};"}], reward=reward)

    def close(self):
        pass


class Fragile(Letters):
    """Hangs and dies now and then, always at the same messages."""

    def reply(self, message):
        bits = crc32(message["content"].encode()) % 16
        if bits == 0:
            time.sleep(1000)
        if bits == 1:
            import os

            os._exit(1)
        return super().reply(message)


class Once(Letters):
    """Cannot be replayed."""

    is_replayable = False
'''


def words(out, *more, name="Letters"):
    """A run of conversations; the environment gives the rewards."""
    flags = later_wins(
        *run_words(out),
        *("--environment.name", f"crowd.py:{name}", "--environment.processes", "1"),
        *("--environment.max-turns", "4", "--engine.max-tokens", "48"),
        *more,
    )
    place = flags.index("--reward")
    return flags[:place] + flags[place + 2 :]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crowd")
    write_world(folder)
    (folder / "crowd.py").write_text(_ENVIRONMENTS)
    return folder


def kept(out):
    """The conversations that were logged, by key."""
    rows = [json.loads(line) for line in (Path(out) / "answers.jsonl").read_text().splitlines()]
    return {(r["prompt"], r["sample"]): (r["response"], r["reward"]) for r in rows}


def assert_whole(out, count=24):
    keys = [key for update in trained(out) for key in update]
    assert sorted(keys) == [(prompt, 0) for prompt in range(count)]


FROZEN = ("--optimiser.learning-rate", "1e-30", "--saving.answers", "64")


@pytest.mark.usefixtures("here")
def test_with_frozen_weights_every_mode_trains_on_the_same_conversations(capsys):
    said(capsys, words("sync", *FROZEN, "--schedule.strategy", "sync"))
    expected = kept("sync")
    assert len(expected) == 24
    assert any(text.count(";") >= 2 for text, _ in expected.values())
    for mode in ("partial", "coupled", "redraw"):
        said(capsys, words(mode, *FROZEN, "--schedule.mode", mode))
        assert kept(mode) == expected
        assert_whole(mode)


@pytest.mark.usefixtures("here")
def test_conversations_learn_and_are_reported(capsys, tmp_path):
    said(capsys, words("learn", "--schedule.mode", "coupled", "--epochs", "2"))
    assert_whole("learn", count=48)
    said(capsys, ["report", "learn", "--out", str(tmp_path / "report.html")])
    assert (tmp_path / "report.html").stat().st_size > 1000
    said(capsys, ["trace", "learn", "--out", str(tmp_path / "trace.json")])
    log = (Path("learn") / "events.jsonl").read_text()
    assert log.count('"event":"pause"') > log.count('"event":"reply"') > 0


@pytest.mark.usefixtures("here")
def test_a_reward_function_gets_the_whole_conversation(capsys):
    flags = words("judged", *FROZEN, "--environment.reward", "function")
    said(capsys, [*flags, "--reward", "judge.py:parts"])
    for text, reward in kept("judged").values():
        letters = sum(c.isascii() and c.isalpha() for c in text) / (1 + len(text))
        assert reward == pytest.approx(letters + len(text) / 100)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("policy", ["tell", "end", "skip"])
def test_environments_that_hang_and_die_lose_no_conversation(capsys, policy):
    limits = ("--environment.on-timeout", policy, "--environment.reply-seconds", "1")
    said(capsys, words(f"fragile-{policy}", *limits, name="Fragile"))
    assert_whole(f"fragile-{policy}")
    assert ("Error: " in str(kept(f"fragile-{policy}"))) == (policy == "tell")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--schedule.mode", "coupled"), "is not replayable"),
        (("--reward", "judge.py:letters"), "environment.reward is 'environment'"),
        (("--evaluation.tasks", "knights_knaves:count=4"), "evaluation.tasks cannot be asked"),
        (("--environment.name", "nobody"), "unknown environment 'nobody'"),
        (("--environment.name", "crowd.py:Nobody"), "unknown class or function"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(capsys, flags, message):
    _, err = said(capsys, later_wins(*words("refused", name="Once"), *flags), code=2)
    assert message in err
    assert not Path("refused").exists()


@pytest.mark.usefixtures("here")
def test_an_environment_that_cannot_be_replayed_works_in_the_other_modes(capsys):
    for mode in ("partial", "redraw"):
        said(capsys, words(f"once-{mode}", "--schedule.mode", mode, name="Once"))
        assert_whole(f"once-{mode}")


def test_a_run_killed_in_the_middle_of_conversations_loses_none(tmp_path):
    write_world(tmp_path)
    (tmp_path / "crowd.py").write_text(_ENVIRONMENTS)
    out = tmp_path / "killed"
    with Nursery(tmp_path) as nursery:
        for updates in (2, 4):
            flags = ("--resume",) if out.exists() else ()
            child = nursery.start(words(out, "--schedule.mode", "partial", *flags))
            folder = out / "checkpoints" / f"update-{updates:06d}"
            assert child.until(folder.exists), child.err
            child.signal(signal.SIGKILL)
            child.wait()
        nursery.run(words(out, "--schedule.mode", "partial", "--resume"))
    assert_whole(out)
    assert num_resumes(out) >= 1
