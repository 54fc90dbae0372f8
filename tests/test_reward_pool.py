"""The reward pool on real worker processes: every call ends once, whatever the function does."""

import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.config.data import RewardSettings
from sortedrl.errors import ConfigError, RewardError
from sortedrl.rewards.functions import RewardSource
from sortedrl.rewards.pool.pool import RewardPool
from sortedrl.types import Prompt

LIMIT = 1.5
"""Seconds: long enough for a call that does nothing on a machine that is busy."""
FUNCTIONS = str(Path(__file__).with_name("reward_functions.py"))


def source(name, **options):
    return RewardSource(f"{FUNCTIONS}:{name}", options)


def pool_of(name, *, folder=None, options=None, **given_settings):
    given_settings = {"workers": 2, "time_limit_seconds": LIMIT} | given_settings
    return RewardPool(
        source(name, **(options or {})), RewardSettings(**given_settings), folder=folder
    )


def outcomes_of(pool, responses):
    tickets = [pool.submit(Prompt(id=i), response) for i, response in enumerate(responses)]
    return pool.wait(tickets)


def rewards_of(pool, responses):
    return [None if o.score is None else o.score.reward for o in outcomes_of(pool, responses)]


def test_scores_come_back_in_the_order_they_are_asked_for():
    with pool_of("length") as pool:
        assert rewards_of(pool, ["a" * n for n in range(50)]) == list(range(50))


def test_scores_are_given_out_in_the_order_in_which_they_are_done():
    with pool_of("by_word", time_limit_seconds=20) as pool:
        slow = pool.submit(Prompt(id=0), "sleep:2")
        quick = [pool.submit(Prompt(id=i), "ok") for i in range(1, 4)]
        pool.wait([])
        done = []
        while len(done) < 4:
            done += [outcome.ticket for outcome in pool.completed()]
            time.sleep(0.01)
    assert done == [*quick, slow]


def test_the_prompt_and_the_options_reach_the_function():
    with pool_of("gold", options={"right": 3.0}) as pool:
        prompt = Prompt(id=0, tokens=(1, 2), fields={"answer": "42"})
        right, wrong = pool.wait([pool.submit(prompt, "42"), pool.submit(prompt, "41")])
    assert (right.score.reward, wrong.score.reward) == (3.0, 0.0)


def test_named_parts_are_summed_and_kept():
    with pool_of("parts") as pool:
        (outcome,) = outcomes_of(pool, ["x"])
    assert outcome.score.reward == 3.5
    assert outcome.score.parts == {"format": 1.0, "answer": 2.5}


def test_calls_run_side_by_side(tmp_path):
    with pool_of("by_word", workers=4, time_limit_seconds=120) as pool:
        assert rewards_of(pool, [f"meet:4:{tmp_path}"] * 4) == [1.0] * 4


def test_a_hanging_call_is_killed_counted_and_gets_the_configured_reward(tmp_path, caplog):
    with pool_of("by_word", failure_reward=-1.0, folder=tmp_path) as pool:
        outcomes = outcomes_of(pool, ["ok", "hang", "ok", "hang"])
        assert [o.score.reward for o in outcomes] == [1.0, -1.0, 1.0, -1.0]
        assert [o.failure for o in outcomes] == [None, "timeout", None, "timeout"]
        assert pool.stats.failures == {"timeout": 2}
        assert pool.stats.workers.killed == 2
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert re.search("by_word' for answer 0 to prompt [13]: it took more than 1.5 sec", warning)
    assert "gets the reward -1" in warning
    saved = [
        json.loads(line) for line in (tmp_path / "reward-failures.jsonl").read_text().splitlines()
    ]
    assert sorted((s["failure"], s["prompt_id"], s["response"]) for s in saved) == [
        ("timeout", 1, "hang"),
        ("timeout", 3, "hang"),
    ]


def test_a_failed_answer_can_be_left_without_a_reward():
    with pool_of("by_word", on_failure="skip") as pool:
        assert rewards_of(pool, ["ok", "hang"]) == [1.0, None]


