"""One policy update made by several ranks, each with a shard of the weights and of the answers.

    the same batch on every rank -> each runs the micro-batches of its share of the answers
                                 -> gradients are summed over the ranks
                                 -> each updates its shard of the weights

It is the trainer of one process with a group of ranks: every number that a decision depends on is
reduced over the ranks, so all skip a step or none does.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from sortedrl.config.train import UpdateSettings
from sortedrl.errors import TrainingError
from sortedrl.training.critic import Critic, CriticTrainer
from sortedrl.training.forward import (
    AdapterReference,
    CopiedReference,
    PackedModel,
    Reference,
)
from sortedrl.training.fsdp.model import (
    Bucket,
    engine_tensors,
    gathered,
    read_weights,
    shard_critic,
    shard_model,
)
from sortedrl.training.fsdp.ranks import Ranks
from sortedrl.training.lora import trained_parameters
from sortedrl.training.optimiser import Optimiser
from sortedrl.training.trainer import PolicyTrainer
from sortedrl.types import TrainBatch, Trajectory


class ShardedTrainer:
    """The trainer of one rank. A method called on one rank must be called on all of them."""

    def __init__(self, trainer: PolicyTrainer, ranks: Ranks) -> None:
        """Wrap the trainer of this rank, whose model and optimisers have only their shards."""
        self.trainer = trainer
        self.ranks = ranks

    @property
    def model(self) -> PreTrainedModel:
        """The model of which this rank has a part."""
        return self.trainer.model

    @property
    def version(self) -> int:
        """Number of updates behind the weights; the same on all ranks."""
        return self.trainer.version

    @property
    def last(self) -> Mapping[str, float]:
        """The numbers of the last update; but for times, the same on all ranks."""
        return self.trainer.last

    def update(self, batch: TrainBatch) -> None:
        """Make one policy update; every rank is given the whole batch."""
        if not self.ranks.is_same(_digest(batch)):
            raise TrainingError(
                "all ranks must be given the same batch, got different ones; rank "
                f"{self.ranks.rank} has {len(batch.trajectories)} answers for version "
                f"{batch.version}. Resume from the last checkpoint (--resume)"
            )
        self.trainer.update(batch)

    def flush(self) -> bool:
        """Train on what is held back, as there will be no more; whether there was anything."""
        return self.trainer.flush()

    def offload(self) -> None:
        """Move what only an update needs to main memory, and give the rest of it back."""
        for optimiser in self._optimisers:
            optimiser.offload()
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Move it back to the device."""
        for optimiser in self._optimisers:
            optimiser.onload()

    @property
    def _optimisers(self) -> list[Optimiser]:
        critic = self.trainer.critic
        return [self.trainer.optimiser, *([] if critic is None else [critic.optimiser])]

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """The log-probabilities of the tokens of answers at temperature 1; all ranks have them."""
        found = self.trainer.logprobs(trajectories)
        _reshard(self.model)
        return found

    def tensors(self) -> dict[str, Tensor]:
        """What an update changes of the model, by name: all weights, or the adapters alone."""
        return engine_tensors(self.model)

    def buckets(self, *, max_bytes: int) -> Iterator[Bucket]:
        """The same as whole tensors for the engines, in parts; go through them on every rank."""
        return gathered(self.tensors(), max_bytes=max_bytes)


def sharded_trainer(
    model: PreTrainedModel,
    ranks: Ranks,
    *,
    settings: UpdateSettings,
    temperature: float,
    first: PreTrainedModel | None = None,
    critic: PreTrainedModel | None = None,
    source: str | Path | None = None,
    first_source: str | Path | None = None,
    total_steps: int | None = None,
    is_compiled: bool = False,
) -> ShardedTrainer:
    """The trainer of this rank; `first` is the reference, where the settings ask for one.

    The models are the same on all ranks; each rank is left with its part of them, on its device.
    They are whole, or without weights: then each rank reads its part, the policy's from `source`
    and those of reference and critic from `first_source`. The reference of adapters is the policy
    without them.
    """
    policy = PackedModel(model, temperature=temperature, is_compiled=is_compiled)
    shard_model(model, ranks)
    if source is not None:
        read_weights(model, ranks, name=source)
        policy.check()
        _reshard(model)
    reference: Reference | None = None
    if first is not None:
        reference = CopiedReference(first, temperature=temperature)
        shard_model(first, ranks)
        if first_source is not None:
            read_weights(first, ranks, name=first_source)
    elif model._hf_peft_config_loaded and settings.algorithm.kl_coef > 0:
        reference = AdapterReference(policy)
    optimiser = Optimiser(
        trained_parameters(model),
        settings.optimiser,
        total_steps=total_steps,
        norm=ranks.norm,
        computes_in=model.dtype,
    )
    trainer = PolicyTrainer(
        policy,
        optimiser,
        settings=settings,
        reference=reference,
        critic=None
        if critic is None
        else _critic(
            critic, ranks, settings=settings, source=first_source, total_steps=total_steps
        ),
        ranks=ranks,
    )
    return ShardedTrainer(trainer, ranks)


def _reshard(model: PreTrainedModel) -> None:
    """Free the outermost weights, which FSDP keeps for a backward pass that does not follow."""
    assert isinstance(model, FSDPModule)
    model.reshard()


def _critic(
    model: PreTrainedModel,
    ranks: Ranks,
    *,
    settings: UpdateSettings,
    source: str | Path | None,
    total_steps: int | None,
) -> CriticTrainer:
    critic = Critic(model)
    shard_critic(critic, ranks)
    if source is not None:
        read_weights(model, ranks, name=source)
    return CriticTrainer(
        critic,
        Optimiser(
            critic.learned(), settings.critic_optimiser, total_steps=total_steps, norm=ranks.norm
        ),
        settings=settings.optimiser,
        micro_batch_tokens=settings.micro_batch_tokens,
        ranks=ranks,
    )


def _digest(batch: TrainBatch) -> int:
    """A checksum of a batch."""
    found = crc32(repr(batch.version).encode())
    for trajectory in batch.trajectories:
        found = crc32(repr((trajectory.key, trajectory.reward)).encode(), found)
        for segment in trajectory.segments:
            found = crc32(array("q", segment.given), found)
            found = crc32(array("q", segment.tokens), found)
            found = crc32(array("d", segment.logprobs), found)
    return found
