"""Per-slot state on the device: block tables and sampling parameters, updated from the host.

The host writes into its own copy at any time; before a transfer it is copied into pinned memory
that stays untouched while passes in flight may still read it.

Axes: S slots, Q sampled rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from sortedrl.engines.native.native_request import Request
from sortedrl.engines.native.sampler import SamplerInputs, TokenFilters

BUFFERS = 3
"""One being written, one being copied, one to spare."""
_ALL_TOKENS = 1 << 30


class SlotState:
    """State of the request in each slot; the last slot is padding."""

    def __init__(self, slots: int, max_blocks: int, device: torch.device) -> None:
        """Empty slots."""
        self.padding_slot = slots
        self._tables = BlockTables((slots + 1, max_blocks), device)
        self._params = Mirror((slots + 1, 6), torch.int64, device)
        self._is_filtered = numpy.zeros(slots + 1, dtype=bool)
        self._admissions = [0] * (slots + 1)
        self._num_blocks = [0] * (slots + 1)

    @property
    def block_tables(self) -> Tensor:
        """The blocks of each slot."""
        return self._tables.device

    def is_any_filtered(self, slots: NDArray[numpy.int32]) -> bool:
        """Whether a request in one of these slots has filters."""
        return bool(self._is_filtered[slots].any())

    def update(self, request: Request) -> None:
        """Note a request that is new in its slot, or has new blocks."""
        slot = request.slot
        if slot is None:  # preempted since
            return
        if self._admissions[slot] != request.admission:
            self._admissions[slot] = request.admission
            self._num_blocks[slot] = 0
            sampling = request.sampling
            inverse = 1 / sampling.temperature if sampling.temperature else 0.0
            bits = numpy.array([inverse, sampling.top_p, sampling.min_p], dtype=numpy.float32)
            self._params.host[slot] = (
                request.stream,
                request.prompt_tokens,
                sampling.top_k or _ALL_TOKENS,
                *bits.view(numpy.int32),
            )
            self._params.is_dirty = True
            self._is_filtered[slot] = sampling.is_filtered
        known = self._num_blocks[slot]
        if known < len(request.blocks):
            self._tables.write(slot, known, request.blocks[known:])
            self._num_blocks[slot] = len(request.blocks)

    def send(self) -> None:
        """Copy what has changed to the device."""
        self._tables.send()
        self._params.send()

    def sampler_inputs(
        self, slots_Q: Tensor, *, positions_Q: Tensor, expected_Q: Tensor
    ) -> tuple[SamplerInputs, TokenFilters]:
        """The sampler inputs of rows at these positions in these slots."""
        params_Q6 = self._params.device[slots_Q]
        numbers_Q3 = params_Q6[:, 3:].to(torch.int32).view(torch.float32)
        draw = SamplerInputs(
            streams_Q=params_Q6[:, 0].contiguous(),
            positions_Q=(positions_Q + 1 - params_Q6[:, 1]).to(torch.int32),
            inverse_temperatures_Q=numbers_Q3[:, 0].contiguous(),
            expected_Q=expected_Q,
        )
        return draw, TokenFilters(params_Q6[:, 2], numbers_Q3[:, 1], numbers_Q3[:, 2])


class BlockTables:
    """The blocks of each slot on the device; only the cells that changed are sent."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        """Zeros."""
        self.device = torch.zeros(shape, dtype=torch.int32, device=device)
        self._cells: list[int] = []
        self._blocks: list[int] = []
        self._travelling: deque[Tensor] = deque()

    def write(self, slot: int, start: int, blocks: Sequence[int]) -> None:
        """Set the blocks of a slot from place `start` on, with the next `send`."""
        first = slot * self.device.shape[1] + start
        self._cells += range(first, first + len(blocks))
        self._blocks += blocks

    def send(self) -> None:
        """Copy the changed cells, behind the passes in flight that still read the old ones."""
        count = len(self._cells)
        if not count:
            return
        if not self._travelling or self._travelling[0].shape[1] < 2 * count:
            shape = (1, 4 * count)
            self._travelling = deque(
                pinned(shape, torch.int64, self.device.device) for _ in range(BUFFERS)
            )
        # A slot may have had two requests since: the later block of a cell must win.
        changed = dict(zip(self._cells, self._blocks, strict=True))
        count = len(changed)
        self._travelling.rotate(1)
        staged = self._travelling[0][0, : 2 * count].view(2, count)
        staged.numpy()[:] = [list(changed), list(changed.values())]
        sent = staged.to(self.device.device, non_blocking=True)
        self.device.view(-1).index_copy_(0, sent[0], sent[1].to(torch.int32))
        self._cells.clear()
        self._blocks.clear()


class Mirror:
    """A table that is written on the host and read on the device."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        """Zeros on both sides."""
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        self.host = torch.zeros(shape, dtype=dtype).numpy()
        self.is_dirty = False
        self._travelling = deque(pinned(shape, dtype, device) for _ in range(BUFFERS))

    def send(self) -> None:
        """Copy it to the device, behind the passes in flight that still read the old one."""
        if self.is_dirty:
            self._travelling.rotate(1)
            self._travelling[0].numpy()[:] = self.host
            self.device.copy_(self._travelling[0], non_blocking=True)
            self.is_dirty = False


def pinned(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Pinned host memory, for asynchronous copies."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
