"""Advantages: every formula against loops over floats, and the cases where nothing can be told."""

import json
import math
import statistics
from dataclasses import dataclass, replace
from random import Random
from typing import get_args

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import plain_algorithms as plain
from sortedrl.config.algorithm import Algorithm, AlgorithmName
from sortedrl.errors import ConfigError
from sortedrl.training.advantages import (
    RunningMoments,
    estimate,
    has_reward_variance,
    overlong_shaped,
)
from sortedrl.training.batch import Answers

NAMES = get_args(AlgorithmName)
GROUP_NAMES = tuple(name for name in NAMES if name not in ("reinforce_pp", "ppo"))
LIMIT = 12
few = settings(max_examples=40)


@dataclass(frozen=True)
class Small:
    """A small batch as lists: one entry per answer, or one list per answer."""

    rewards: list
    prompts: list
    kl: list
    values: list

    @property
    def lengths(self):
        return [len(own) for own in self.kl]

    @property
    def answers(self):
        tokens = sum(self.lengths)
        return Answers(
            lengths_N=torch.tensor(self.lengths),
            rewards_N=torch.tensor(self.rewards, dtype=torch.float64),
            prompts_N=torch.tensor(self.prompts),
            is_truncated_N=torch.zeros(len(self.rewards), dtype=torch.bool),
            behaviour_T=torch.zeros(tokens),
            staleness_T=torch.zeros(tokens, dtype=torch.long),
        )


def flat(lists):
    return torch.tensor([value for own in lists for value in own], dtype=torch.float64)


def small(rewards, *, lengths=None, prompts=None):
    """A batch without divergence and with a critic that expects nothing."""
    lengths = lengths or [3] * len(rewards)
    zeros = [[0.0] * length for length in lengths]
    return Small(rewards, prompts or [7] * len(rewards), zeros, zeros)


def found(batch, algorithm, *, last=None):
    return estimate(
        batch.answers,
        algorithm,
        max_tokens=LIMIT,
        kl_T=flat(batch.kl),
        values_T=flat(batch.values),
        last_values_N=None if last is None else torch.tensor(last),
    )


def expected(batch, algorithm, *, last=None):
    return plain.advantages(
        algorithm,
        max_tokens=LIMIT,
        rewards=batch.rewards,
        prompts=batch.prompts,
        kl=batch.kl,
        values=batch.values,
        last=last,
    )


def per_answer(advantages_T, batch):
    """The advantage of each answer, which all of its tokens must have."""
    parts = advantages_T.split(batch.lengths)
    assert all((part == part[0]).all() for part in parts)
    return [float(part[0]) for part in parts]


@st.composite
def batches(draw):
    """One to eight answers of one to twelve tokens to up to four prompts."""
    size = draw(st.integers(1, 8))
    lengths = draw(st.lists(st.integers(1, LIMIT), min_size=size, max_size=size))
    rewards = st.sampled_from((0.0, 1.0)) | st.sampled_from((-1.5, 0.1, 0.3, 0.7, 2.0, 16.0))
    random = Random(draw(st.integers(0, 2**16)))
    return Small(
        draw(st.lists(rewards, min_size=size, max_size=size)),
        draw(st.lists(st.integers(10, 13), min_size=size, max_size=size)),
        [[random.randint(-40, 40) / 16 for _ in range(n)] for n in lengths],
        [[random.randint(-40, 40) / 16 for _ in range(n)] for n in lengths],
    )


@st.composite
def algorithms(draw, names=NAMES):
    given = {
        "name": draw(st.sampled_from(names)),
        "kl_coef": draw(st.sampled_from((0.0, 0.01, 0.5))),
        "kl_place": draw(st.sampled_from((None, "reward", "loss"))),
        "overlong_tokens": draw(st.sampled_from((None, 1, 5, 20))),
    }
    if given["overlong_tokens"] is not None:
        given["overlong_penalty"] = draw(st.sampled_from((1.0, 0.25)))
    if given["name"] in ("grpo", "dr_grpo", "dapo"):
        given["scale_rewards"] = draw(st.sampled_from((None, "group", "batch", "none")))
    if given["name"] == "ppo":
        given["discount"] = draw(st.sampled_from((1.0, 0.99, 0.5, 0.0)))
        given["gae_lambda"] = draw(st.sampled_from((1.0, 0.95, 0.0)))
    return Algorithm(**given)