def test_a_failed_answer_can_stop_the_run():
    with pool_of("by_word", on_failure="stop") as pool:
        with pytest.raises(RewardError, match="answer 0 to prompt 1: it took more than") as caught:
            outcomes_of(pool, ["ok", "hang"])
        assert (caught.value.prompt_id, caught.value.response) == (1, "hang")


def test_killing_a_call_kills_the_processes_it_started(tmp_path):
    pid_file = tmp_path / "pid"
    with pool_of("by_word", workers=1) as pool:
        assert outcomes_of(pool, [f"child:{pid_file}"])[0].failure == "timeout"
    pid = int(pid_file.read_text())
    assert_gone(pid)


@pytest.mark.parametrize("how", ["hang", "abort", "return"])
def test_a_daemon_in_a_session_of_its_own_ends_with_its_worker(how, tmp_path):
    with pool_of("by_word", workers=1) as pool:
        outcomes_of(pool, [f"daemon:{how}:{tmp_path / 'pid'}"])
        if how != "return":
            assert_gone(int((tmp_path / "pid").read_text()))
    assert_gone(int((tmp_path / "pid").read_text()))


def test_children_count_against_the_memory_of_their_worker():
    with pool_of("by_word", memory_gib=0.25, time_limit_seconds=30) as pool:
        outcomes = outcomes_of(pool, ["ok", "brood:3", "ok"])
        assert [o.failure for o in outcomes] == [None, "memory", None]


def test_shared_memory_counts_and_is_given_back():
    name = f"sortedrl-test-{os.getpid()}"
    with pool_of("by_word", workers=1, memory_gib=0.25, time_limit_seconds=30) as pool:
        outcomes = outcomes_of(pool, ["ok", f"share:400:{name}", "ok"])
        assert [o.failure for o in outcomes] == [None, "memory", None]
    with pool_of("by_word", workers=1) as pool:
        assert outcomes_of(pool, [f"share:1:{name}"])[0].failure == "timeout"
        assert outcomes_of(pool, [f"share:1:{name}:crash"])[0].failure == "died"
    assert not Path("/dev/shm", name).exists()


def test_a_call_that_lets_nothing_else_run_is_killed_with_its_worker():
    with pool_of("by_word", workers=1) as pool:
        assert [o.failure for o in outcomes_of(pool, ["deaf", "ok"])] == ["timeout", None]


def assert_gone(pid):
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} still runs")


def test_a_raising_function_stops_the_run_with_its_own_traceback(tmp_path):
    with pool_of("by_word", folder=tmp_path) as pool:
        with pytest.raises(RewardError) as caught:
            outcomes_of(pool, ["ok", "raise:my mistake"])
        message = str(caught.value)
        assert "raised for answer 0 to prompt 1" in message
        assert "KeyError: 'my mistake'" in message
        assert "reward_functions.py" in message
        assert "workers.py" not in message
        with pytest.raises(RewardError, match="my mistake"):
            pool.submit(Prompt(id=9), "ok")
    saved = json.loads((tmp_path / "reward-error.json").read_text())
    assert saved["answers"] == [
        {"prompt_id": 1, "sample_index": 0, "fields": {}, "response": "raise:my mistake"}
    ]


@pytest.mark.parametrize(
    ("response", "words"),
    [
        ("return:nan", "a reward must be a finite number, got nan"),
        ("return:string", "a reward must be a number or named parts, got 'good'"),
        ("return:none", "a reward must be a number or named parts, got None"),
        ("return:empty", "must have at least one"),
        ("return:1e300", r"a reward must lie between -1e+06 and 1e+06, got 1e+300; scale it"),
    ],
)
def test_what_is_no_reward_stops_the_run(response, words):
    with pool_of("by_word") as pool, pytest.raises(RewardError) as caught:
        outcomes_of(pool, [response])
    assert "gave no reward for answer 0 to prompt 0" in str(caught.value)
    assert f"The response to prompt 0 begins {response!r}" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("response", ["exit:3", "abort:3"])
