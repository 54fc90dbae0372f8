"""The fp32 master weights and the two moments of AdamW: where they are kept, and their step.

    fp32      ResidentState   all on the weights' device; one call for all tensors
    8bit      EightBitState   masters on the device, moments as 8-bit codes with a scale per block
    offload   HostState       all in pinned main memory, brought to the device piece by piece

A weight in 32 bits is its own master. Pieces are flat runs of at most `PIECE_NUMBERS` numbers of
one weight. AdamW is elementwise, so a step in pieces gives the same bits as a step over all.

    offload, on a GPU, with three staging buffers:
      copy in    | piece 2 | piece 3 | piece 4 |
      AdamW      | piece 1 | piece 2 | piece 3 |
      copy out   | piece 0 | piece 1 | piece 2 |

8-bit codes are those of Dettmers et al. (arXiv 2110.02861): for blocks of 256 numbers the largest
magnitude, and for each number the nearest of 256 shares of it, which lie closer together near 0.
The largest magnitude is always a code itself, so unpacking and packing again changes nothing. A
second moment above 0 never becomes 0, as the step divides by its root.

`tensors` is the same for all three: fp32 tensors by the names of a checkpoint, which any of them
can read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from types import MappingProxyType
from typing import Protocol
from weakref import finalize

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn import Parameter
from torch.optim.adamw import adamw

from sortedrl.config.algorithm import Optimisation
from sortedrl.errors import TrainingError

HALF = (torch.bfloat16, torch.float16)
PIECE_NUMBERS = 1 << 24
MASTER, FIRST, SECOND = "master", "first_moment", "second_moment"
_BLOCK_NUMBERS = 256
_NUM_STAGES = 3


@dataclass(frozen=True, slots=True)
class Kind:
    """Dtype and shape of a tensor of the state."""

    dtype: torch.dtype
    shape: torch.Size

    def __str__(self) -> str:
        """For a message."""
        return f"{self.dtype} {list(self.shape)}"


class AdamState(Protocol):
    """Master weights and moments; weights and gradients are given by the names of the weights."""

    def step(
        self, gradients: Mapping[str, Tensor], *, scale: Tensor | None, rate: float, steps: Counts
    ) -> None:
        """Apply the gradients, multiplied by `scale`, to masters and weights.

        `steps` counts the steps of each weight, this one included.
        """

    def kinds(self) -> dict[str, Kind]:
        """Dtypes and shapes of `tensors`, without the tensors."""

    def tensors(self) -> dict[str, Tensor]:
        """Masters and moments in fp32; the live ones where they are kept so."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take these over and set 16-bit weights from their masters; `kinds` must agree."""

    def on_device(self) -> list[Tensor]:
        """Its tensors on the device of the weights."""


Counts = Mapping[str, int]


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor in this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def adam_state(parameters: Mapping[str, Parameter], settings: Optimisation) -> AdamState:
    """The state of the settings, with its memory allocated."""
    if settings.state == "offload":
        return HostState(parameters, settings)
    if settings.state == "8bit":
        return EightBitState(parameters, settings)
    return ResidentState(parameters, settings)


