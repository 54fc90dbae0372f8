"""The settings of algorithm and correction: what follows from a name, and what is refused."""

import math
from dataclasses import replace
from typing import get_args

import pytest

from sortedrl.config.algorithm import Algorithm, AlgorithmName, Correction, Optimisation
from sortedrl.config.train import TrainSettings
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
        ("gspo", "sequence_mean", "loss", "k3"),
        ("cispo", "token_mean", "loss", "k3"),
        ("sapo", "sequence_mean", "loss", "k3"),
        ("gmpo", "sequence_mean", "loss", "k3"),
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


def test_the_upper_clip_is_the_lower_one_unless_the_algorithm_has_its_own():
    assert Algorithm(clip=0.1).effective_clip_high == 0.1
    assert Algorithm(name="dapo").effective_clip_high == 0.28
    assert Algorithm(name="dapo", clip=0.1).effective_clip_high == 0.28


def test_a_loss_brings_its_clip_whatever_the_algorithm():
    for own in (
        Algorithm(name="gspo"),
        Algorithm(loss="gspo"),
        Algorithm(name="dapo", loss="gspo"),
    ):
        assert (own.effective_clip, own.effective_clip_high) == (3e-4, 4e-4)
    own = Algorithm(name="gspo", clip=0.01)
    assert (own.effective_clip, own.effective_clip_high) == (0.01, 0.01)
    own = Algorithm(name="gspo", loss="clip")
    assert (own.effective_clip, own.effective_clip_high) == (0.2, 0.2)


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
        ({"loss": "gsp"}, "did you mean 'gspo'"),
        ({"advantage": "grou"}, "did you mean 'group'.*or a function as my_file.py:my_function"),
        ({"name": "cispo", "dual_clip": 3.0}, "dual_clip belongs to the losses clip, gspo, gspo_t"),
        ({"loss": "sapo", "clip": 0.1}, "got them with 'sapo', which has no clip range"),
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
        ({"critic_learning_rate": 1e-5}, "critic_learning_rate belongs to 'ppo'"),
        ({"name": "rloo", "critic_warmup_steps": 3}, "critic_warmup_steps belongs to 'ppo'"),
        ({"scale_rewards": "batch"}, "scale_rewards belongs to the advantage 'group'"),
        ({"name": "rloo", "scale_rewards": "group"}, "got it with 'leave_one_out'"),
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
        ({"min_ratio": 0.5}, "min_ratio needs a kind that weights tokens"),
        ({"kind": "none", "min_ratio": 0.5}, "min_ratio needs a kind that weights tokens"),
        ({"mask": "geometry"}, "did you mean 'geometric'"),
        ({"mask": "token", "mask_min_ratio": 3.0}, "must be below correction.mask_max_ratio"),
        ({"mask_max_ratio": 1.1}, "mask_max_ratio need a mask, got 0.5 and 1.1 without"),
        ({"scale_by_ess": "tokens"}, "did you mean 'token'"),
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


def test_the_critic_has_the_learning_rate_of_the_policy_unless_it_has_its_own():
    optimiser = Optimisation(learning_rate=1e-6, warmup_steps=4, weight_decay=0.1)
    shared = TrainSettings(algorithm=Algorithm(name="ppo"), optimiser=optimiser)
    assert shared.update.critic_optimiser == optimiser
    own = Algorithm(name="ppo", critic_learning_rate=1e-5, critic_warmup_steps=0)
    found = TrainSettings(algorithm=own, optimiser=optimiser).update.critic_optimiser
    assert found == replace(optimiser, learning_rate=1e-5, warmup_steps=0)


def test_a_weighted_divergence_must_be_in_the_loss():
    weighted = Correction(weight_kl=True)
    with pytest.raises(ConfigError, match=r"weight_kl weights the KL divergence in the loss"):
        TrainSettings(correction=weighted)
    with pytest.raises(ConfigError, match=r"kl_coef 0\.1 and kl_place 'reward'"):
        TrainSettings(correction=weighted, algorithm=Algorithm(kl_coef=0.1))
    TrainSettings(correction=weighted, algorithm=Algorithm(kl_coef=0.1, kl_place="loss"))
