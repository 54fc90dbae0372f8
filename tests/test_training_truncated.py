"""Answers that were cut off at the token limit: trained on, masked, or continued by the critic."""

from dataclasses import replace

import pytest
import torch

from native_worlds import tiny_model
from sortedrl.config.algorithm import Algorithm
from sortedrl.config.schedule import Schedule
from sortedrl.errors import ConfigError
from sortedrl.training.batch import Answers, TokenSequence
from sortedrl.types import TrainBatch
from training_worlds import train_settings, trainer_of, written

LENGTHS = [5, 24, 3, 24]


def answers(model, *, cut=(1, 3)):
    return [
        replace(t, finish_reason="length" if number in cut else "stop")
        for number, t in enumerate(written(model, LENGTHS))
    ]


def updated(algorithm, *, cut=(1, 3), pass_tokens=4096):
    """The trainer after one update."""
    model = tiny_model(std=0.3)
    settings = train_settings(
        algorithm=algorithm,
        schedule=Schedule(group_prompts=4, update_batch=4),
        pass_tokens=pass_tokens,
    )
    trainer = trainer_of(model, settings)
    trainer.update(TrainBatch(0, tuple(answers(model, cut=cut))))
    return trainer


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_answers_know_whether_they_were_truncated():
    trajectories = answers(tiny_model(std=0.3))
    assert Answers.of(trajectories, version=0).is_truncated_N.tolist() == [False, True, False, True]


@pytest.mark.parametrize("truncated", ["train", "mask", "bootstrap"])
def test_without_truncated_answers_the_setting_changes_nothing(truncated):
    plain = updated(Algorithm(name="ppo"), cut=())
    other = updated(Algorithm(name="ppo", truncated=truncated), cut=())
    assert torch.equal(weights(plain.model), weights(other.model))
    assert torch.equal(weights(plain.critic.critic), weights(other.critic.critic))


def test_masked_answers_have_no_loss_in_policy_and_critic():
    """With all of them masked neither model moves; with some the update is another."""
    start = tiny_model(std=0.3)
    everything = updated(Algorithm(name="ppo", truncated="mask"), cut=(0, 1, 2, 3))
    assert torch.equal(weights(everything.model), weights(start))
    assert everything.last["loss"] == 0
    assert everything.last["value_loss"] == 0
    assert everything.last["length/truncated"] == 1
    some = updated(Algorithm(truncated="mask"))
    assert some.last["length/truncated"] == 0.5
    assert not torch.equal(weights(some.model), weights(updated(Algorithm()).model))


def test_the_value_at_the_cut_is_the_critics_value_of_the_whole_text():
    algorithm = Algorithm(name="ppo", truncated="bootstrap", gae_lambda=0.9)
    trainer = updated(algorithm)
    trajectories = answers(tiny_model(std=0.3))
    for pass_tokens in (1, 4096):
        trainer._settings = replace(trainer._settings, micro_batch_tokens=pass_tokens)
        found = trainer._values_at_cut(trajectories, Answers.of(trajectories, version=0))
        assert found[[0, 2]].tolist() == [0.0, 0.0]
        for number in (1, 3):
            t = trajectories[number]
            longer = TokenSequence(t.prompt.tokens, (*t.tokens, 0))
            value = trainer.critic.critic.values([longer])[-1].detach()
            assert float(value) != 0, "the critic has learned something"
            assert float(found[number]) == pytest.approx(float(value), rel=1e-4, abs=1e-6)


def test_bootstrapping_changes_what_the_critic_is_taught():
    """At first every value is 0, so it is the second update that differs."""
    found = []
    for truncated in ("train", "bootstrap"):
        trainer = updated(Algorithm(name="ppo", truncated=truncated))
        trainer.update(TrainBatch(1, tuple(answers(tiny_model(std=0.3)))))
        found.append(weights(trainer.critic.critic))
    assert not torch.equal(*found)


def test_bootstrapping_needs_a_critic():
    with pytest.raises(ConfigError, match="takes a value of the critic, got it with 'grpo'"):
        Algorithm(name="grpo", truncated="bootstrap")
