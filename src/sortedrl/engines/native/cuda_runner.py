"""Forward passes on a GPU: the whole pass, from rows to sampled tokens, as one CUDA graph.

The host only sends which rows run (one small copy in) and reads the sampled tokens (one small copy
out). The input token of a row may be one that the host has not read yet, because the device keeps
the last token of every slot. Passes come in a few sizes; the first pass of a size runs eagerly, the
second is captured, later ones are replays. Block tables and sampling parameters of every slot are
on the device too (`SlotState`). The host writes into its own copy at any time; before a transfer it
is copied into pinned memory that is not reused while passes in flight may still read it.

Axes: R rows, Q sampled rows, S slots, V vocabulary, K key/value heads, N places, D head dimension.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from sortedrl.engines.native.attention_kernels import (
    SPLIT_TOKENS,
    KernelRows,
    TileRows,
    paged_attention,
    tokens_per_tile,
    write_cache,
)
from sortedrl.engines.native.hf_model import HFModel, attention_shape
from sortedrl.engines.native.matmul import (
    PackedLinears,
    ProductTimer,
    fewest_invariant_rows,
    fewest_rows,
    fp32_logits,
    invariant_products,
    linear_layers,
    no_split_k,
    with_same_input,
)
from sortedrl.engines.native.native_request import Request
from sortedrl.engines.native.planner import DecodeRows, Plan, RowSpan
from sortedrl.engines.native.sampler import SampledTokens, SamplerInputs, TokenFilters
from sortedrl.engines.native.sampler_kernels import filter_floors, sample
from sortedrl.engines.sampling import CacheSize
from sortedrl.models.attention_interface import AttentionInputs
from sortedrl.models.offload import Offloader

BUFFERS = 3
"""One being written, one being copied, one spare."""
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
        """Record a request that is new in its slot, or has new blocks."""
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
        """Copy the changed cells, after the passes in flight that still read the old ones."""
        count = len(self._cells)
        if not count:
            return
        if not self._travelling or self._travelling[0].shape[1] < 2 * count:
            shape = (1, 4 * count)
            self._travelling = deque(
                pinned(shape, torch.int64, self.device.device) for _ in range(BUFFERS)
            )
        # A slot may have had two requests since then: the later block of a cell must win.
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
        """Copy it to the device, after the passes in flight that still read the old values."""
        if self.is_dirty:
            self._travelling.rotate(1)
            self._travelling[0].numpy()[:] = self.host
            self.device.copy_(self._travelling[0], non_blocking=True)
            self.is_dirty = False


def pinned(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Pinned host memory, for asynchronous copies."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


_SIZES = (8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
_BIG_ROWS = 512
_MOST_PADDED = 128
_TOKENS, _POSITIONS, _SLOTS = 0, 1, 2
_TILES, _SPAN_TILES = slice(3, 5), slice(5, 7)
_EXPECTED, _COMMIT, _NUM_ROWS = 7, 8, 9
_TAKE_LAST = -1


@dataclass(frozen=True, slots=True)
class _Size:
    """The key of a CUDA graph."""

    rows: int
    sampled: int
    splits: int
    is_filtered: bool
    has_span_tiles: bool


@dataclass(slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    results_4Q: Tensor


@dataclass(frozen=True, slots=True)
class _Ticket:
    """Results that are being copied to the host."""

    results_4Q: NDArray[numpy.int32]
    arrived: torch.cuda.Event


class CudaRunner:
    """Runs plans on a GPU, one pass ahead of the host."""

    lag = 1
    _is_recordable = True

    def __init__(
        self,
        hf_model: HFModel,
        *,
        size: CacheSize,
        slots: int,
        max_rows: int,
        is_compiled: bool,
    ) -> None:
        """Allocate the KV cache and the transfer buffers; graphs are captured on demand."""
        layers, heads, dim = attention_shape(hf_model.config)
        device, places = hf_model.device, size.num_blocks * size.block_tokens
        tiles = _tile_rows(hf_model.dtype)
        self._hf_model = hf_model
        self._device = device
        # Before the cache takes the memory.
        self._packed = [PackedLinears(layers) for layers in with_same_input(hf_model.model)]
        # Room to pad to, also in an engine of few slots.
        self._max_rows = max(_rounded(max_rows), _MOST_PADDED)
        self._attention = _CudaPagedAttention(
            [
                (
                    torch.zeros(heads, places, dim, dtype=hf_model.dtype, device=device),
                    torch.zeros(heads, places, dim, dtype=hf_model.dtype, device=device),
                )
                for _ in range(layers)
            ],
            block_tokens=size.block_tokens,
            tile_rows=tiles,
        )
        group = hf_model.config.num_attention_heads // heads
        self._tile_tokens = tokens_per_tile(group, tile_rows=tiles.decode)
        self._span_tile_tokens = tokens_per_tile(group, tile_rows=tiles.spans)
        self._rows = torch.zeros(_NUM_ROWS, self._max_rows, dtype=torch.int32, device=device)
        self._last_tokens_S = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self._slots = SlotState(slots, -(-hf_model.max_context // size.block_tokens) + 1, device)
        self._host_rows = deque(
            pinned((_NUM_ROWS, self._max_rows), torch.int32, device) for _ in range(BUFFERS)
        )
        self._host_results = deque(
            pinned((4, self._max_rows), torch.int32, device) for _ in range(BUFFERS)
        )
        self._offloader = Offloader(keep_values=False)
        self._recorded: dict[_Size, _Recorded | None] = {}
        self._pool = torch.cuda.graph_pool_handle()
        hf_model.replaced = {hf_model.output_layer: fp32_logits(hf_model.output_layer)}
        self._fewest = self._choose_products()
        if is_compiled:
            hf_model.compile_layers()

    def _choose_products(self) -> int:
        """Replace the linear layers; returns the smallest number of rows of a pass."""
        replaced = self._hf_model.replaced
        packed = {layer for group in self._packed for layer in group.layers}
        layers = [layer for layer in linear_layers(self._hf_model.model) if layer not in packed]
        layers += [group.whole for group in self._packed]
        products, fewest = dict(replaced), 1
        if self._device.type == "cuda":  # not if the kernels run in an interpreter, for tests
            # Engines of few slots compare as many, as all engines must have the same bits.
            sizes = {*(s for s in _SIZES if s <= max(self._max_rows, _BIG_ROWS)), self._max_rows}
            with no_split_k():
                fewest = fewest_invariant_rows(
                    layers, products, sizes=sorted(sizes), most=_MOST_PADDED
                )
                larger = sorted(size for size in sizes if size >= fewest)
                products |= invariant_products(layers, products, sizes=larger)
                timer = ProductTimer(layers, products)
                padded = [size for size in _SIZES if size <= min(self._max_rows, _MOST_PADDED)]
                fewest = max(fewest, fewest_rows(padded, timer))
        for group in self._packed:
            replaced |= group.forwards(products.pop(group.whole, group.whole))
        replaced |= products
        return fewest

    def weights_changed(self) -> None:
        """Graphs read the parameters in place; packed layers with other tensors are packed anew."""
        moved = [group for group in self._packed if not group.is_current]
        for group in moved:
            group.pack()
        if moved:
            self._forget_graphs()

    def _forget_graphs(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        # A known size is captured again at its next pass.
        self._recorded = dict.fromkeys(self._recorded)
        self._pool = torch.cuda.graph_pool_handle()

    def release(self) -> None:
        """Free the KV cache, and the graphs that hold its address."""
        self._forget_graphs()
        self._offloader.offload(self._attention.tensors)

    def restore(self) -> None:
        """Allocate the KV cache again."""
        self._offloader.onload()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> _Ticket:
        """Start a pass after those in flight."""
        size = self._fill(plan)
        if size in self._recorded and self._is_recordable:
            recorded = self._recorded[size] or self._record(size)
            recorded.graph.replay()
            results_4Q = recorded.results_4Q
        else:
            self._recorded[size] = None
            results_4Q = self._run(size)
        self._host_results.rotate(1)
        host = self._host_results[0].flatten()[: 4 * size.sampled].view(4, size.sampled)
        host.copy_(results_4Q, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return _Ticket(host.numpy(), arrived)

    def collect(self, ticket: object) -> SampledTokens:
        """Wait for the results of a pass."""
        assert isinstance(ticket, _Ticket), "tickets come from launch"
        ticket.arrived.synchronize()
        numbers = ticket.results_4Q.view(numpy.float32)
        return SampledTokens(
            tokens=ticket.results_4Q[0].tolist(),
            logprobs=numbers[1].tolist(),
            gaps=numbers[2].tolist(),
            expected_logprobs=numbers[3].tolist(),
        )

    def _fill(self, plan: Plan) -> _Size:
        """Fill the host buffer with the rows of a plan, and start its copy."""
        self._host_rows.rotate(1)
        host = self._host_rows[0].numpy()
        host[:_EXPECTED] = 0
        host[_SLOTS] = self._slots.padding_slot
        host[_EXPECTED:] = -1
        for request in plan.changed:
            self._slots.update(request)
        row = tile = len(plan.decode)
        span_tile = 0
        _fill_decoding(host, plan.decode)
        for span in plan.verified + plan.unsampled:
            _fill_span(host, span, row)
            for start in range(0, span.num_rows, self._span_tile_tokens):
                count = min(self._span_tile_tokens, span.num_rows - start)
                if count > self._tile_tokens:
                    host[_SPAN_TILES, span_tile] = row + start, count
                    span_tile += 1
                else:
                    host[_TILES, tile] = row + start, count
                    tile += 1
            row += span.num_rows
        longest = int(host[_POSITIONS, : plan.num_rows].max()) + 1
        is_filtered = self._slots.is_any_filtered(host[_SLOTS, : plan.num_sampled])
        self._rows.copy_(self._host_rows[0], non_blocking=True)
        self._slots.send()
        rows = _rounded(max(plan.num_rows, self._fewest))
        # Passes with prefill are few and large: fewer sizes, so that graphs are reused.
        fewest = 1 if rows <= _BIG_ROWS else min(rows, _rounded(self._slots.padding_slot))
        sampled = min(rows, _rounded(max(plan.num_sampled, fewest, self._fewest)))
        splits = 1 << (-(-longest // SPLIT_TOKENS) - 1).bit_length()
        return _Size(rows, sampled, splits, is_filtered, span_tile > 0)

    def _record(self, size: _Size) -> _Recorded:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            results_4Q = self._run(size)
        recorded = self._recorded[size] = _Recorded(graph, results_4Q)
        return recorded

    def _run(self, size: _Size) -> Tensor:
        rows = self._rows[:, : size.rows]
        slots_R, positions_R = rows[_SLOTS], rows[_POSITIONS]
        last_R = self._last_tokens_S[slots_R]
        tokens_R = torch.where(rows[_TOKENS] == _TAKE_LAST, last_R, rows[_TOKENS])
        starts, counts = rows[_TILES]
        span_tiles = None
        if size.has_span_tiles:
            # A slot has a row that decodes, or two spans at most that each leave a small tile.
            most = min(size.rows, 2 * self._slots.padding_slot)
            starts, counts = starts[:most], counts[:most]
            # Smaller ones are no tiles of spans.
            most = size.rows // (self._tile_tokens + 1)
            span_starts, span_counts = rows[_SPAN_TILES]
            span_tiles = span_starts[:most], span_counts[:most]
        self._attention.rows = KernelRows(
            slots_R=slots_R,
            positions_R=positions_R,
            tile_starts_R=starts,
            tile_counts_R=counts,
            block_tables=self._slots.block_tables,
            span_tiles=span_tiles,
        )
        self._attention.num_splits = size.splits
        keep_Q = torch.arange(size.sampled, device=self._device)
        with self._hf_model.patched(), no_split_k():
            logits_QV = self._hf_model.forward(
                tokens_R.long(), positions_R.long(), keep_Q, self._attention
            )
        draw, keep = self._slots.sampler_inputs(
            slots_R[: size.sampled],
            positions_Q=positions_R[: size.sampled],
            expected_Q=rows[_EXPECTED, : size.sampled],
        )
        if size.is_filtered:
            floors_Q = filter_floors(logits_QV, draw, keep)
        else:
            floors_Q = torch.full_like(draw.inverse_temperatures_Q, -torch.inf)
        chosen = sample(
            logits_QV,
            draw,
            floors_Q=floors_Q,
            commit_slots_Q=rows[_COMMIT, : size.sampled],
            last_tokens_S=self._last_tokens_S,
        )
        numbers = (chosen.logprobs_Q, chosen.gaps_Q, chosen.expected_logprobs_Q)
        return torch.stack((chosen.tokens_Q, *(n.view(torch.int32) for n in numbers)))


class _CudaPagedAttention:
    def __init__(
        self,
        caches: Sequence[tuple[Tensor, Tensor]],
        *,
        block_tokens: int,
        tile_rows: TileRows,
    ) -> None:
        """The cache of every layer; the rows are set before each pass."""
        self.rows: KernelRows | None = None
        self.num_splits = 1
        self._caches = caches
        self._block_tokens = block_tokens
        self._tile_rows = tile_rows

    @property
    def tensors(self) -> list[Tensor]:
        """Keys and values of all layers."""
        return [tensor for pair in self._caches for tensor in pair]

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Write the new keys and values, then attend for each tile."""
        assert self.rows is not None, "the rows are set before each pass"
        keys_KND, values_KND = self._caches[inputs.layer]
        write_cache(
            inputs.k_1KRD,
            inputs.v_1KRD,
            keys_KND,
            values_KND,
            rows=self.rows,
            block_tokens=self._block_tokens,
        )
        return paged_attention(
            inputs.q_1HRD,
            keys_KND,
            values_KND,
            rows=self.rows,
            block_tokens=self._block_tokens,
            scale=inputs.scale,
            window=inputs.window,
            num_splits=self.num_splits,
            tile_rows=self._tile_rows,
        )


