"""The laws of training on a real model: frozen weights, modes that agree, packing that is free."""

import math
from collections import Counter

import pytest
import torch

from native_worlds import tiny_model
from sortedrl.config.algorithm import Algorithm, Correction, Optimisation
from sortedrl.config.schedule import Schedule
from sortedrl.training.losses import LossInputs, aggregation_weights, loss
from sortedrl.training.optimiser import StepResult
from sortedrl.types import TrainBatch
from training_worlds import train_settings, trainer_of, world, written

GROUP = {"group_prompts": 8, "update_batch": 4}
SYNC = Schedule(strategy="sync", mode="on_policy", **GROUP)
FROZEN = [
    Schedule(strategy="sorted", mode="partial", **GROUP),
    Schedule(strategy="sorted", mode="coupled", **GROUP),
    Schedule(strategy="sorted", mode="partial", lookahead=1, **GROUP),
    Schedule(strategy="sorted", mode="coupled", lookahead=2, **GROUP),
    Schedule(strategy="posthoc", mode="on_policy", **GROUP),
    Schedule(strategy="ungrouped", mode="coupled", **GROUP),
    Schedule(strategy="april", mode="partial", **GROUP),
    Schedule(strategy="tail_batching", mode="coupled", **GROUP),
]


def answers_of(schedule, **changes):
    """What a run trains on, by key, and the run."""
    run = world(train_settings(schedule=schedule, **changes))
    batches = list(run.loop.run())
    trained = [t for batch in batches for t in batch.trajectories]
    assert set(Counter(t.key for t in trained).values()) == {1}
    return {t.key: (t.tokens, t.finish_reason) for t in trained}, run


@pytest.mark.parametrize("schedule", FROZEN, ids=lambda schedule: schedule.name)
def test_with_frozen_weights_every_scheduler_trains_on_the_same_answers(schedule):
    same, _ = answers_of(SYNC, learning_rate=0.0)
    assert len(same) == 16
    assert len({len(tokens) for tokens, _ in same.values()}) > 5, "lengths must differ to be sorted"
    found, run = answers_of(schedule, learning_rate=0.0)
    assert found == same
    assert all(
        torch.equal(now, before)
        for now, before in zip(
            run.model.parameters(), tiny_model(std=0.3).parameters(), strict=True
        )
    )
    if not schedule.never_interrupts:
        assert any(event.kind == "interrupt" for event in run.events), "nothing was interrupted"


@pytest.mark.parametrize("mode", ["partial", "coupled"])
def test_with_weights_that_move_the_answers_part(mode):
    schedule = Schedule(strategy="sorted", mode=mode, **GROUP)
    assert answers_of(schedule)[0] != answers_of(SYNC)[0]


def test_one_update_over_everything_is_the_synchronous_baseline():
    everything = {"group_prompts": 8, "update_batch": 8}
    runs = []
    for strategy in ("sync", "sorted"):
        schedule = Schedule(strategy=strategy, mode="partial", **everything)
        answers, run = answers_of(schedule)
        runs.append((answers, run.model))
    (answers, model), (others, other) = runs
    assert answers == others
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("mode", ["partial", "coupled", "on_policy"])
def test_the_engine_and_the_trainer_agree_on_every_log_probability(mode):
    run = world(train_settings(schedule=Schedule(strategy="sorted", mode=mode, **GROUP)))
    gaps = [run.trainer.last["gap/max"] for _ in run.loop.run()]
    assert max(gaps) <= 1e-4
    assert run.trainer.version == len(gaps) >= 3


def test_in_partial_mode_stale_tokens_are_corrected_by_default():
    run = world(train_settings(schedule=Schedule(strategy="sorted", mode="partial", **GROUP)))
    shares, ratios = [], []
    for _ in run.loop.run():
        shares.append(1 - run.trainer.last["stale_0/share"])
        ratios.append(run.trainer.last["correction/ratio_max"])
    assert max(shares) > 0
    assert max(ratios) > 1.01
    assert run.trainer._settings.correction.kind == "token_tis"


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_steps_on_stale_tokens_shrink_with_the_effective_sample_size(level):
    settings = train_settings(
        schedule=Schedule(strategy="sorted", mode="partial", **GROUP),
        correction=Correction(scale_by_ess=level),
    )
    run = world(settings)
    scales = []
    for _ in run.loop.run():
        last = run.trainer.last
        scales.append(last["correction/step_scale"])
        assert last["learning_rate"] == pytest.approx(1e-2 * scales[-1])
        if last["stale_0/share"] == 1:
            assert scales[-1] == pytest.approx(1, abs=1e-4)
    assert min(scales) < 0.9999
    assert max(scales) <= 1 + 1e-9