@settings(max_examples=200)
@given(batches(), algorithms())
def test_advantages_are_those_of_the_plain_formulas(batch, algorithm):
    ours = found(batch, algorithm)
    theirs, returns = expected(batch, algorithm)
    assert ours.advantages_T.dtype == torch.float32
    # 2e-7: the float32 of what is equal in float64.
    torch.testing.assert_close(
        ours.advantages_T, flat(theirs).float(), rtol=2e-7, atol=1e-8, equal_nan=False
    )
    assert (returns is None) == (ours.returns_T is None)
    if returns is not None:
        torch.testing.assert_close(ours.returns_T, flat(returns).float(), rtol=2e-7, atol=1e-9)


@few
@given(batches(), algorithms(GROUP_NAMES))
def test_an_answer_without_siblings_has_no_advantage(batch, algorithm):
    lone = replace(batch, prompts=[99, *batch.prompts[1:]])
    advantages = found(lone, algorithm).advantages_T
    assert (advantages[: lone.lengths[0]] == 0).all()
    assert advantages.isfinite().all()


@few
@given(batches(), st.sampled_from(NAMES), st.sampled_from((0.0, 0.1, 1 / 3, 1e6 + 0.1, -7e12)))
def test_equal_rewards_give_advantages_of_exactly_0(batch, name, reward):
    """Also where the mean of the rewards is rounded, and whatever the lengths."""
    rewards = [reward] * len(batch.rewards)
    equal = small(rewards, lengths=batch.lengths, prompts=batch.prompts)
    assert (found(equal, Algorithm(name=name)).advantages_T == 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("reward", "size"), [(0.1, 3), (1e6 + 0.1, 7)])
def test_a_mean_that_is_rounded_leaves_nothing_behind(name, reward, size):
    assert torch.full((size,), reward, dtype=torch.float64).mean() != reward
    batch = small([reward] * size, lengths=[1] * size)
    assert found(batch, Algorithm(name=name)).advantages_T.tolist() == [0.0] * size


@few
@given(batches(), algorithms(("reinforce_pp", "ppo")), st.permutations(range(8)))
def test_the_order_of_the_answers_changes_no_advantage(batch, algorithm, order):
    order = [number for number in order if number < len(batch.rewards)]
    columns = (batch.rewards, batch.prompts, batch.kl, batch.values)
    shuffled = Small(*([column[n] for n in order] for column in columns))
    before = found(batch, algorithm).advantages_T.split(batch.lengths)
    after = found(shuffled, algorithm).advantages_T.split(shuffled.lengths)
    for place, number in enumerate(order):
        torch.testing.assert_close(after[place], before[number], rtol=1e-6, atol=1e-8)


@few
@given(batches(), algorithms(GROUP_NAMES), st.sampled_from((-4.0, 0.5, 128.0)))
def test_a_constant_added_to_all_rewards_of_a_prompt_changes_nothing(batch, algorithm, constant):
    """Unless rewards are scaled by the deviation of all prompts together."""
    assume(algorithm.scale_rewards != "batch")
    first = batch.prompts[0]
    moved = [
        reward + constant * (prompt == first)
        for reward, prompt in zip(batch.rewards, batch.prompts, strict=True)
    ]
    after = found(replace(batch, rewards=moved), algorithm).advantages_T
    torch.testing.assert_close(after, found(batch, algorithm).advantages_T, rtol=1e-5, atol=1e-6)


