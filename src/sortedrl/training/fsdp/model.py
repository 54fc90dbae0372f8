"""A model of which every rank has a shard: FSDP2, layer by layer.

The weights of a layer are gathered when the layer is run, and freed afterwards; the gradients of a
pass are reduced over the ranks, and each rank keeps those of its shard. So between passes a rank
holds its shard and nothing else. Every weight is split by its first axis. Gradients are summed, not
averaged: each token has its weight in the loss of the whole step.

Whole tensors are gathered a bucket at a time, so no rank ever holds more than its shard and one
bucket. All ranks must go through the buckets together, to the end, and each sees all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from sortedrl.config.checks import require
from sortedrl.errors import ConfigError, ModelError
from sortedrl.training.critic import Critic
from sortedrl.training.fsdp.ranks import Ranks

_HALF = (torch.float16, torch.bfloat16)


def shard_model(model: PreTrainedModel, ranks: Ranks) -> None:
    """Shard the model: this rank keeps its part, on its device.

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


Bucket = list[tuple[str, Tensor]]
_BUCKET_BYTES = 256 << 20


def buckets(model: nn.Module, *, max_bytes: int) -> Iterator[Bucket]:
    """The weights by name, in parts of at most `max_bytes`.

    A larger tensor has a bucket of its own. Names of one tensor stand next to each other.
    """
    # Asking for the state makes every layer let go of what it gathered.
    yield from gathered(model.state_dict(keep_vars=True), max_bytes=max_bytes)


def gathered(tensors: Mapping[str, Tensor], *, max_bytes: int) -> Iterator[Bucket]:
    """The same of any tensors."""
    require(max_bytes >= 1, f"a bucket must have room for at least 1 byte, got {max_bytes}")
    bucket: Bucket = []
    size = 0
    for names in _by_tensor(tensors.items()):
        part = tensors[names[0]]
        num_bytes = part.numel() * part.element_size()
        if bucket and size + num_bytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        tensor = whole(part)
        bucket += [(name, tensor) for name in names]
        size += num_bytes
    if bucket:
        yield bucket


def on_first(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """The whole tensors in the main memory of the first rank; nothing on the others."""
    found: dict[str, Tensor] = {}
    for bucket in gathered(tensors, max_bytes=_BUCKET_BYTES):
        if ranks.is_first:
            found.update((name, tensor.cpu()) for name, tensor in bucket)
    return found


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """The tensor of which this rank has a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def rows_of(size: int, *, rank: int, world: int) -> tuple[int, int]:
    """The first row of a rank's part of a tensor with so many rows, and the one after its last.

    >>> [rows_of(5, rank=rank, world=4) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    most = -(-size // world)
    return min(rank * most, size), min((rank + 1) * most, size)


def part_of(own: Tensor, ranks: Ranks, *, shape: torch.Size) -> DTensor:
    """A spread tensor of this shape, of which this rank's rows are given."""
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        own.to(ranks.device),
        ranks.mesh,
        [Shard(0)],
        run_check=False,
        shape=shape,
        stride=strides,
    )


def _by_tensor(named: Iterable[tuple[str, Tensor]]) -> list[list[str]]:
    """Names of the same tensor together, in the order in which tensors are first named."""
    names: dict[int, list[str]] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())