def _tile_rows(dtype: torch.dtype) -> TileRows:
    """Tall tiles make the attention of long prefills faster, but spill registers in fp32."""
    return TileRows() if dtype == torch.float32 else TileRows(spans=64)


def _fill_decoding(host: NDArray[numpy.int32], rows: DecodeRows) -> None:
    """Fill the rows of requests that only decode, one tile each: all rows of most passes."""
    count = len(rows)
    # The host knows the token of a row only if it is not in flight.
    host[_TOKENS, :count] = [
        _TAKE_LAST if request.num_inflight_tokens > 1 else request.tokens[-1]
        for request in rows.requests
    ]
    host[_POSITIONS, :count] = rows.starts
    host[_SLOTS, :count] = host[_COMMIT, :count] = rows.slots
    starts, counts = host[_TILES]
    starts[:count] = numpy.arange(count)
    counts[:count] = 1


def _fill_span(host: NDArray[numpy.int32], span: RowSpan, row: int) -> None:
    end, rows = span.start + span.num_rows, slice(row, row + span.num_rows)
    host[_TOKENS, rows] = span.request.tokens[span.start : end]
    host[_POSITIONS, rows] = range(span.start, end)
    host[_SLOTS, rows] = span.slot
    if span.is_speculative:
        host[_COMMIT, row] = span.slot
    _fill_expected(host, span, row)


def _fill_expected(host: NDArray[numpy.int32], span: RowSpan, row: int) -> None:
    if span.is_sampled:
        expected = span.request.tokens[span.start + 1 : span.start + span.num_rows + 1]
        host[_EXPECTED, row : row + len(expected)] = expected


def _rounded(count: int) -> int:
    """The next size of pass."""
    return next((size for size in _SIZES if size >= count), -(-count // 1024) * 1024)
