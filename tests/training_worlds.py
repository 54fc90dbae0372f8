"""Small worlds for training: a tiny model, the native engine, and rewards that need no text."""

from dataclasses import dataclass, replace
from random import Random

import torch

from native_worlds import VOCABULARY, tiny_model
from sortedrl.config.algorithm import Optimisation
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.config.train import PassSettings, Rollout, TrainSettings
from sortedrl.core.buffer import Buffer
from sortedrl.core.clock import VirtualClock
from sortedrl.core.controller import Controller
from sortedrl.core.events import Event
from sortedrl.core.loop import Loop
from sortedrl.core.recorder import Journal
from sortedrl.data.stream import PromptStream, TokenizedRow
from sortedrl.engines.native import NativeEngine, Sampling
from sortedrl.training.critic import Critic, CriticTrainer
from sortedrl.training.forward import AdapterReference, CopiedReference, PackedModel
from sortedrl.training.optimiser import Optimiser
from sortedrl.training.trainer import PolicyTrainer
from sortedrl.types import Prompt, Segment, Trajectory

END = 1


class Judge:
    """A scorer whose reward is a function of the tokens alone."""

    def submit(self, trajectory):
        """It is quick enough to wait for."""

    def cancel(self, trajectory):
        """Nothing is under way."""

    def collect(self, trajectories):
        return [replace(t, reward=reward_of(t)) for t in trajectories]


def reward_of(trajectory):
    """Many small tokens are good."""
    tokens = trajectory.tokens
    return sum(token < VOCABULARY // 2 for token in tokens) / len(tokens)


def rows(count, *, seed=0):
    """Random prompts of two to six tokens."""
    random = Random(seed)
    return [
        TokenizedRow([random.randrange(2, VOCABULARY) for _ in range(random.randint(2, 6))], {})
        for _ in range(count)
    ]


def train_settings(*, learning_rate=1e-2, slots=6, max_tokens=24, pass_tokens=4096, **changes):
    """Settings of a run of seconds; `changes` are those of the top and its sections."""
    optimiser = changes.pop("optimiser", Optimisation(learning_rate=learning_rate))
    schedule = changes.pop("schedule", Schedule(group_prompts=8, update_batch=4))
    return TrainSettings(
        schedule=schedule,
        engine=EngineSettings(slots=slots, max_tokens=max_tokens),
        optimiser=optimiser,
        passes=PassSettings(micro_batch_tokens=pass_tokens),
        **changes,
    )


@dataclass
class World:
    """A training run in memory."""

    loop: Loop
    trainer: PolicyTrainer
    model: torch.nn.Module
    events: list[Event]


def world(settings, *, prompts=16, model=None):
    """A run of the real trainer and the native engine on a tiny model."""
    model = model if model is not None else tiny_model(std=0.3)
    events = []
    engine = NativeEngine(
        model,
        slots=settings.engine.slots,
        max_tokens=settings.engine.max_tokens,
        sampling=Sampling(temperature=settings.rollout.temperature),
        stop_tokens=[END, 7, 30, 55, 90],
    )
    trainer = trainer_of(model, settings)
    loop = Loop(
        prompts=PromptStream(rows(prompts), epochs=settings.epochs, seed=settings.seed),
        buffer=Buffer(unit_size=settings.schedule.unit_size),
        controller=Controller(settings.schedule),
        engine=engine,
        scorer=Judge(),
        trainer=trainer,
        journal=Journal(events.append, clock=VirtualClock()),
        seed=settings.seed,
    )
    return World(loop, trainer, model, events)


def trainer_of(model, settings, optimiser=None):
    """The trainer as a run has it."""
    policy = PackedModel(model, temperature=settings.rollout.temperature)
    reference = critic = None
    if settings.algorithm.kl_coef > 0 and settings.lora.rank is not None:
        reference = AdapterReference(policy)
    elif settings.algorithm.kl_coef > 0:
        reference = CopiedReference(tiny_model(std=0.3), temperature=policy.temperature)
    if settings.algorithm.has_critic:
        values = Critic(tiny_model(std=0.3))
        critic = CriticTrainer(
            values,
            Optimiser(values.learned(), settings.update.critic_optimiser, total_steps=None),
            settings=settings.optimiser,
            micro_batch_tokens=settings.passes.micro_batch_tokens,
        )
    if optimiser is None:
        optimiser = Optimiser(dict(model.named_parameters()), settings.optimiser, total_steps=None)
    return PolicyTrainer(
        policy, optimiser, settings=settings.update, reference=reference, critic=critic
    )


def written(model, lengths, *, samples=1, temperature=1.0, version=0, seed=0):
    """Scored answers of these lengths, with the log-probabilities the model gives them."""
    random = Random(seed)
    found = []
    for number, length in enumerate(lengths):
        prompt = Prompt(id=number // samples, tokens=[random.randrange(VOCABULARY) for _ in "abc"])
        answer = [random.randrange(VOCABULARY) for _ in range(length)]
        text = torch.tensor([[*prompt.tokens, *answer]])
        with torch.no_grad():
            logits = model(text).logits[0, 2:-1] / temperature
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        found.append(
            Trajectory(
                prompt=prompt,
                sample_index=number % samples,
                group=0,
                seed=number,
                segments=(Segment(answer, logprobs.tolist(), version),),
                finish_reason="stop",
                reward=random.random(),
            )
        )
    return found


def rollout(temperature):
    """Settings of a rollout at a temperature."""
    return Rollout(temperature=temperature)