def test_a_function_that_ends_the_process_is_tried_twice_and_the_worker_replaced(response, caplog):
    with pool_of("by_word") as pool:
        outcomes = outcomes_of(pool, ["ok", response, "ok"])
        assert [o.failure for o in outcomes] == [None, "died", None]
        assert pool.stats.workers.died == 2
        assert rewards_of(pool, ["ok"] * 4) == [1.0] * 4
    assert "the worker ended with status 3, twice" in caplog.text


def test_a_worker_that_dies_by_chance_costs_nothing(tmp_path):
    with pool_of("by_word") as pool:
        assert rewards_of(pool, [f"die-once:{tmp_path / 'mark'}", "ok"]) == [1.0, 1.0]
        assert not pool.stats.failures


def test_a_call_that_takes_too_much_memory_fails_alone():
    with pool_of("by_word", memory_gib=0.25, time_limit_seconds=20) as pool:
        outcomes = outcomes_of(pool, ["eat:2", "eat:200", "eat:2"])
        assert [o.failure for o in outcomes] == [None, "memory", None]
        assert rewards_of(pool, ["ok"]) == [1.0]


def test_what_a_function_prints_stays_out_of_the_results(capfd):
    with pool_of("by_word") as pool:
        rewards_of(pool, ["print:hello"])
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "hello" in captured.err


def test_async_calls_share_a_worker():
    with pool_of("later", workers=1, concurrency=80, time_limit_seconds=120) as pool:
        assert rewards_of(pool, ["meet:80"] * 80) == [1.0] * 80


def test_an_async_call_that_waits_too_long_ends_without_killing_the_worker():
    with pool_of("later", workers=1) as pool:
        assert [o.failure for o in outcomes_of(pool, ["x", "hang", "x"])] == [None, "timeout", None]
        assert pool.stats.workers.killed == 0


def test_an_async_call_that_blocks_takes_nobody_with_it():
    with pool_of("later", workers=1) as pool:
        outcomes = outcomes_of(pool, ["x", "block", "x"])
        assert [o.failure for o in outcomes] == [None, "timeout", None]


@pytest.mark.parametrize(
    ("response", "words"), [("raise", "KeyError: 'raise'"), ("own-timeout", "of the user")]
)
def test_an_async_function_that_raises_stops_the_run(response, words):
    with pool_of("later") as pool, pytest.raises(RewardError, match=words):
        outcomes_of(pool, ["x", response])


def test_an_async_function_that_ends_the_process_is_a_death():
    with pool_of("later", time_limit_seconds=30) as pool:
        assert [o.failure for o in outcomes_of(pool, ["exit", "x"])] == ["died", None]


def keep_busy(pool):
    """The worker is at work, so that what is submitted next queues up."""
    pool.submit(Prompt(id=99), "hang")
    time.sleep(0.2)


def test_a_batched_function_gets_many_answers_at_once():
    with pool_of("together", workers=1, batch=8) as pool:
        keep_busy(pool)
        outcomes = outcomes_of(pool, ["a" * n for n in range(20)])
        assert [o.score.reward for o in outcomes] == list(range(20))
        assert max(o.score.parts["batch"] for o in outcomes) == 8


def test_a_batch_that_hangs_is_tried_one_by_one():
    with pool_of("together", workers=1, batch=4) as pool:
        outcomes = outcomes_of(pool, ["a", "hang", "b"])
        assert [o.failure for o in outcomes] == [None, "timeout", None]


@pytest.mark.parametrize(
    ("word", "failure"), [("hang", "timeout"), ("eat", "memory"), ("abort", "died")]
)
def test_of_a_batch_that_fails_only_the_guilty_answer_is_punished(word, failure):
    with pool_of("together", workers=1, batch=8, memory_gib=0.25) as pool:
        keep_busy(pool)
        outcomes = outcomes_of(pool, ["a", "b", word, "c", "d"])
        assert [o.failure for o in outcomes] == [None, None, failure, None, None]
        assert [o.score.reward for o in outcomes] == [1, 1, 0, 1, 1]