class Catcher:
    """Takes the place of an optimiser and keeps the gradients."""

    def __init__(self, model):
        self.model = model
        self.gradients = None
        self.loss_scale = None

    def backward(self, loss):
        loss.backward()

    def step(self, *, loss, rate_scale):
        assert math.isfinite(loss)
        assert rate_scale == 1
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        self.model.zero_grad()
        return StepResult(grad_norm=1.0, learning_rate=0.0, is_applied=True)


def gradients(algorithm, *, pass_tokens):
    """The gradients of one update, packed by a token budget."""
    model = tiny_model(std=0.3)
    samples = 4 if algorithm.needs_siblings else 1
    schedule = Schedule(
        group_prompts=8,
        samples_per_prompt=samples,
        update_batch=8,
        harvest_unit="prompt" if samples > 1 else "trajectory",
    )
    settings = train_settings(
        pass_tokens=pass_tokens, algorithm=algorithm, schedule=schedule, max_tokens=64
    )
    catcher = Catcher(model)
    trajectories = written(model, [1, 40, 3, 17, 2, 9, 30, 5], samples=samples)
    trainer_of(model, settings, catcher).update(TrainBatch(0, tuple(trajectories)))
    return model, trajectories, catcher.gradients


ALGORITHMS = [
    Algorithm(name="reinforce_pp"),
    Algorithm(name="grpo", kl_coef=0.1, entropy_coef=0.01),
    Algorithm(name="dr_grpo"),
    Algorithm(name="rloo", kl_coef=0.05),
    Algorithm(name="dapo", overlong_tokens=20),
    Algorithm(name="ppo", gae_lambda=0.9),
    Algorithm(name="gspo"),
    Algorithm(name="cispo"),
    Algorithm(name="sapo"),
    Algorithm(name="gmpo"),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.name)
def test_how_answers_are_packed_does_not_change_the_update(algorithm):
    _, _, one_pass = gradients(algorithm, pass_tokens=4096)
    for pass_tokens in (1, 45):
        _, _, many = gradients(algorithm, pass_tokens=pass_tokens)
        for name, gradient in one_pass.items():
            torch.testing.assert_close(many[name], gradient, atol=1e-5, rtol=1e-5)


def test_a_packed_update_is_the_padded_one():
    algorithm = Algorithm(name="reinforce_pp")
    model, trajectories, packed = gradients(algorithm, pass_tokens=4096)
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    lengths = torch.tensor([t.num_tokens for t in trajectories])
    returns = rewards.repeat_interleave(lengths)
    advantages = ((returns - returns.mean()) / (returns.std() + 1e-6)).float()
    longest = max(3 + t.num_tokens for t in trajectories)
    texts = torch.zeros(len(trajectories), longest, dtype=torch.long)
    mask = torch.zeros(len(trajectories), longest, dtype=torch.long)
    for number, t in enumerate(trajectories):
        text = [*t.prompt.tokens, *t.tokens]
        texts[number, : len(text)] = torch.tensor(text)
        mask[number, : len(text)] = 1
    logprobs = model(texts, attention_mask=mask).logits.log_softmax(-1)
    current = torch.cat(
        [
            logprobs[number, 2 : 2 + t.num_tokens].gather(1, torch.tensor(t.tokens)[:, None])[:, 0]
            for number, t in enumerate(trajectories)
        ]
    )
    inputs = LossInputs(
        advantages_T=advantages,
        anchor_T=current.detach(),
        corrections_T=torch.ones_like(advantages),
        weights_T=aggregation_weights(lengths, "token_mean", max_tokens=64),
    )
    loss(current, inputs, algorithm=algorithm).total.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, atol=1e-5, rtol=1e-5)


def test_several_steps_and_epochs_per_update_move_the_ratio():
    settings = train_settings(
        schedule=Schedule(strategy="sorted", mode="coupled", **GROUP),
        optimiser=Optimisation(learning_rate=1e-2, mini_batches=2, epochs=2),
    )
    run = world(settings)
    batches = list(run.loop.run())
    assert run.trainer.optimiser.num_steps == 4 * len(batches)
    assert run.trainer.version == len(batches)
    assert run.trainer.last["policy/ratio_max"] > 1.001


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.name)
def test_every_algorithm_earns_more_after_training_than_before(algorithm):
    samples = 4 if algorithm.needs_siblings else 1
    schedule = Schedule(
        strategy="sorted",
        mode="coupled",
        group_prompts=32 // samples,
        samples_per_prompt=samples,
        update_batch=16,
        harvest_unit="prompt" if samples > 1 else "trajectory",
    )
    settings = train_settings(schedule=schedule, algorithm=algorithm, slots=16, epochs=1)
    run = world(settings, prompts=256 // samples)
    rewards = []
    for batch in run.loop.run():
        rewards.append(sum(t.reward for t in batch.trajectories) / len(batch.trajectories))
    assert sum(rewards[-4:]) / 4 > sum(rewards[:2]) / 2 + 0.1, rewards
