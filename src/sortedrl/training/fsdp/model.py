"""A model of which every rank has a shard: FSDP2, layer by layer.

The weights of a layer are gathered when the layer is run, and freed afterwards; the gradients of a
pass are reduced over the ranks, and each rank keeps those of its shard. So between passes a rank
holds its shard and nothing else. Every weight is split by its first axis. Gradients are summed, not
averaged: each token has its weight in the loss of the whole step.

A model is sharded before it has weights, and each rank reads its rows of them. Whole tensors are
gathered a bucket at a time. So no rank ever holds more than its shard and one bucket. All ranks
must go through the buckets together, to the end, and each sees all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from sortedrl.config.checks import require
from sortedrl.errors import ModelError
from sortedrl.models.loading import load_model, names_by_tensor, stored_weights
from sortedrl.models.offload import in_buckets
from sortedrl.training.critic import Critic
from sortedrl.training.fsdp.ranks import Failure, Ranks
from sortedrl.training.lora import adapters_among, plain_name, refuse_transposed_layers

_HALF = (torch.float16, torch.bfloat16)


def shard_model(model: PreTrainedModel, ranks: Ranks) -> None:
    """Shard the model: this rank keeps its part, on its device.

    The model must be the same on all ranks: whole, or without weights until `read_weights`. Objects
    that hold the model, such as a `PackedModel`, stay valid; its parameters are new ones.
    """
    if model._hf_peft_config_loaded:
        refuse_transposed_layers(model)
    for layer in _layers(model):
        _shard(layer, ranks, dtype=model.dtype)
    _shard(model, ranks, dtype=model.dtype)


def shard_critic(critic: Critic, ranks: Ranks) -> None:
    """Leave this rank its part of the critic."""
    dtype = critic.trunk.dtype
    for layer in _layers(critic.trunk):
        _shard(layer, ranks, dtype=dtype)
    # On its own, because its precision may differ.
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
    # Without the second, a factor other than the number of ranks needs a sum that only NCCL has.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} must declare its layers (_no_split_modules) to be sharded "
            "over ranks, and names none that it has; train it in one process"
        )
    return layers


@torch.no_grad()
def read_weights(model: PreTrainedModel, ranks: Ranks, *, name: str | Path) -> None:
    """Give a sharded model without weights those of this name; adapters keep theirs.

    This rank reads its rows of them. Where no file has them as they are, the first rank loads the
    model and broadcasts one weight after the other.
    """
    own = {plain_name(n): n for n, t in model.state_dict(keep_vars=True).items() if t.is_meta}
    tensors = {plain: model.get_parameter(n) for plain, n in own.items()}
    together = names_by_tensor(tensors)
    failure = Failure()
    parts: dict[str, Tensor] = {}
    with failure:
        stored = stored_weights(name, tensors, dtype=model.dtype)
        for names in together:
            if stored is None:
                break
            shape = tensors[names[0]].shape
            start, stop = rows_of(shape[0], rank=ranks.rank, world=ranks.world)
            parts[names[0]] = part_of(stored.rows(names[0], start, stop), ranks, shape=shape)
    _tell(failure, ranks, name)
    is_read = torch.tensor(float(bool(parts)), device=ranks.device)
    if int(ranks.all_reduce(is_read)) < ranks.world:
        parts = _from_first(name, tensors, ranks, dtype=model.dtype)
    given = {}
    for names in together:
        weight = nn.Parameter(parts[names[0]], tensors[names[0]].requires_grad)
        given.update({own[plain]: weight for plain in names})
    model.load_state_dict(given, strict=False, assign=True)
    # FSDP uses the assigned tensors.
    nn.Module.to(model, ranks.device)


def _from_first(
    name: str | Path, tensors: Mapping[str, Tensor], ranks: Ranks, *, dtype: torch.dtype
) -> dict[str, Tensor]:
    """This rank's rows of a model that only the first rank loads."""
    failure = Failure()
    whole: Mapping[str, Tensor] = {}
    together = names_by_tensor(tensors)
    with failure:
        if ranks.is_first:
            whole = load_model(name, dtype=dtype, device="cpu").state_dict()
            for tied in together:
                if any(not whole[other].equal(whole[tied[0]]) for other in tied[1:]):
                    raise ModelError(
                        f"{name} must have the same weights in {' and '.join(tied)}, as its config "
                        "says, but has not; set tie_word_embeddings in its config.json to false"
                    )
    _tell(failure, ranks, name)
    parts: dict[str, Tensor] = {}
    for names in together:
        shape = tensors[names[0]].shape
        weight = torch.empty(shape, dtype=dtype, device=ranks.device)
        if ranks.is_first:
            weight.copy_(whole[names[0]])
        ranks.broadcast(weight)
        start, stop = rows_of(shape[0], rank=ranks.rank, world=ranks.world)
        parts[names[0]] = part_of(weight[start:stop].clone(), ranks, shape=shape)
    return parts


def _tell(failure: Failure, ranks: Ranks, name: str | Path) -> None:
    errors = failure.all_errors(ranks)
    if errors:
        raise ModelError(
            f"{name}: {len(errors)} of {ranks.world} ranks could not read it; {errors[0]}"
        )


Bucket = list[tuple[str, Tensor]]


def engine_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """What engines are given, by name: all weights, or the adapters alone where there are some."""
    # Reading the state makes every layer free its gathered weights.
    tensors = model.state_dict(keep_vars=True)
    return adapters_among(tensors) or tensors


def gathered(tensors: Mapping[str, Tensor], *, max_bytes: int) -> Iterator[Bucket]:
    """Whole tensors by name, in parts of at most `max_bytes`.

    A larger tensor has a bucket of its own. Names of one tensor stand next to each other.
    """
    require(max_bytes >= 1, f"a bucket must have room for at least 1 byte, got {max_bytes}")
    sized = ((names, size_of(tensors[names[0]])) for names in names_by_tensor(tensors))
    for bucket in in_buckets(sized, max_bytes=max_bytes):
        tied = ((names, whole(tensors[names[0]])) for names in bucket)
        yield [(name, tensor) for names, tensor in tied for name in names]


def size_of(tensor: Tensor) -> int:
    """The bytes of a whole tensor, of which this rank may have a part."""
    return tensor.numel() * tensor.element_size()


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """The tensor of which this rank has a part, on its device."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    part, mesh = tensor.to_local(), tensor.device_mesh
    if part.device.type != mesh.device_type:
        # Brought there by `from_local`, one tensor at a time: an optimiser's state in main memory.
        shape, stride = tensor.shape, tensor.stride()
        tensor = DTensor.from_local(
            part, mesh, tensor.placements, run_check=False, shape=shape, stride=stride
        )
    return tensor.full_tensor()


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
