"""The scorer in the loop: every trained answer has the reward of exactly that answer."""

import time
from dataclasses import replace
from itertools import pairwise
from math import isfinite
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.config.data import RewardSettings
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.core.events import Finish, Score, Update
from sortedrl.rewards.functions import RewardSource, source_of
from sortedrl.rewards.pool.pool import PoolScorer, RewardPool
from sortedrl.rewards.pool.score import NoScoreError, checked_score, values_of_batch
from sortedrl.simulate.lengths import LengthSettings
from sortedrl.simulate.settings import Simulation
from sortedrl.types import LARGEST_REWARD
from worlds import done, fresh, make_loop, simulations

FUNCTIONS = str(Path(__file__).with_name("reward_functions.py"))


def words(trajectory):
    return "x" * trajectory.num_tokens


@pytest.fixture(scope="module")
def pool():
    with RewardPool(RewardSource(f"{FUNCTIONS}:length"), RewardSettings(workers=1)) as pool:
        yield pool


@settings(deadline=None, max_examples=25)
@given(simulation=simulations())
def test_in_every_strategy_and_mode_answers_are_trained_with_their_own_reward(pool, simulation):
    loop, _ = make_loop(simulation)
    for batch in replace(loop, scorer=PoolScorer(pool, text=words)).run():
        for trajectory in batch.trajectories:
            assert trajectory.reward == trajectory.num_tokens
    assert pool.completed() == []


def test_an_answer_that_was_never_submitted_is_scored_when_it_is_collected(pool):
    answer = done(fresh(0), tokens=4)
    (scored,) = PoolScorer(pool, text=words).collect([answer])
    assert scored == replace(answer, reward=4.0)


@settings(deadline=None, max_examples=25)
@given(simulation=simulations())
def test_every_update_follows_the_scores_of_exactly_its_answers(pool, simulation):
    loop, events = make_loop(simulation)
    clock = loop.journal._seconds
    scorer = PoolScorer(pool, text=words, seconds=clock)
    for _ in replace(loop, scorer=scorer).run():
        pass
    finished = {}
    for before, event in pairwise(events):
        if isinstance(event, Finish):
            finished[event.prompt, event.sample] = event.seconds
        if not isinstance(event, Update):
            continue
        assert isinstance(before, Score)
        assert [s[:2] for s in before.scored] == [t[:2] for t in event.trained]
        for scored, trained in zip(before.scored, event.trained, strict=True):
            assert scored.reward == trained.tokens
            assert scored.worker == 0
            assert scored.took_seconds >= 0
            # virtual seconds stand still while a real worker is waited for
            assert scored.start >= finished[scored.prompt, scored.sample]


def test_the_time_of_scoring_is_told_in_seconds_of_the_run():
    with RewardPool(RewardSource(f"{FUNCTIONS}:by_word"), RewardSettings(workers=2)) as pool:
        began = time.monotonic()
        scorer = PoolScorer(pool, text=lambda _: "ok", seconds=lambda: time.monotonic() - began)
        answers = scorer.collect([done(fresh(number)) for number in range(6)])
        ended = time.monotonic() - began
    for answer in answers:
        assert 0 <= answer.scoring.start <= answer.scoring.start + answer.scoring.seconds <= ended
    assert {answer.scoring.worker for answer in answers} <= {0, 1}


def test_without_rewards_there_is_no_score_event():
    loop, events = make_loop(
        Simulation(groups=1, schedule=Schedule(group_prompts=4, update_batch=2))
    )
    for _ in loop.run():
        pass
    assert any(isinstance(event, Update) for event in events)
    assert not any(isinstance(event, Score) for event in events)


def test_cancelling_an_answer_that_was_never_submitted_does_nothing(pool):
    PoolScorer(pool, text=words).cancel(fresh(0))


def test_an_answer_without_a_reward_stays_without():
    settings = RewardSettings(workers=1, time_limit_seconds=0.2, on_failure="skip")
    with RewardPool(RewardSource(f"{FUNCTIONS}:by_word"), settings) as pool:
        scorer = PoolScorer(pool, text=lambda _: "hang")
        (answer,) = scorer.collect([done(fresh(0))])
    assert answer.reward is None


def test_a_round_does_not_wait_for_the_rewards_of_renewed_answers():
    """A first run tells which answers are renewed; in the second their reward hangs."""
    simulation = Simulation(
        groups=1,
        schedule=Schedule(
            mode="on_policy",
            group_prompts=6,
            samples_per_prompt=3,
            update_batch=3,
            harvest_unit="prompt",
        ),
        engine=EngineSettings(slots=4, max_tokens=200),
        lengths=LengthSettings(median=20, sigma=1.0),
    )
    noted = _CancelNotes()
    trained = trained_keys(simulation, noted)
    assert noted.cancelled
    settings = RewardSettings(workers=6, time_limit_seconds=100)
    with RewardPool(RewardSource(f"{FUNCTIONS}:by_word"), settings) as pool:
        scorer = PoolScorer(
            pool, text=lambda t: "hang" if (t.key, t.attempt) in noted.cancelled else "ok"
        )
        assert trained_keys(simulation, scorer) == trained
        assert not pool.stats.failures, "somebody waited for a cancelled answer"