def test_an_async_batched_function_gets_lists():
    with pool_of("later_together", workers=1, batch=4, concurrency=2) as pool:
        outcomes = outcomes_of(pool, ["a" * n for n in range(20)])
        assert [o.score.reward for o in outcomes] == list(range(20))
        assert max(o.score.parts["batch"] for o in outcomes) == 4


@pytest.mark.parametrize("word", ["hang", "block"])
def test_of_an_async_batch_that_fails_only_the_guilty_answer_is_punished(word):
    with pool_of("later_together", workers=1, batch=4, time_limit_seconds=0.8) as pool:
        outcomes = outcomes_of(pool, ["a", "b", word, "c", "d"])
        assert [o.failure for o in outcomes] == [None, None, "timeout", None, None]


def test_an_async_call_is_not_punished_for_one_that_blocks_later():
    with pool_of("later", workers=1, time_limit_seconds=0.8) as pool:
        waiting = pool.submit(Prompt(id=0), "nap")
        time.sleep(0.3)
        blocking = pool.submit(Prompt(id=1), "block")
        outcomes = pool.wait([waiting, blocking])
        assert [outcome.failure for outcome in outcomes] == [None, "timeout"]


def test_a_coroutine_where_a_number_should_be_is_refused_with_words():
    with pool_of("wrapped") as pool, pytest.raises(RewardError, match="declare the function with"):
        outcomes_of(pool, ["x"])


@pytest.mark.parametrize("form", ["generator", "array", "columns"])
def test_a_batch_may_be_scored_in_many_forms(form):
    with pool_of("in_many_forms", options={"form": form}, workers=1) as pool:
        assert rewards_of(pool, ["a" * n for n in range(7)]) == list(range(7))


def test_a_bad_score_in_a_batch_is_blamed_on_its_answer():
    with pool_of("in_many_forms", options={"form": "one bad"}, workers=1) as pool:
        with pytest.raises(RewardError, match="gave no reward for answer 0 to prompt 3 ") as caught:
            outcomes_of(pool, ["a" * n for n in range(6)])
        assert caught.value.response == "aaa"


def test_a_worker_imports_neither_numpy_nor_torch_by_itself():
    with pool_of("by_word", workers=1) as pool:
        assert rewards_of(pool, ["torch"]) == [0.0]


@pytest.mark.parametrize(
    ("address", "options", "expected"),
    [
        ("sortedrl.rewards.knights:logic_reward", {}, -3.0),
        ("sortedrl.rewards.knights:logic_reward", {"unparsable": -9.0}, -10.0),
        ("sortedrl.rewards.maths:math_reward", {}, 0.0),
        ("sortedrl.rewards.maths:math_reward", {"wrong": -1.0}, -1.0),
        ("sortedrl.rewards.maths:math_reward", {"wrong": 0.1, "no_answer": 0.2}, 0.0),
        (f"{FUNCTIONS}:declared", {"wrong": -4.0}, -4.0),
        (f"{FUNCTIONS}:scored_below_zero", {}, 0.0),
    ],
)
def test_an_answer_that_could_not_be_scored_gets_no_more_than_the_worst_one(
    address, options, expected
):
    with RewardPool(RewardSource(address, options), RewardSettings(workers=1)) as pool:
        assert pool.failure_reward == expected
    given = RewardSettings(workers=1, failure_reward=-0.5)
    with RewardPool(RewardSource(address, options), given) as pool:
        assert pool.failure_reward == -0.5


def test_a_failure_that_pays_is_warned_of(caplog):
    with pool_of("scored_below_zero", workers=1, time_limit_seconds=0.5) as pool:
        assert rewards_of(pool, ["x"]) == [-1.0]
        assert rewards_of(pool, ["hang"]) == [0.0]
    assert (
        "more than the -1 that the function gave another answer: set failure_reward" in caplog.text
    )


