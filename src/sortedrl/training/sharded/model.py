"""A model of which every rank has a part: FSDP2, layer by layer.

The weights of a layer are gathered when the layer is passed through, and let go of afterwards; the
gradients of a pass are added up over the ranks, and each rank keeps those of its part. So between
passes a rank holds its part and nothing else. Every weight is split by its first axis.

Gradients are summed, not averaged: each token has its weight in the loss of the whole step.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from sortedrl.errors import ConfigError, ModelError
from sortedrl.training.critic import Critic
from sortedrl.training.sharded.ranks import Ranks

_HALF = (torch.float16, torch.bfloat16)


def shard_model(model: PreTrainedModel, ranks: Ranks) -> None:
    """Leave this rank its part of the model, on the rank's device.

    The model must be whole, the same on all ranks, and not have adapters. Objects that hold the
    model, such as a `PackedModel`, stay valid; its parameters are new ones.
    """
    _refuse_adapters(model)
    for layer in _layers(model):
        _shard(layer, ranks, dtype=model.dtype)
    _shard(model, ranks, dtype=model.dtype)


def shard_critic(critic: Critic, ranks: Ranks) -> None:
    """Leave this rank its part of the critic."""
    dtype = critic.trunk.dtype
    for layer in _layers(critic.trunk):
        _shard(layer, ranks, dtype=dtype)
    # By itself, because its precision may be another.
    _shard(critic.head, ranks, dtype=critic.head.weight.dtype)
    _shard(critic, ranks, dtype=dtype)


def _shard(module: nn.Module, ranks: Ranks, *, dtype: torch.dtype) -> None:
    # Sums of 16-bit gradients over many ranks would lose what a single pass in 32 bits keeps.
    reduce_dtype = torch.float32 if dtype in _HALF else None
    # Left to itself, FSDP keeps the outermost weights for the backward pass. A model that only
    # reads has none.
    is_trained = any(parameter.requires_grad for parameter in module.parameters())
    fully_shard(
        module,
        mesh=ranks.mesh,
        reshard_after_forward=None if is_trained else True,
        mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
    )
    assert isinstance(module, FSDPModule)
    # Without the second, a factor other than the number of ranks asks for a sum that only NCCL has.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} must say what its layers are (_no_split_modules) to be spread "
            "over ranks, and names none that it has; train it in one process"
        )
    return layers


def _refuse_adapters(model: PreTrainedModel) -> None:
    if model._hf_peft_config_loaded:
        raise ConfigError(
            "a model with adapters must be trained in one process, got several ranks; train "
            "without lora.rank, or with one rank"
        )