def test_grpo_divides_by_the_spread_of_the_siblings():
    batch = small([1.0, 0.0, 0.0, 5.0, 3.0], prompts=[1, 1, 1, 2, 2])
    ours = per_answer(found(batch, Algorithm(name="grpo")).advantages_T, batch)
    spread = math.sqrt(((2 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2)
    by_hand = [2 / 3 / spread, -1 / 3 / spread, -1 / 3 / spread, 1 / 2**0.5, -1 / 2**0.5]
    assert ours == pytest.approx(by_hand, rel=1e-5)


def test_dr_grpo_subtracts_the_mean_only():
    batch = small([1.0, 0.0, 0.0, 5.0, 3.0], prompts=[1, 1, 1, 2, 2])
    ours = per_answer(found(batch, Algorithm(name="dr_grpo")).advantages_T, batch)
    assert ours == pytest.approx([2 / 3, -1 / 3, -1 / 3, 1.0, -1.0])


def test_rloo_subtracts_the_mean_of_the_others():
    batch = small([1.0, 0.0, 0.0, 5.0, 3.0], prompts=[1, 1, 1, 2, 2])
    ours = per_answer(found(batch, Algorithm(name="rloo")).advantages_T, batch)
    assert ours == pytest.approx([1.0, -0.5, -0.5, 2.0, -2.0])


def test_rloo_takes_the_divergence_of_the_whole_answer_from_its_reward():
    batch = replace(small([1.0, 1.0], lengths=[2, 1]), kl=[[1.0, 2.0], [0.5]])
    ours = per_answer(found(batch, Algorithm(name="rloo", kl_coef=0.1)).advantages_T, batch)
    assert ours == pytest.approx([-0.25, 0.25])


def test_reinforce_pp_whitens_over_tokens_so_a_long_answer_moves_the_mean_more():
    batch = small([1.0, 0.0], lengths=[3, 1])
    ours = per_answer(found(batch, Algorithm()).advantages_T, batch)
    # Mean 3/4 and variance (3 * 1/16 + 9/16) / 3 = 1/4 of the tokens 1, 1, 1, 0.
    assert ours == pytest.approx([0.5, -1.5], rel=1e-5)


def test_reinforce_pp_charges_a_token_for_its_own_divergence_and_all_after_it():
    batch = replace(small([1.0], lengths=[3]), kl=[[1.0, 2.0, 3.0]])
    ours = found(batch, Algorithm(kl_coef=0.1)).advantages_T
    # Returns 0.4, 0.5, 0.7 with mean 1.6 / 3.
    returns = torch.tensor([0.4, 0.5, 0.7])
    torch.testing.assert_close(ours, (returns - returns.mean()) / returns.std(), rtol=1e-4, atol=0)


def test_the_group_baseline_leaves_lone_answers_out_of_the_whitening():
    batch = small([1.0, 0.0, 100.0], lengths=[3, 1, 5], prompts=[1, 1, 2])
    ours = per_answer(found(batch, Algorithm(name="reinforce_pp_baseline")).advantages_T, batch)
    # Of the tokens 0.5, 0.5, 0.5, -0.5: mean 1/4, standard deviation 1/2.
    assert ours == pytest.approx([0.5, -1.5, 0.0], rel=1e-5)


def test_ppo_without_discount_or_critic_spreads_the_reward_over_the_answer():
    batch = replace(small([1.0], lengths=[2]), values=[[0.25, 0.5]])
    ours = found(batch, Algorithm(name="ppo"))
    assert ours.returns_T.tolist() == [1.0, 1.0]
    whitened = [0.125 / math.sqrt(2 * 0.125**2)]
    assert ours.advantages_T.tolist() == pytest.approx([whitened[0], -whitened[0]], rel=1e-5)


def test_ppo_that_trusts_the_critic_only_looks_one_token_ahead():
    batch = replace(small([1.0], lengths=[3]), values=[[0.5, 0.25, 0.75]])
    ours = found(batch, Algorithm(name="ppo", gae_lambda=0.0, discount=0.5))
    assert ours.returns_T.tolist() == [0.125, 0.375, 1.0]


def test_rewards_scaled_by_the_batch_keep_the_differences_between_prompts():
    """Rewards 0, 1 and 0, 3 of two prompts: the deviation of all is the square root of 2."""
    batch = small([0.0, 1.0, 0.0, 3.0], prompts=[1, 1, 2, 2])
    algorithm = Algorithm(name="grpo", scale_rewards="batch")
    ours = per_answer(found(batch, algorithm).advantages_T, batch)
    by = math.sqrt(2)
    assert ours == pytest.approx([-0.5 / by, 0.5 / by, -1.5 / by, 1.5 / by], rel=1e-5)


@few
@given(batches(), algorithms(names=("ppo",)), st.integers(0, 1000))
def test_a_truncated_answer_continues_with_the_value_at_its_cut(batch, algorithm, seed):
    random = Random(seed)
    last = [random.choice((0.0, random.randint(-16, 16) / 8)) for _ in batch.rewards]
    ours = found(batch, algorithm, last=last)
    theirs, returns = expected(batch, algorithm, last=last)
    torch.testing.assert_close(ours.advantages_T, flat(theirs).float(), rtol=2e-7, atol=1e-8)
    torch.testing.assert_close(ours.returns_T, flat(returns).float(), rtol=2e-7, atol=1e-9)


def test_a_batch_of_one_token_has_no_advantage_under_any_algorithm():
    batch = small([3.0], lengths=[1])
    for name in NAMES:
        assert found(batch, Algorithm(name=name)).advantages_T.tolist() == [0.0]


def test_the_divergence_is_not_in_the_reward_when_it_is_in_the_loss():
    batch = replace(small([1.0, 0.0]), kl=[[5.0] * 3, [9.0] * 3])
    for name in NAMES:
        place = Algorithm(name=name, kl_coef=0.5, kl_place="loss")
        without = found(batch, Algorithm(name=name)).advantages_T
        assert torch.equal(found(batch, place).advantages_T, without)


def test_overlong_answers_lose_reward_linearly_up_to_the_penalty():
    lengths = torch.tensor([1, 80, 85, 90, 100, 130])
    shaped = overlong_shaped(
        torch.ones(6, dtype=torch.float64),
        lengths,
        max_tokens=100,
        overlong_tokens=20,
        penalty=2.0,
    )
    assert shaped.tolist() == [1.0, 1.0, 0.5, 0.0, -1.0, -1.0]


@few
@given(batches())
def test_an_answer_informs_where_the_rewards_of_its_prompt_differ(batch):
    theirs = [
        len({batch.rewards[n] for n in plain.siblings(batch.prompts, number)}) > 1
        for number in range(len(batch.rewards))
    ]
    assert has_reward_variance(batch.answers).tolist() == theirs


def test_sums_reach_to_the_end_of_long_answers_among_short_ones():
    lengths = [1, 1000, 1, 333, 1]
    kl = [[((7 * n + place) % 11) / 8 for place in range(size)] for n, size in enumerate(lengths)]
    batch = Small([0.0] * 5, [0, 1, 2, 3, 4], kl, kl)
    for algorithm in (
        Algorithm(kl_coef=0.5),
        Algorithm(name="ppo", discount=0.99, gae_lambda=0.95),
    ):
        theirs = flat(expected(batch, algorithm)[0]).float()
        torch.testing.assert_close(
            found(batch, algorithm).advantages_T, theirs, rtol=1e-6, atol=1e-8
        )


def by_token(batch):
    """The reward of each token's answer."""
    pairs = zip(batch.rewards, batch.lengths, strict=True)
    return [reward for reward, length in pairs for _ in range(length)]


def whitened_over(batches, *, window):
    """The advantages of several updates in turn, whitened over the last of them."""
    moments = RunningMoments(window)
    return [
        estimate(
            batch.answers, Algorithm(whiten="group"), max_tokens=LIMIT, moments=moments
        ).advantages_T
        for batch in batches
    ]


@few
@given(batches=st.lists(batches(), min_size=1, max_size=5), window=st.integers(1, 5))
def test_over_a_group_advantages_are_whitened_by_all_tokens_of_its_updates(batches, window):
    for place, advantages_T in enumerate(whitened_over(batches, window=window)):
        last = batches[max(0, place - window + 1) : place + 1]
        tokens = [
            r for b in last for r, n in zip(b.rewards, b.lengths, strict=True) for _ in range(n)
        ]
        if len(tokens) < 2:
            continue
        mean, spread = statistics.fmean(tokens), statistics.stdev(tokens)
        own = [(reward - mean) / (spread + 1e-6) for reward in by_token(batches[place])]
        assert advantages_T.tolist() == pytest.approx(own, abs=1e-4)


def test_a_window_of_one_update_is_the_batch_itself():
    batch = small([1.0, 0.0, 0.5], lengths=[2, 5, 1])
    (over_group,) = whitened_over([batch], window=1)
    assert over_group.tolist() == pytest.approx(found(batch, Algorithm()).advantages_T.tolist())


def test_over_a_group_short_wrong_answers_are_worse_than_long_right_ones():
    short, long = small([0.0, 0.0], lengths=[2, 2]), small([1.0, 1.0], lengths=[9, 9])
    assert found(short, Algorithm()).advantages_T.tolist() == [0.0] * 4
    first, second, third = whitened_over([short, long, short], window=2)
    assert first.tolist() == [0.0] * 4
    assert min(second.tolist()) > 0 > max(third.tolist())


@given(reward=st.floats(-3, 3), counts=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_equal_rewards_over_a_group_give_exactly_0(reward, counts):
    for advantages_T in whitened_over([small([reward] * n) for n in counts], window=3):
        assert not advantages_T.any()


def test_running_moments_go_on_from_a_checkpoint_to_the_last_bit():
    values = [torch.tensor([0.1, 0.7, 0.3 * n], dtype=torch.float64) for n in range(6)]
    whole, cut = RunningMoments(3), RunningMoments(3)
    for value in values[:4]:
        whole.whitened(value, floor=1e-6)
        cut.whitened(value, floor=1e-6)
    resumed = RunningMoments(3)
    resumed.load_state(json.loads(json.dumps(cut.state())))
    for value in values[4:]:
        assert torch.equal(whole.whitened(value, floor=1e-6), resumed.whitened(value, floor=1e-6))


def test_whitening_over_a_group_is_refused_where_siblings_or_a_critic_are_the_measure():
    with pytest.raises(ConfigError, match="reinforce_pp"):
        Algorithm(name="grpo", whiten="group")
