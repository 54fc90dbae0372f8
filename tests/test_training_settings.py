"""The settings of algorithm and correction: what follows from a name, and what is refused."""

import math
from typing import get_args

import pytest

from sortedrl.config.algorithm import Algorithm, AlgorithmName, Correction
from sortedrl.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "aggregation", "place", "estimator"),
    [
        ("reinforce_pp", "token_mean", "reward", "k1"),
        ("reinforce_pp_baseline", "token_mean", "loss", "k2"),
        ("grpo", "sequence_mean", "loss", "k3"),
        ("dr_grpo", "constant", "loss", "k3"),
        ("rloo", "constant", "reward", "k1"),
        ("dapo", "token_mean", "loss", "k3"),
        ("ppo", "token_mean", "reward", "k1"),
    ],
)
def test_a_name_brings_its_aggregation_and_its_divergence(name, aggregation, place, estimator):
    own = Algorithm(name=name)
    assert own.effective_aggregation == aggregation
    assert (own.effective_kl_place, own.effective_kl_estimator) == (place, estimator)
    assert own.has_critic == (name == "ppo")
    assert own.needs_siblings == (name not in ("ppo", "reinforce_pp"))
    assert own.filters_zero_variance == (name == "dapo")


def test_what_is_given_goes_before_what_the_name_brings():
    own = Algorithm(
        name="dapo",
        aggregation="constant",
        kl_estimator="k2",
        kl_place="loss",
        clip_high=0.5,
        filter_zero_variance=False,
    )
    assert own.effective_aggregation == "constant"
    assert (own.effective_kl_place, own.effective_kl_estimator) == ("loss", "k2")
    assert own.effective_clip_high == 0.5
    assert not own.filters_zero_variance


@pytest.mark.parametrize("name", get_args(AlgorithmName))
def test_the_divergence_is_estimated_as_its_place_demands(name):
    assert Algorithm(name=name, kl_place="reward").effective_kl_estimator == "k1"
    assert Algorithm(name=name, kl_place="loss").effective_kl_estimator in ("k2", "k3")
    Algorithm(name=name, kl_place="reward", kl_estimator="k1")
    for estimator in ("k2", "k3"):
        Algorithm(name=name, kl_place="loss", kl_estimator=estimator)
        with pytest.raises(ConfigError, match="must be 'k1' where the KL divergence is in the rew"):
            Algorithm(name=name, kl_coef=0.1, kl_place="reward", kl_estimator=estimator)
    with pytest.raises(ConfigError, match=r"'k2' or 'k3' .* whose gradient is 0 on average"):
        Algorithm(name=name, kl_coef=0.1, kl_place="loss", kl_estimator="k1")


def test_an_estimator_must_fit_the_place_that_the_name_brings():
    with pytest.raises(ConfigError, match="set kl_place to 'loss'"):
        Algorithm(name="ppo", kl_estimator="k3")
    with pytest.raises(ConfigError, match="set kl_place to 'reward'"):
        Algorithm(name="grpo", kl_estimator="k1")


def test_the_upper_clip_is_the_lower_one_but_for_dapo():
    assert Algorithm(clip=0.1).effective_clip_high == 0.1
    assert Algorithm(name="dapo").effective_clip_high == 0.28


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "grp"}, "did you mean 'grpo'"),
        ({"aggregation": "token"}, "did you mean 'token_mean'"),
        ({"kl_estimator": "k4"}, "unknown algorithm.kl_estimator 'k4'"),
        ({"kl_place": "los"}, "did you mean 'loss'"),
        ({"clip": 1.0}, "clip must lie in"),
        ({"clip": math.nan}, "clip must lie in"),
        ({"clip_high": 0.0}, "clip_high must be above 0"),
        ({"dual_clip": 1.2}, "above 1 \\+ clip_high = 1.2"),
        ({"dual_clip": math.inf}, "dual_clip must be a finite number"),
        ({"kl_coef": -0.1}, "kl_coef must be at least 0"),
        ({"entropy_coef": math.inf}, "entropy_coef must be a finite number"),
        ({"discount": 1.1}, "discount must lie in 0..1"),
        ({"gae_lambda": -0.1}, "gae_lambda must lie in 0..1"),
        ({"value_clip": 0.0}, "value_clip must be above 0"),
        ({"filter_zero_variance": True}, "filter_zero_variance compares the answers"),
        ({"overlong_tokens": 0}, "overlong_tokens must be at least 1"),
        ({"overlong_penalty": -1.0}, "overlong_penalty must be at least 0"),
        ({"overlong_penalty": 0.5}, "overlong_penalty needs overlong_tokens, got 0.5 without"),
        ({"discount": 0.99}, "discount belongs to 'ppo', got 0.99 with 'reinforce_pp'"),
        ({"name": "grpo", "gae_lambda": 0.95}, "gae_lambda belongs to 'ppo', got 0.95 with 'grpo'"),
        ({"value_clip": None}, "value_clip belongs to 'ppo', got None"),
    ],
)
def test_an_algorithm_that_cannot_work_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        Algorithm(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "token_tiss"}, "did you mean 'token_tis'"),
        ({"ratio": "behavior"}, "did you mean 'behaviour'"),
        ({"max_ratio": 0.0}, "max_ratio must be above 0"),
        ({"max_ratio": math.inf}, "max_ratio must be a finite number"),
        ({"kind": "token_mis", "min_ratio": 2.0}, "must be below correction.max_ratio"),
        ({"kind": "token_mis", "min_ratio": -1.0}, "min_ratio must be at least 0"),
        ({"min_ratio": 0.5}, "min_ratio needs a kind that masks"),
        ({"kind": "token_tis", "min_ratio": 0.5}, "min_ratio needs a kind that masks"),
        ({"kind": "token_tis", "ratio": "behaviour"}, "needs kind 'none'"),
    ],
)
def test_a_correction_that_cannot_work_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        Correction(**given)


def test_stale_tokens_are_corrected_unless_the_clip_or_the_user_does_it():
    assert Correction().effective_kind(is_needed=True) == "token_tis"
    assert Correction().effective_kind(is_needed=False) == "none"
    assert Correction(ratio="behaviour").effective_kind(is_needed=True) == "none"
    assert Correction(kind="none").effective_kind(is_needed=True) == "none"
    assert Correction(kind="token_mis").effective_kind(is_needed=False) == "token_mis"