def test_a_batched_function_that_raises_saves_the_whole_batch(tmp_path):
    with pool_of("together", workers=1, folder=tmp_path) as pool:
        keep_busy(pool)
        with pytest.raises(
            RewardError, match="prompt 0, answer 0 to prompt 1, answer 0 to prompt 2 in"
        ):
            outcomes_of(pool, ["a", "b", "raise"])
    saved = json.loads((tmp_path / "reward-error.json").read_text())
    assert [answer["response"] for answer in saved["answers"]] == ["a", "b", "raise"]


def test_a_batched_function_must_score_every_answer():
    with pool_of("together", workers=1) as pool:
        keep_busy(pool)
        with pytest.raises(RewardError, match="one score for each of the 2 answers, got 1"):
            outcomes_of(pool, ["a", "short"])


def test_nobody_waits_for_a_cancelled_answer():
    with pool_of("by_word", workers=1, time_limit_seconds=600) as pool:
        hanging = pool.submit(Prompt(id=0), "hang")
        time.sleep(0.1)
        pool.cancel(hanging)
        began = time.monotonic()
        assert rewards_of(pool, ["ok"]) == [1.0]
        assert time.monotonic() - began < 300
        with pytest.raises(ValueError, match="cancelled"):
            pool.wait([hanging])


def test_the_pool_sleeps_while_it_waits_for_answers_beside_a_cancelled_one():
    with pool_of("later", workers=1, concurrency=2, time_limit_seconds=3) as pool:
        cancelled, wanted, _ = (pool.submit(Prompt(id=i), "hang") for i in range(3))
        time.sleep(0.2)
        pool.cancel(cancelled)
        began = time.process_time()
        pool.wait([wanted])
        assert time.process_time() - began < 1


def test_answers_somebody_waits_for_go_first():
    with pool_of("by_word", workers=1, time_limit_seconds=60) as pool:
        later = [pool.submit(Prompt(id=i), "sleep:0.2") for i in range(10)]
        wanted = pool.submit(Prompt(id=99), "ok")
        pool.wait([wanted])
        assert len(pool.completed()) < len(later) / 2


def test_a_cancelled_answer_that_raises_is_nobodys_business():
    with pool_of("by_word", workers=1) as pool:
        busy = pool.submit(Prompt(id=0), "sleep:0.3")
        raising = pool.submit(Prompt(id=1), "raise:x")
        pool.cancel(raising)
        pool.wait([busy])
        assert rewards_of(pool, ["ok"]) == [1.0]


def test_closing_ends_hanging_workers_at_once():
    pool = pool_of("by_word", time_limit_seconds=600)
    pool.submit(Prompt(id=0), "hang")
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 300
    with pytest.raises(RewardError, match="closed"):
        pool.submit(Prompt(id=0), "ok")


@pytest.mark.parametrize("word", ["child", "daemon:hang"])
def test_nothing_outlives_a_killed_parent(word, tmp_path):
    script = (
        "import os, sys, time\n"
        "from sortedrl.rewards.pool.pool import RewardPool\n"
        "from sortedrl.config.train import RewardSettings\n"
        "from sortedrl.rewards.functions import RewardSource\n"
        "from sortedrl.types import Prompt\n"
        f"pool = RewardPool(RewardSource({FUNCTIONS + ':by_word'!r}), RewardSettings(workers=1))\n"
        f"pool.submit(Prompt(id=0), '{word}:{tmp_path / 'pid'}')\n"
        f"while not os.path.exists({str(tmp_path / 'pid')!r}): time.sleep(0.01)\n"
        "time.sleep(0.2)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script], timeout=300, check=False)
    assert_gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("call", ["send('refused')", "recv()"])
def test_a_worker_whose_pool_has_gone_exits_without_a_traceback(call):
    """Such as the second of two workers that refuse the same source."""
    script = (
        "import socket\n"
        "from sortedrl.rewards.pool.process import PoolConnection\n"
        "ours, theirs = socket.socketpair()\n"
        "connection = PoolConnection(theirs.detach())\n"
        "ours.close()\n"
        f"connection.{call}\n"
        "print('still here')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], timeout=300, check=False, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("no_such_module:reward", "there is no module 'no_such_module'"),
        ("no/such/file.py:reward", "there is no file no/such/file.py"),
        (f"{FUNCTIONS}:lenght", "did you mean 'length'"),
        (f"{FUNCTIONS}:NotAFunction", "unknown function"),
        (f"{FUNCTIONS}:wants_three", r"must take \(prompt, response\)"),
        (FUNCTIONS, "unknown function 'reward'"),
    ],
)
def test_a_wrong_address_is_refused_at_once(address, words):
    with pytest.raises(ConfigError, match=words):
        RewardPool(RewardSource(address), RewardSettings(workers=1))


