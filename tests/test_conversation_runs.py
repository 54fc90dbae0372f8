"""Whole training runs with conversations: every mode, rewards of both kinds, kill -9 and resume."""

import json
import signal
from pathlib import Path

import pytest

import sortedrl
from run_worlds import Nursery, later_wins, num_resumes, run_words, said, trained, write_world
from sortedrl.config.data import EnvironmentSettings

_ENVIRONMENTS = '''"""Environments over random letters."""

import time
from zlib import crc32

from sortedrl.environments import Opening, Reply


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
            metrics = {"letters": self.good, "correct": found % 2}
            return Reply(is_done=True, reward=reward, metrics=metrics)
        return Reply(messages=[{"role": "user", "content": f"{found % 1000};"}], reward=reward)

    def close(self):
        pass


class Fragile(Letters):
    """Hangs, dies, is late and says too much now and then, always at the same messages."""

    def reply(self, message):
        bits = crc32(message["content"].encode()) % 16
        if bits == 0:
            time.sleep(1000)
        if bits == 1:
            import os

            os._exit(1)
        if bits == 2:
            time.sleep(1)  # the time limit: whoever comes first
        if bits == 3:
            return Reply(messages=[{"role": "user", "content": "x" * 1000}])
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
def test_environments_that_hang_die_and_say_too_much_lose_no_conversation(capsys, policy):
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
        (("--environment.name", "nobody"), "unknown environment 'nobody'"),
        (("--environment.name", "crowd.py:Nobody"), "unknown class or function"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(capsys, flags, message):
    _, err = said(capsys, later_wins(*words("refused", name="Once"), *flags), code=2)
    assert message in err
    assert not Path("refused").exists()


@pytest.mark.usefixtures("here")
def test_a_dry_run_knows_turns_and_tool_times(capsys, tmp_path):
    log = tmp_path / "seen.jsonl"
    turn = {"tokens": 3, "seconds": 0.5, "given": 4}
    log.write_text(json.dumps({"turns": [turn] * 6}) + "\n")
    plan = [*words("planned"), "--dry-run", "--card", "cpu", "--json"]

    def talk(*more):
        out, _ = said(capsys, [*plan, *more])
        return json.loads(out)["prediction"]["conversations"]

    assert talk()["are_guessed"]
    told = talk("--turns", "3", "--tool-seconds", "2", "--given-tokens", "5")
    assert not told["are_guessed"]
    assert told["turns"] > 2
    seen = talk("--conversations", str(log))
    assert (seen["turns"], seen["reply_seconds"]) == (4, 0.5)  # environment.max_turns
    assert not Path("planned").exists()
    for flags, message in (
        (("--turns", "0.5"), "--turns must be at least 1"),
        (("--turns", "2", "--conversations", str(log)), "leave out --turns"),
    ):
        assert message in said(capsys, [*plan, *flags], code=2)[1]
    single = [*run_words("planned"), "--dry-run", "--card", "cpu", "--turns", "2"]
    assert "are for runs with an environment" in said(capsys, single, code=2)[1]


HELD_OUT = "knights_knaves:people=2-3,count=12,style=compact,split=test"
LIMITS = ("--max-turns", "4", "--max-tokens", "48", "--temperature", "1")
ASK = ("--tasks", HELD_OUT, "--device", "cpu", *LIMITS)


def examined(capsys, out, *more, name="Letters"):
    """The conversations of `sortedrl eval`, by key."""
    words = ("eval", "begun", *ASK, "--environment", f"crowd.py:{name}", "--out", out, *more)
    said(capsys, [*words, "--workers", "1"])
    rows = (Path(out) / "begun" / "samples.jsonl").read_text().splitlines()
    found = [json.loads(row) for row in rows]
    return {(row["prompt_id"], row["sample_index"]): row for row in found}


@pytest.mark.usefixtures("here")
def test_held_out_tasks_are_asked_in_conversations_as_by_the_command_eval(capsys):
    flags = ("--evaluation.tasks", HELD_OUT, "--evaluation.temperature", "1")
    more = ("--evaluation.every", "2", "--schedule.mode", "partial")
    said(capsys, words("held-out", *FROZEN, *flags, *more))
    assert_whole("held-out")
    rows = [json.loads(r) for r in (Path("held-out") / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "evaluation/score" in row]
    assert len(rows) > 2
    told = examined(capsys, "as-told")
    turns = [row["parts"]["turns"] for row in told.values()]
    for row in rows:
        assert row["evaluation/score"] == sum(r["is_correct"] for r in told.values()) / 12
        assert row["evaluation/turns"] == pytest.approx(sum(turns) / 12)
        assert row["evaluation/outside_seconds"] > 0
    assert max(turns) > 2


@pytest.mark.usefixtures("here")
def test_conversations_of_an_evaluation_do_not_depend_on_the_slots(capsys):
    def content(rows):
        names = ("response", "reward", "is_correct", "finish_reason", "num_tokens")
        return {key: [row[name] for name in names] for key, row in rows.items()}

    many = examined(capsys, "many", "--samples", "3", "--slots", "9")
    one = examined(capsys, "one", "--samples", "3", "--slots", "1")
    assert len(many) == 36
    assert content(many) == content(one)
    assert {row["finish_reason"] for row in many.values()} == {"stop", "length"}
    assert any(row["reward"] for row in many.values() if row["finish_reason"] == "length")


@pytest.mark.usefixtures("here")
def test_an_evaluation_scores_conversations_by_a_function_too(capsys):
    flags = ("--environment-reward", "function", "--reward", "judge.py:parts")
    for row in examined(capsys, "judged-eval", *flags).values():
        text = row["response"]
        letters = sum(c.isascii() and c.isalpha() for c in text) / (1 + len(text))
        assert row["reward"] == pytest.approx(letters + len(text) / 100)
        assert row["parts"]["turns"] >= 1
    _, err = said(
        capsys, ["eval", "begun", *ASK, "--environment", "crowd.py:Letters", *flags[2:]], code=2
    )
    assert "gives the rewards" in err


@pytest.mark.usefixtures("here")
def test_an_evaluation_of_an_environment_that_hangs_and_dies_comes_to_its_end(capsys):
    found = examined(capsys, "fragile-eval", "--reply-seconds", "1", name="Fragile")
    assert len(found) == 12
    assert any("Error: " in row["response"] for row in found.values())


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("limit", [1, 3])
def test_python_evaluates_in_conversations_with_a_limit_of_open_ones(limit):
    settings = EnvironmentSettings(
        name="crowd.py:Letters", processes=1, max_turns=4, max_open=limit
    )
    found = sortedrl.evaluate(
        "begun",
        HELD_OUT,
        environment=settings,
        max_tokens=24,
        slots=4,
        temperature=1.0,
        device="cpu",
    )
    assert len(found.answers) == 12
    assert {answer.finish_reason for answer in found.answers} == {"stop", "length"}


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