def trained_keys(simulation, scorer):
    loop, _ = make_loop(simulation)
    return [t.key for batch in replace(loop, scorer=scorer).run() for t in batch.trajectories]


class _CancelNotes:
    def __init__(self):
        self.cancelled = set()

    def submit(self, trajectory):
        pass

    def cancel(self, trajectory):
        self.cancelled.add((trajectory.key, trajectory.attempt))

    def collect(self, trajectories):
        return trajectories


def test_a_number_of_numpy_or_torch_is_a_reward():
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    assert checked_score(numpy.float32(0.5)).reward == 0.5
    assert checked_score(torch.tensor(0.5)).reward == 0.5
    assert checked_score(True).reward == 1.0
    for array in (numpy.array(0.5), numpy.array([[0.5]]), torch.tensor([0.5], requires_grad=True)):
        assert checked_score(array).reward == 0.5
        assert checked_score({"reward": array, "part": array}).parts == {"part": 0.5}
    for array in (numpy.array([0.5, 0.5]), numpy.array([]), numpy.array("0.5"), torch.zeros(2)):
        with pytest.raises(NoScoreError):
            checked_score(array)


@given(st.floats(), st.floats())
def test_a_reward_is_finite_and_of_a_size_that_training_can_take(one, two):
    for returned in (one, {"reward": one}, {"reward": one, "part": 1e300}, {"a": one, "b": two}):
        try:
            score = checked_score(returned)
        except NoScoreError:
            continue
        assert abs(score.reward) <= LARGEST_REWARD
        assert all(map(isfinite, score.parts.values()))


@pytest.mark.parametrize("returned", [1e300, -1e7, 10**400, {"a": 1e308, "b": 1e308}, 1e6 + 1j])
def test_a_reward_that_is_too_large_is_refused(returned):
    with pytest.raises(NoScoreError):
        checked_score(returned)


def test_a_batch_may_be_scored_with_arrays_and_tensors():
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    rewards = [0.5, -1.0, 2.0]
    tensor = torch.tensor(rewards, requires_grad=True)
    for returned in (
        *(rewards, tuple(rewards), iter(rewards), numpy.array(rewards), tensor, tensor.bfloat16()),
        *(numpy.array(rewards)[:, None], [numpy.float32(r) for r in rewards], list(tensor)),
        *([{"reward": r} for r in tensor], {"reward": tensor, "part": numpy.ones(3)}),
        *([{"a": numpy.array(r), "b": True} for r in (-0.5, -2.0, 1.0)], {"a": rewards}),
    ):
        assert [checked_score(v).reward for v in values_of_batch(returned, 3)] == rewards
    with pytest.raises(NoScoreError):
        checked_score(values_of_batch(numpy.ones((3, 2)), 3)[0])


def test_a_batch_is_one_value_for_each_answer():
    assert values_of_batch({"a": [1, 2], "b": (3, 4)}, 2) == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]
    for returned in ([1], [1, 2, 3], {1, 2}, "12", None, {}, 2.0, {"a": [1]}):
        with pytest.raises(NoScoreError):
            values_of_batch(returned, 2)


def test_a_part_named_reward_is_the_reward_and_the_rest_is_for_the_log():
    score = checked_score({"reward": 3, "length": 112, "correct": 1})
    assert score.reward == 3.0
    assert score.parts == {"length": 112.0, "correct": 1.0}


def test_an_answer_counts_as_right_by_its_part_or_by_its_reward():
    assert checked_score({"reward": -1, "correct": 1}).is_correct(1.0)
    assert not checked_score({"reward": 5, "correct": 0}).is_correct(1.0)
    assert checked_score(1.0).is_correct(1.0)
    assert not checked_score(0.9).is_correct(1.0)


@pytest.mark.parametrize("returned", ["1", b"1", None, [], {1: 2.0}, {"a": "b"}, float("inf")])
def test_what_is_no_score_is_refused(returned):
    with pytest.raises(NoScoreError):
        checked_score(returned)


def test_a_function_at_the_top_of_a_module_has_a_source():
    source = source_of(done, tokens=3)
    assert source == RewardSource("worlds:done", {"tokens": 3})


def test_a_function_that_workers_cannot_import_is_refused():
    with pytest.raises(ValueError, match="top of a module"):
        source_of(lambda prompt, response: 1.0)