class ResidentState:
    """Everything in fp32 on the device of the weights."""

    def __init__(self, parameters: Mapping[str, Parameter], settings: Optimisation) -> None:
        """Allocate now, so that what does not fit fails at the start."""
        self._parameters = parameters
        self._rule = _Rule(settings)
        self._masters = _masters(parameters)
        self._moments = {
            moment: {name: _zeros(p) for name, p in parameters.items()} for moment in _MOMENTS
        }

    def step(
        self, gradients: Mapping[str, Tensor], *, scale: Tensor | None, rate: float, steps: Counts
    ) -> None:
        """Apply the gradients; those in fp32 are scaled in place."""
        first, second = (self._moments[moment] for moment in _MOMENTS)
        for names in self._together(gradients):
            # Gradients of 16 bits are scaled in 32.
            parts = [_full(local(gradients[name])) for name in names]
            if scale is not None:
                for part in parts:
                    part.mul_(scale.to(part.device))
            self._rule.apply(
                [local(self._masters.get(name, self._parameters[name])) for name in names],
                parts,
                [local(first[name]) for name in names],
                [local(second[name]) for name in names],
                steps=[steps[name] for name in names],
                rate=rate,
                has_decay=self._parameters[names[0]].ndim >= 2,
            )
        _write_back(self._masters, self._parameters)

    def _together(self, gradients: Mapping[str, Tensor]) -> list[list[str]]:
        """Names for one call each: matrices, the rest, and one by one what is copied to fp32."""
        copied = [name for name, gradient in gradients.items() if gradient.dtype in HALF]
        groups = [[name] for name in copied]
        for is_matrix in (True, False):
            groups.append(
                [
                    name
                    for name, gradient in gradients.items()
                    if gradient.dtype not in HALF and (gradient.ndim >= 2) is is_matrix
                ]
            )
        return [group for group in groups if group]

    def kinds(self) -> dict[str, Kind]:
        """Dtypes and shapes of `tensors`."""
        return {name: Kind(t.dtype, t.shape) for name, t in self.tensors().items()}

    def tensors(self) -> dict[str, Tensor]:
        """The live ones."""
        moments = {
            f"{moment}.{name}": tensor
            for moment, tensors in self._moments.items()
            for name, tensor in tensors.items()
        }
        return moments | {f"{MASTER}.{name}": t for name, t in self._masters.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy all of them."""
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])
        _write_back(self._masters, self._parameters)

    def on_device(self) -> list[Tensor]:
        """Everything."""
        return list(self.tensors().values())


class EightBitState:
    """fp32 masters on the device, moments packed into 8 bits."""

    def __init__(self, parameters: Mapping[str, Parameter], settings: Optimisation) -> None:
        """Allocate now."""
        self._parameters = parameters
        self._rule = _Rule(settings)
        self._masters = _masters(parameters)
        self._packed = {
            (moment, piece): _Packed(piece.of(local(parameters[piece.name])), moment)
            for piece in pieces(parameters)
            for moment in _MOMENTS
        }

    @torch.no_grad()
    def step(
        self, gradients: Mapping[str, Tensor], *, scale: Tensor | None, rate: float, steps: Counts
    ) -> None:
        """Unpack, apply and pack again, piece by piece."""
        for piece in pieces({name: self._parameters[name] for name in gradients}):
            parameter = self._parameters[piece.name]
            packed = [self._packed[moment, piece] for moment in _MOMENTS]
            first, second = (moment.numbers() for moment in packed)
            self._rule.apply(
                [piece.of(local(self._masters.get(piece.name, parameter)))],
                [piece.gradient(gradients[piece.name], scale)],
                [first],
                [second],
                steps=[steps[piece.name]],
                rate=rate,
                has_decay=parameter.ndim >= 2,
            )
            for moment, numbers in zip(packed, (first, second), strict=True):
                moment.set(numbers)
        _write_back(self._masters, self._parameters)

    def kinds(self) -> dict[str, Kind]:
        """Dtypes and shapes of `tensors`."""
        return _kinds(self._parameters, self._masters)

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """The live masters, and moments unpacked into main memory."""
        found = {}
        for moment in _MOMENTS:
            for name, parameter in self._parameters.items():
                whole = torch.zeros(local(parameter).shape, dtype=torch.float32)
                for piece in _cut(name, parameter):
                    piece.of(whole).copy_(self._packed[moment, piece].numbers())
                found[f"{moment}.{name}"] = _like(whole, parameter)
        return found | {f"{MASTER}.{name}": t for name, t in self._masters.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Pack the moments."""
        for name, master in self._masters.items():
            master.copy_(tensors[f"{MASTER}.{name}"])
        for (moment, piece), packed in self._packed.items():
            packed.set(piece.of(local(tensors[f"{moment}.{piece.name}"])))
        _write_back(self._masters, self._parameters)

    def on_device(self) -> list[Tensor]:
        """Masters, codes and scales."""
        packed = [tensor for p in self._packed.values() for tensor in p.held]
        return [*self._masters.values(), *packed]


class HostState:
    """fp32 masters and moments in main memory, pinned where the weights are on a GPU."""

    def __init__(self, parameters: Mapping[str, Parameter], settings: Optimisation) -> None:
        """Allocate and pin now."""
        self._parameters = parameters
        self._rule = _Rule(settings)
        device = next(iter(parameters.values())).device
        self._device = device
        self._half = {n: p for n, p in parameters.items() if p.dtype in HALF}
        self._host: dict[str, dict[str, Tensor]] = {}
        for kind, which in ((FIRST, parameters), (SECOND, parameters), (MASTER, self._half)):
            slab, self._host[kind] = _slab(which)
            if device.type == "cuda" and len(slab):
                _pin(slab)
                finalize(self, _unpin, slab).atexit = False
        with torch.no_grad():
            for name, parameter in self._half.items():
                self._host[MASTER][name].copy_(local(parameter))

    @torch.no_grad()
    def step(
        self, gradients: Mapping[str, Tensor], *, scale: Tensor | None, rate: float, steps: Counts
    ) -> None:
        """Bring each piece to the device, apply, and take it back."""
        work = pieces({name: self._parameters[name] for name in gradients})
        if not work:
            return
        largest = max(len(piece) for piece in work)
        stages = [_Stage(largest, self._device) for _ in range(_NUM_STAGES)]
        streams = _Streams(self._device)
        for number, piece in enumerate(work):
            stage = stages[number % _NUM_STAGES]
            parameter = self._parameters[piece.name]
            kept = [piece.of(tensors[piece.name]) for tensors in self._of(piece.name)]
            here = stage.numbers(len(piece), count=len(kept))
            with streams.copying_in(stage):
                _copy_all(here, kept)
            with streams.computing(stage):
                weight = piece.of(local(parameter))
                master = here[2] if piece.name in self._half else weight
                self._rule.apply(
                    [master],
                    [piece.gradient(gradients[piece.name], scale)],
                    [here[0]],
                    [here[1]],
                    steps=[steps[piece.name]],
                    rate=rate,
                    has_decay=parameter.ndim >= 2,
                )
                if master is not weight:
                    weight.copy_(master)
            with streams.copying_out(stage):
                _copy_all(kept, here)
        streams.finish()

    def kinds(self) -> dict[str, Kind]:
        """Dtypes and shapes of `tensors`."""
        return _kinds(self._parameters, self._half)

    def tensors(self) -> dict[str, Tensor]:
        """The live ones, in main memory."""
        return {
            f"{kind}.{name}": _like(tensor, self._parameters[name])
            for kind, tensors in self._host.items()
            for name, tensor in tensors.items()
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy all of them, and set the weights from their masters."""
        for kind, own in self._host.items():
            for name, tensor in own.items():
                tensor.copy_(local(tensors[f"{kind}.{name}"]))
        for name, parameter in self._half.items():
            local(parameter).copy_(self._host[MASTER][name])

    def on_device(self) -> list[Tensor]:
        """Nothing."""
        return []

    def _of(self, name: str) -> list[Mapping[str, Tensor]]:
        kinds = (*_MOMENTS, MASTER) if name in self._half else _MOMENTS
        return [self._host[kind] for kind in kinds]


@dataclass(frozen=True, slots=True)
class Piece:
    """A flat run of the numbers that this process has of a weight."""

    name: str
    start: int
    stop: int

    def __len__(self) -> int:
        """The number of its elements."""
        return self.stop - self.start

    def of(self, tensor: Tensor) -> Tensor:
        """This piece of a tensor, as a view."""
        return tensor.view(-1)[self.start : self.stop]

    def gradient(self, gradient: Tensor, scale: Tensor | None) -> Tensor:
        """This part of a gradient in fp32, scaled; the gradient itself stays."""
        part = _full(self.of(local(gradient).contiguous()))
        return part if scale is None else part * scale.to(part.device)


def pieces(parameters: Mapping[str, Tensor]) -> list[Piece]:
    """The pieces of all weights."""
    return [piece for name, p in parameters.items() for piece in _cut(name, p)]


def _cut(name: str, parameter: Tensor) -> list[Piece]:
    size = local(parameter).numel()
    starts = range(0, size, PIECE_NUMBERS)
    return [Piece(name, start, min(start + PIECE_NUMBERS, size)) for start in starts]


class _Rule:
    """AdamW with the constants of a run."""

    def __init__(self, settings: Optimisation) -> None:
        self._settings = settings

    @torch.no_grad()
    def apply(
        self,
        masters: list[Tensor],
        gradients: list[Tensor],
        first: list[Tensor],
        second: list[Tensor],
        *,
        steps: Sequence[int],
        rate: float,
        has_decay: bool,
    ) -> None:
        """Change masters and moments in place; `steps` count this one."""
        is_fused = masters[0].is_cuda
        device = masters[0].device if is_fused else None
        settings = self._settings
        adamw(
            masters,
            gradients,
            first,
            second,
            [],
            # AdamW counts the step itself.
            [torch.full((), float(count - 1), device=device) for count in steps],
            foreach=False,
            fused=is_fused,
            amsgrad=False,
            beta1=settings.beta1,
            beta2=settings.beta2,
            lr=rate,
            weight_decay=settings.weight_decay if has_decay else 0.0,
            eps=settings.epsilon,
            maximize=False,
        )


_MOMENTS = (FIRST, SECOND)
_IS_SIGNED = MappingProxyType({FIRST: True, SECOND: False})


class _Packed:
    """A moment of one piece: 8-bit codes with a scale per block; short pieces stay in fp32."""

    def __init__(self, like: Tensor, moment: str) -> None:
        self._is_signed = _IS_SIGNED[moment]
        size, device = like.numel(), like.device
        self._is_packed = size % _BLOCK_NUMBERS == 0
        if self._is_packed:
            codes = torch.zeros(size, dtype=torch.uint8, device=device)
            scales = torch.zeros(size // _BLOCK_NUMBERS, dtype=torch.float32, device=device)
            self.held: tuple[Tensor, ...] = (codes, scales)
        else:
            self.held = (torch.zeros(size, dtype=torch.float32, device=device),)

    def numbers(self) -> Tensor:
        """In fp32."""
        if not self._is_packed:
            return self.held[0].clone()
        codes, scales = self.held
        shares = _codebook(self._is_signed, codes.device).index_select(0, codes.int())
        return (shares.view(-1, _BLOCK_NUMBERS) * scales[:, None]).view(-1)

    def set(self, numbers: Tensor) -> None:
        """Store the nearest values that 8 bits can hold."""
        if not self._is_packed:
            self.held[0].copy_(numbers)
            return
        codes, scales = self.held
        blocks = numbers.to(codes.device).view(-1, _BLOCK_NUMBERS)
        torch.amax(blocks.abs(), dim=1, out=scales)
        # In a block of zeros any code means 0.
        shares = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        edges = _edges(self._is_signed, codes.device)
        found = torch.bucketize(shares.view(-1), edges, out_int32=True)
        codes.copy_(found if self._is_signed else found.clamp_(min=1))


@cache
def _codebook(is_signed: bool, device: torch.device) -> Tensor:
    """256 shares of a block's largest magnitude, rising: more digits for the larger ones."""
    decades = 7
    positive = [1.0]
    for decade in range(decades):
        count = 2**decade if is_signed else 2 ** (decade + 1)
        width = 0.9 / count
        largest = 10.0 ** (decade - decades + 1)
        positive += [largest * (0.1 + width * (n + 0.5)) for n in range(count)]
    # One negative share makes room for -1, so that the largest magnitude is exact.
    negative = [-share for share in positive if share != min(positive)] if is_signed else []
    shares = torch.tensor(sorted([0.0, *positive, *negative]), dtype=torch.float32, device=device)
    assert len(shares) == 256, "codes have 8 bits"
    return shares


@cache
def _edges(is_signed: bool, device: torch.device) -> Tensor:
    """Halfway between neighbouring shares."""
    shares = _codebook(is_signed, device)
    return (shares[1:] + shares[:-1]) / 2


def _masters(parameters: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """fp32 copies of the 16-bit weights."""
    return {n: p.detach().float() for n, p in parameters.items() if p.dtype in HALF}


def _full(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor


def _zeros(parameter: Parameter) -> Tensor:
    dtype = torch.float32 if parameter.dtype in HALF else parameter.dtype
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)


@torch.no_grad()
def _write_back(masters: Mapping[str, Tensor], parameters: Mapping[str, Parameter]) -> None:
    """Set the 16-bit weights from their masters."""
    for name, master in masters.items():
        parameters[name].copy_(master)


def _kinds(parameters: Mapping[str, Parameter], masters: Mapping[str, object]) -> dict[str, Kind]:
    moments = {
        f"{moment}.{name}": Kind(torch.float32, p.shape)
        for moment in _MOMENTS
        for name, p in parameters.items()
    }
    return moments | {f"{MASTER}.{n}": Kind(torch.float32, parameters[n].shape) for n in masters}


def _like(tensor: Tensor, parameter: Parameter) -> Tensor:
    """A tensor of this process's part, sharded like its weight; it stays where it is."""
    if not isinstance(parameter, DTensor):
        return tensor
    meta = TensorMeta(parameter.shape, parameter.stride(), tensor.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    # Not `from_local`: it moves a tensor to the device of the mesh, which may not hold them all.
    return DTensor(tensor, spec, requires_grad=False)


def _slab(parameters: Mapping[str, Parameter]) -> tuple[Tensor, dict[str, Tensor]]:
    """Zeros in the shapes of the weights, and the single allocation that holds them."""
    shapes = {name: local(parameter).shape for name, parameter in parameters.items()}
    ends = [0, *accumulate(shape.numel() for shape in shapes.values())]
    slab = torch.zeros(ends[-1], dtype=torch.float32)
    return slab, {
        name: slab[start : start + shape.numel()].view(shape)
        for (name, shape), start in zip(shapes.items(), ends[:-1], strict=True)
    }


def _pin(slab: Tensor) -> None:
    """Pin memory where it is: torch's own pinned allocations are rounded up to powers of two."""
    slab.zero_()  # touched by all threads: the driver would touch it with one
    status = torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.nbytes, 0)
    if int(status) != 0:
        raise TrainingError(
            f"optimiser.state 'offload' needs {slab.nbytes / 2**30:.1f} GiB of pinned main memory, "
            f"which the driver refused ({status}); free main memory, or set optimiser.state to "
            "'8bit'"
        )


def _unpin(slab: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(slab.data_ptr())


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


class _Stage:
    """A staging buffer on the device for the moments and the master of one piece."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._slab = torch.empty((3, size), dtype=torch.float32, device=device)
        self.arrived = _event(device)
        self.computed = _event(device)
        self.left = _event(device)

    def numbers(self, size: int, *, count: int) -> list[Tensor]:
        """Buffers of this size."""
        return [self._slab[n, :size] for n in range(count)]


def _event(device: torch.device) -> torch.cuda.Event | None:
    return torch.cuda.Event() if device.type == "cuda" else None


class _Streams:
    """Copies in and out, concurrent with the computation; on a CPU everything is sequential."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._compute = torch.cuda.current_stream(device)
            self._in, self._out = (torch.cuda.Stream(device) for _ in range(2))
            # The staging buffers may be in memory that earlier work still uses.
            self._in.wait_stream(self._compute)

    @contextmanager
    def copying_in(self, stage: _Stage) -> Iterator[None]:
        """Once the stage is empty."""
        with self._ordered("_in", after=stage.left, then=stage.arrived):
            yield

    @contextmanager
    def computing(self, stage: _Stage) -> Iterator[None]:
        """Once the stage is filled."""
        with self._ordered("_compute", after=stage.arrived, then=stage.computed):
            yield

    @contextmanager
    def copying_out(self, stage: _Stage) -> Iterator[None]:
        """Once the stage is computed."""
        with self._ordered("_out", after=stage.computed, then=stage.left):
            yield

    def finish(self) -> None:
        """Wait until main memory has everything."""
        if self._on_gpu:
            self._out.synchronize()

    @contextmanager
    def _ordered(
        self, name: str, *, after: torch.cuda.Event | None, then: torch.cuda.Event | None
    ) -> Iterator[None]:
        if after is None or then is None:
            yield
            return
        stream: torch.cuda.Stream = {"_in": self._in, "_out": self._out}.get(name, self._compute)
        # An event that was never recorded is no reason to wait.
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            yield
        then.record(stream)