def test_an_unknown_option_is_refused_at_once():
    with pytest.raises(ConfigError, match="wrong_name"):
        pool_of("gold", options={"wrong_name": 1})


def test_a_module_that_raises_when_imported_shows_its_traceback(tmp_path):
    (tmp_path / "broken.py").write_text("import json\nraise OSError('no licence')\n")
    with pytest.raises(RewardError, match="cannot be loaded") as caught:
        RewardPool(RewardSource(f"{tmp_path / 'broken.py'}:reward"), RewardSettings(workers=1))
    assert "OSError: no licence" in str(caught.value)


def test_a_module_that_ends_the_process_when_imported_is_refused(tmp_path):
    (tmp_path / "ends.py").write_text("import os\nos._exit(4)\n")
    with pytest.raises(RewardError, match="ended with status 4 while it loaded"):
        RewardPool(RewardSource(f"{tmp_path / 'ends.py'}:reward"), RewardSettings(workers=1))


def test_files_beside_the_reward_can_be_imported_from_it(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    (tmp_path / "mine.py").write_text(
        "from beside import VALUE\n\ndef reward(prompt, response):\n    return VALUE\n"
    )
    with RewardPool(RewardSource(str(tmp_path / "mine.py")), RewardSettings(workers=1)) as pool:
        assert rewards_of(pool, ["x"]) == [7.0]


def test_a_file_called_like_a_module_does_not_take_its_place(tmp_path):
    (tmp_path / "json.py").write_text(
        "def reward(prompt, response):\n    import json\n    return json.loads(response)\n"
    )
    with RewardPool(RewardSource(str(tmp_path / "json.py")), RewardSettings(workers=1)) as pool:
        assert rewards_of(pool, ["2.5"]) == [2.5]


FAULTS = ("ok", "sleep:0.05", "hang", "abort:1", "exit:2")


@settings(max_examples=6, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(FAULTS), st.booleans()), min_size=1, max_size=9))
def test_every_answer_ends_exactly_once_whatever_happens(work):
    with pool_of("by_word", time_limit_seconds=1.0) as pool:
        tickets = [pool.submit(Prompt(id=i), what) for i, (what, _) in enumerate(work)]
        for ticket, (_, is_cancelled) in zip(tickets, work, strict=True):
            if is_cancelled:
                pool.cancel(ticket)
        wanted = [t for t, (_, gone) in zip(tickets, work, strict=True) if not gone]
        outcomes = pool.wait(wanted)
        assert [outcome.ticket for outcome in outcomes] == wanted
        for outcome in outcomes:
            what = work[tickets.index(outcome.ticket)][0].partition(":")[0]
            expected = {"hang": "timeout", "abort": "died", "exit": "died"}.get(what)
            assert outcome.failure == expected
        assert pool.completed() == []
        assert not pool._open


def test_the_parent_environment_is_inherited(monkeypatch, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os\n\ndef reward(prompt, response):\n    return float(os.environ['MY_NUMBER'])\n"
    )
    monkeypatch.setitem(os.environ, "MY_NUMBER", "5")
    with RewardPool(RewardSource(str(tmp_path / "mine.py")), RewardSettings(workers=1)) as pool:
        assert rewards_of(pool, ["x"]) == [5.0]
