"""Speed of matrix product and attention kernels of a pass on a GPU.

    python benchmarks/products.py --out products.json    one H200, about four minutes
    python benchmarks/products.py --compile              for an H200, on a machine without a GPU
    python benchmarks/products.py --cpu                  toy sizes in Triton's interpreter

For the weights of each model and several numbers of rows: default cuBLAS, cuBLAS without split-K
(as in the engine), and our products with a fixed split of K over a sweep of slices and tiles. Rows
must have the same bits at every number of rows, and be close to those of the library. Then prefill
and decode attention with tiles of several heights.

Products alternate over copies of the weights that exceed the L2 cache, in CUDA graphs.
`--compile` prints registers, spills and shared memory of every kernel of the sweep.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import tyro
from torch import Tensor
from torch.nn.functional import linear

if TYPE_CHECKING:
    from rich.table import Table

    from sortedrl.engines.native.attention_kernels import TileRows
    from sortedrl.engines.native.product_kernels import Tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure."""

    models: tuple[str, ...] = ("llama-8b", "qwen2.5-32b", "qwen2.5-1.5b", "smollm2-135m")
    """Models; the full sweep is for the first."""
    rows: tuple[int, ...] = (16, 32, 64, 96, 128, 256, 512)
    """Rows of a pass."""
    seconds: float = 240
    """Time limit: nothing is started later."""
    processes: int = 14
    """Kernels compiled in parallel, at most one per core."""
    attention: bool = True
    """Also measure attention."""
    out: Path | None = None
    """Write all numbers to this file, as JSON."""
    compile: bool = False
    """Only compile the kernels of the sweep for Hopper; needs no GPU."""
    cpu: bool = False
    """Run everything with toy sizes in the interpreter; times are meaningless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Weights of a model."""

    model: str
    name: str
    columns: int
    inputs: int
    has_bias: bool = False
    is_wide: bool = False
    """Whether the result stays in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One product at one number of rows."""

    shape: Shape
    rows: int
    product: str
    """`cublas`, `unsplit` or `ours`."""
    slices: int | None = None
    tile: Tile | None = None
    microseconds: float
    bandwidth_share: float
    has_same_bits: bool
    """Whether rows have the same bits as in the largest pass."""


@dataclass(slots=True)
class Results:
    """The measurements so far."""

    copy_bandwidth: float = 0.0
    largest_error: float = 0.0
    """Of our products relative to those of the library, in the norm of a whole pass."""
    products: list[Timed] = field(default_factory=list)
    attention: list[dict[str, object]] = field(default_factory=list)
    compiled: list[dict[str, object]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def shapes_of(model: str) -> list[Shape]:
    """The products of a model, and of weights that could be packed."""
    from engine_peers.models import SHAPES

    config: Any = SHAPES[model]
    hidden, ffn, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    keys = hidden // heads * config.num_key_value_heads
    has_bias = config.model_type == "qwen2"
    shapes = [
        Shape(model=model, name="q", columns=hidden, inputs=hidden, has_bias=has_bias),
        Shape(model=model, name="k", columns=keys, inputs=hidden, has_bias=has_bias),
        Shape(model=model, name="qkv", columns=hidden + 2 * keys, inputs=hidden, has_bias=has_bias),
        Shape(model=model, name="o", columns=hidden, inputs=hidden),
        Shape(model=model, name="gate", columns=ffn, inputs=hidden),
        Shape(model=model, name="gate-up", columns=2 * ffn, inputs=hidden),
        Shape(model=model, name="down", columns=hidden, inputs=ffn),
        Shape(model=model, name="head", columns=config.vocab_size, inputs=hidden, is_wide=True),
    ]
    return [shape for shape in shapes if has_bias or shape.name != "o"]  # it is that of q


TOY = [
    Shape(model="toy", name="q", columns=48, inputs=256, has_bias=True),
    Shape(model="toy", name="k", columns=16, inputs=256),
    Shape(model="toy", name="qkv", columns=80, inputs=256),
    Shape(model="toy", name="gate", columns=64, inputs=256),
    Shape(model="toy", name="gate-up", columns=128, inputs=256),
    Shape(model="toy", name="head", columns=100, inputs=256, is_wide=True),
]
_SHARED_BYTES = 227 << 10
_L2_BYTES = 160 << 20
_MOST_COPIES = 256
_SLICES = (1, 2, 4, 8)


def tiles(rows: int, *, slices: int, is_whole: bool, is_toy: bool = False) -> Iterator[Tile]:
    """The tiles to try for this many rows that fit into shared memory."""
    from sortedrl.engines.native.product_kernels import Tile

    height = min(128, max(16, 1 << (rows - 1).bit_length()))
    if is_toy:
        for is_tma in (False, True):
            yield Tile(
                columns=64, rows=height, warps=4, stages=2, is_parallel=slices > 1, is_tma=is_tma
            )
        return
    for columns in (64, 128, 256) if is_whole else (128, 256):
        for stages in (4, 6) if is_whole else (4,):
            for is_tma in (False, True):
                for is_parallel in (False, True) if slices > 1 else (False,):
                    area = columns * height
                    # Two accumulators of that size do not fit into the registers.
                    is_spilling = area > 16384 and slices > 1 and not is_parallel
                    tile = Tile(
                        columns=columns, rows=height, warps=8 if area > 8192 else 4, stages=stages,
                        is_parallel=is_parallel, is_tma=is_tma,
                    )  # fmt: skip
                    is_useful = is_parallel or slices == 1 or rows > 128
                    if tile.stage_bytes() + 1024 <= _SHARED_BYTES and is_useful and not is_spilling:
                        yield tile


def sweep(shape: Shape, rows: int, *, is_whole: bool, is_toy: bool) -> Iterator[tuple[int, Tile]]:
    """Slices and tiles to try for a shape."""
    from sortedrl.engines.native.product_kernels import BLOCK_K, num_slices

    usual = num_slices(shape.columns, shape.inputs)
    for slices in _SLICES if is_whole else (usual,):
        # More programs would only write more sums.
        is_fine = shape.columns * slices <= 64 * 1024 and slices * 2 * BLOCK_K <= shape.inputs
        if slices in (1, usual) or is_fine:
            for tile in tiles(rows, slices=slices, is_whole=is_whole, is_toy=is_toy):
                yield slices, tile


# Compiling: all kernels of the sweep, in several processes, into Triton's cache on disk.


class _Hopper:
    """A fake driver, to compile without a GPU."""

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


@contextmanager
def compiling_only() -> Iterator[list[Any]]:
    """Make launches only compile for Hopper; yields the list of kernels."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    kernels: list[Any] = []
    run = JITFunction.run

    def compiled(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:  # noqa: ANN401
        del warmup
        kernels.append(run(self, *args, warmup=True, **kwargs))

    driver.set_active(_Hopper())
    with patch.object(JITFunction, "run", compiled):
        yield kernels


def compiled_product(task: tuple[Shape, int, int, Tile]) -> list[dict[str, object]]:
    """Compile the kernels of a product."""
    from sortedrl.engines.native.product_kernels import multiply

    shape, rows, slices, tile = task
    x, weight, bias = (
        torch.empty(size, dtype=torch.bfloat16, device="meta")
        for size in ((rows, shape.inputs), (shape.columns, shape.inputs), (shape.columns,))
    )
    with compiling_only() as kernels:
        multiply(
            x, weight, bias if shape.has_bias else None, slices=slices, tile=tile,
            out_dtype=torch.float32 if shape.is_wide else None,
        )  # fmt: skip
    return [usage(kernels[0]) | {"slices": slices, **asdict(tile)}]


def compiled_attention(task: tuple[int, int, int, TileRows]) -> list[dict[str, object]]:
    """Compile the kernels of attention: query heads per key head, head dimension, splits, tiles."""
    group, dim, splits, heights = task
    with compiling_only() as kernels:
        attend(
            AttentionWorld.of(
                ((0, 0, 16), (1, 0, 512)), heights, key_heads=8, group=group, dim=dim, device="meta"
            ),
            heights,
            num_splits=splits,
        )
    return [
        usage(kernel) | {"group": group, "dim": dim, **asdict(heights)}
        for kernel in kernels
        if kernel.name == "_attend"
    ]


def usage(kernel: Any) -> dict[str, object]:  # noqa: ANN401
    """Registers, spilled bytes and shared memory of a compiled kernel, and its instructions."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        dump = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", dump)
    assert found is not None, dump
    ptx = kernel.asm["ptx"]
    return {
        "kernel": kernel.name,
        "registers": int(found[1]),
        "spilled_bytes": int(found[2]),
        "shared_bytes": kernel.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "tma": ptx.count("cp.async.bulk.tensor"),
    }


def compile_all(settings: Settings) -> list[dict[str, object]]:
    """Compile every kernel of the sweep once."""
    from sortedrl.engines.native.attention_kernels import TileRows

    products: dict[tuple[object, ...], tuple[Shape, int, int, Tile]] = {}
    for place, model in enumerate(settings.models):
        for shape in shapes_of(model):
            for rows in settings.rows:
                for slices, tile in sweep(shape, rows, is_whole=place == 0, is_toy=False):
                    is_even = shape.inputs % (slices * 64) == 0
                    kind = (tile, slices == 1, is_even, shape.has_bias, shape.is_wide)
                    products.setdefault(kind, (shape, rows, slices, tile))
    heights = [TileRows(**each) for each in HEIGHTS]
    attention = [
        (group, dim, splits, each)
        for group, dim in ((4, 128), (5, 128), (6, 128), (3, 64))
        for splits in (1, 2)
        for each in heights
    ]
    workers = min(os.cpu_count() or 1, settings.processes)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        found = [
            *pool.map(compiled_product, products.values(), chunksize=4),
            *pool.map(compiled_attention, attention),
        ]
    return [kernel for kernels in found for kernel in kernels]


# Products.


class Bench:
    """Products of one shape: weights, inputs and results."""

    def __init__(self, shape: Shape, settings: Settings, results: Results) -> None:
        """Random weights, with enough copies to exceed the L2 cache."""
        dtype, device = _place(settings)
        self.shape = shape
        self._is_toy = settings.cpu
        self._results = results
        self._size = shape.columns * shape.inputs * dtype.itemsize
        copies = 2 if settings.cpu else max(2, min(_MOST_COPIES, -(-_L2_BYTES // self._size)))
        torch.manual_seed(0)
        weights = torch.empty(copies, shape.columns, shape.inputs, dtype=dtype, device=device)
        self._weights = weights.normal_(std=shape.inputs**-0.5)
        self._bias: Tensor | None = None
        if shape.has_bias:
            self._bias = torch.randn(shape.columns, dtype=dtype, device=device)
        self._most = torch.randn(max(settings.rows), shape.inputs, dtype=dtype, device=device)
        self._references: dict[int, Tensor] = {}
        self._expected: Tensor | None = None

    def library(self, name: str, rows: Iterable[int]) -> None:
        """Time the library."""

        def product(weight: Tensor, x: Tensor) -> Tensor:
            if self.shape.is_wide and not self._is_toy:
                return torch.mm(x, weight.t(), out_dtype=torch.float32)
            return linear(x, weight, self._bias)

        whole = self._expected = product(self._weights[0], self._most)
        for count in rows:
            self._note(name, count, product, whole)

    def ours(self, rows: int, slices: int, tile: Tile) -> None:
        """Time one of our products."""
        from sortedrl.engines.native.product_kernels import multiply

        out_dtype = torch.float32 if self.shape.is_wide else None
        run = partial(multiply, slices=slices, out_dtype=out_dtype)
        if slices not in self._references:
            found = run(self._most, self._weights[0], self._bias)
            assert self._expected is not None, "the library comes first"
            error = (found.float() - self._expected.float()).norm() / self._expected.float().norm()
            # Also if it is not a number.
            if not error <= self._results.largest_error:
                self._results.largest_error = float(error)
            self._references[slices] = found
        self._note(
            "ours",
            rows,
            lambda weight, x: run(x, weight, self._bias, tile=tile),
            self._references[slices],
            slices=slices,
            tile=tile,
        )

    def _note(
        self,
        name: str,
        rows: int,
        product: Callable[[Tensor, Tensor], Tensor],
        whole: Tensor,
        *,
        slices: int | None = None,
        tile: Tile | None = None,
    ) -> None:
        x = self._most[:rows]
        products = [partial(product, weight) for weight in self._weights]
        out = products[0](x)
        taken = seconds_of(products, x, is_toy=self._is_toy)
        moved = self._size + x.nbytes + out.nbytes
        self._results.products.append(
            Timed(
                shape=self.shape,
                rows=rows,
                product=name,
                slices=slices,
                tile=tile,
                microseconds=1e6 * taken,
                bandwidth_share=moved / taken / self._results.copy_bandwidth,
                has_same_bits=torch.equal(out, whole[:rows]),
            )
        )


def measure_shape(
    shape: Shape, settings: Settings, results: Results, *, is_whole: bool, until: float
) -> None:
    """Time all products of a shape, and compare their bits over numbers of rows."""
    from sortedrl.engines.native.matmul import no_split_k

    bench = Bench(shape, settings, results)
    bench.library("cublas", settings.rows)
    with nullcontext() if settings.cpu else no_split_k():
        bench.library("unsplit", settings.rows)
    for rows in settings.rows:
        for slices, tile in sweep(shape, rows, is_whole=is_whole, is_toy=settings.cpu):
            if time.monotonic() > until:
                results.left_out.append(f"{shape.name} at {rows} rows and more")
                return
            bench.ours(rows, slices, tile)


def seconds_of(
    products: Sequence[Callable[[Tensor], Tensor]], x: Tensor, *, is_toy: bool = False
) -> float:
    """Seconds of one of these products."""
    from sortedrl.engines.native.matmul import graphed_seconds

    if not is_toy:
        return graphed_seconds(products, x)
    began = time.perf_counter()
    for product in products:
        product(x)
    return (time.perf_counter() - began) / len(products)


def best(results: Results, shape: Shape, settings: Settings) -> tuple[int | None, dict[int, Timed]]:
    """The fastest number of slices over the decode sizes, and the best tile at each size."""
    by_slices: dict[int, dict[int, Timed]] = {}
    for timed in results.products:
        if timed.shape == shape and timed.slices is not None and timed.has_same_bits:
            sizes = by_slices.setdefault(timed.slices, {})
            known = sizes.get(timed.rows)
            if known is None or timed.microseconds < known.microseconds:
                sizes[timed.rows] = timed
    decode = [rows for rows in settings.rows if rows <= 256]
    whole = {
        slices: sum(sizes[rows].microseconds for rows in decode)
        for slices, sizes in by_slices.items()
        if all(rows in sizes for rows in decode)
    }
    if not whole:
        return None, {}
    slices = min(whole, key=whole.__getitem__)
    return slices, by_slices[slices]


# Attention.

HEIGHTS: tuple[Mapping[str, int], ...] = (
    {},
    {"spans": 64},
    {"spans": 128},
    {"decode": 64, "spans": 64},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWorld:
    """Queries and a cache: rows of several sequences, in tiles."""

    q: Tensor
    key_cache: Tensor
    value_cache: Tensor
    rows: Any
    block_tokens: int = 32

    @classmethod
    def of(
        cls,
        spans: Iterable[tuple[int, int, int]],
        heights: TileRows,
        *,
        key_heads: int,
        group: int,
        dim: int,
        device: str,
        narrow: bool = False,
    ) -> AttentionWorld:
        """Spans of `(slot, first position, rows)`; `narrow` puts all of them into decode tiles."""
        from sortedrl.engines.native.attention_kernels import KernelRows, tokens_per_tile

        small = tokens_per_tile(group, tile_rows=heights.decode)
        large = small if narrow else tokens_per_tile(group, tile_rows=heights.spans)
        slots: list[int] = []
        positions: list[int] = []
        tiles_of_size: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
        for slot, first, count in spans:
            for start in range(0, count, large):
                rows = min(large, count - start)
                tiles_of_size[rows > small].append((len(slots) + start, rows))
            slots += [slot] * count
            positions += range(first, first + count)
        blocks = -(-(max(positions) + 1) // 32)
        num_slots = max(slots) + 1
        dtype = torch.float16 if device == "cpu" else torch.bfloat16

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        def random(*size: int) -> Tensor:
            generator = None
            if device != "meta":
                generator = torch.Generator(device).manual_seed(size[1])
            return torch.randn(*size, dtype=dtype, device=device, generator=generator)

        def listed(tiles: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
            starts, counts = zip(*tiles, strict=True)
            return ints(starts), ints(counts)

        starts, counts = listed(tiles_of_size[False] or [(0, 0)])
        tables = torch.arange(num_slots * blocks, dtype=torch.int32, device=device)
        return cls(
            q=random(1, len(slots), key_heads * group, dim).transpose(1, 2),
            key_cache=random(key_heads, num_slots * blocks * 32, dim),
            value_cache=random(key_heads, num_slots * blocks * 32, dim).roll(1, 1),
            rows=KernelRows(
                slots_R=ints(slots),
                positions_R=ints(positions),
                tile_starts_R=starts,
                tile_counts_R=counts,
                block_tables=tables.view(num_slots, blocks),
                span_tiles=listed(tiles_of_size[True]) if tiles_of_size[True] else None,
            ),
        )


def attend(world: AttentionWorld, heights: TileRows, *, num_splits: int) -> Tensor:
    """Attention of all rows."""
    from sortedrl.engines.native.attention_kernels import paged_attention

    return paged_attention(
        world.q, world.key_cache, world.value_cache,
        rows=world.rows, block_tokens=world.block_tokens, scale=world.q.shape[3] ** -0.5,
        window=None, num_splits=num_splits, tile_rows=heights,
    )  # fmt: skip


def measure_attention(settings: Settings, results: Results, *, until: float) -> None:
    """Prefill in chunks of 2,048 rows, and decoding, at the shape of LLaMA-3.1-8B."""
    from sortedrl.engines.native.attention_kernels import TileRows

    chunk = 8 if settings.cpu else 2048
    shape = {"key_heads": 1, "group": 4, "dim": 16} if settings.cpu else _HEADS_8B
    device = _place(settings)[1]
    lengths = (20,) if settings.cpu else (1024, 4096, 16384)
    decoding = ((3, 20),) if settings.cpu else ((64, 8192), (128, 1024), (256, 512))
    works = [
        (f"prefill of {length:,} tokens", [
            [(0, first, min(chunk, length - first))] for first in range(0, length, chunk)
        ])
        for length in lengths
    ] + [
        (f"decoding of {slots} x {length:,}", [[(slot, length - 1, 1) for slot in range(slots)]])
        for slots, length in decoding
    ]  # fmt: skip
    for name, passes in works:
        for each in HEIGHTS:
            if time.monotonic() > until:
                results.left_out.append(f"attention: {name}")
                return
            heights = TileRows(**each)
            seconds, is_same = 0.0, True
            for spans in passes:
                longest = max(first + count for _, first, count in spans)
                splits = 1 << (-(-longest // 1024) - 1).bit_length()
                made = [
                    AttentionWorld.of(spans, heights, device=device, narrow=narrow, **shape)
                    for narrow in (False, True)
                ]
                outs = [attend(world, heights, num_splits=splits) for world in made]
                is_same = is_same and torch.equal(*outs)

                def product(
                    x: Tensor, world: AttentionWorld = made[0], splits: int = splits
                ) -> Tensor:
                    del x
                    return attend(world, heights, num_splits=splits)  # noqa: B023

                seconds += seconds_of([product], made[0].q, is_toy=settings.cpu)
            rows = sum(count for spans in passes for _, _, count in spans)
            results.attention.append(
                {
                    "work": name,
                    **asdict(heights),
                    "microseconds": 1e6 * seconds,
                    "tokens_per_second": rows / seconds,
                    "has_same_bits": is_same,
                }
            )


_HEADS_8B = {"key_heads": 8, "group": 4, "dim": 128}


# The report.


def show(results: Results, settings: Settings) -> None:
    """Print the short tables."""
    if results.compiled:
        show_compiled(results.compiled, is_whole=settings.compile)
    if results.products:
        show_products(results, settings)
        show_packing(results, settings)
    if results.attention:
        show_attention(results.attention)
    for name in results.left_out:
        print(f"no time left for {name}")


def show_compiled(kernels: Sequence[Mapping[str, object]], *, is_whole: bool) -> None:
    """Print the resources of kernels: all of them, or those that spill."""
    for kernel in kernels:
        if is_whole or kernel["spilled_bytes"]:
            print(", ".join(f"{name} {value}" for name, value in kernel.items()))
    for name in ("wgmma", "mma", "tma", "spilled_bytes"):
        count = sum(bool(kernel[name]) for kernel in kernels)
        print(f"{count} of {len(kernels)} kernels have {name}")


def show_products(results: Results, settings: Settings) -> None:
    """Print the products of all shapes, with the best of ours."""
    table = _table(
        "us (share of the copy bandwidth; ! = not batch-invariant)",
        ("weights", "rows", "cublas", "unsplit", "ours", "slices", "tile"),
    )
    for shape in dict.fromkeys(timed.shape for timed in results.products):
        _, ours = best(results, shape, settings)
        library = {
            (timed.product, timed.rows): timed
            for timed in results.products
            if timed.shape == shape and timed.tile is None
        }
        for rows in settings.rows:
            mine = ours.get(rows)
            table.add_row(
                f"{shape.model} {shape.name} {shape.columns} x {shape.inputs}",
                str(rows),
                _cell(library.get(("cublas", rows))),
                _cell(library.get(("unsplit", rows))),
                _cell(mine),
                "-" if mine is None else str(mine.slices),
                "-" if mine is None or mine.tile is None else _described(mine.tile),
            )
    _print(table)
    wrong = [t for t in results.products if t.product == "ours" and not t.has_same_bits]
    print(f"ours: {len(wrong)} products that are not batch-invariant")
    print(
        f"ours: differ from the library by at most {results.largest_error:.1e} (bf16: 4e-3 is fine)"
    )
    for timed in wrong[:10]:
        print("  ", timed)


def show_packing(results: Results, settings: Settings) -> None:
    """Print the times of packed and separate weights."""
    taken: dict[tuple[str, str, str, int], float] = {}
    for shape in dict.fromkeys(timed.shape for timed in results.products):
        _, ours = best(results, shape, settings)
        timed = [t for t in results.products if t.shape == shape and t.product == "unsplit"]
        for each in (*timed, *ours.values()):
            taken[shape.model, each.product, shape.name, each.rows] = each.microseconds
    table = _table(
        "us of separate and packed weights",
        ("model", "product", "rows", "q + 2 k", "qkv", "2 gate", "gate-up"),
    )
    for model, product, rows in dict.fromkeys((key[0], key[1], key[3]) for key in taken):
        times = {
            key[2]: time
            for key, time in taken.items()
            if (key[0], key[1], key[3]) == (model, product, rows)
        }
        if {"q", "k", "qkv", "gate", "gate-up"} <= times.keys():
            table.add_row(
                model,
                product,
                str(rows),
                f"{times['q'] + 2 * times['k']:.1f}",
                f"{times['qkv']:.1f}",
                f"{2 * times['gate']:.1f}",
                f"{times['gate-up']:.1f}",
            )
    _print(table)


def show_attention(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print attention by tile height."""
    table = _table(
        "attention of one layer", ("work", "tile", "tile of spans", "us", "tokens/s", "bits")
    )
    for row in rows:
        table.add_row(
            row["work"],
            str(row["decode"]),
            str(row["spans"]),
            f"{row['microseconds']:,.0f}",
            f"{row['tokens_per_second']:,.0f}",
            "same" if row["has_same_bits"] else "DIFFER",
        )
    _print(table)


def _table(title: str, headings: Iterable[str]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False, title=title)
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table


def _print(table: Table) -> None:
    from rich.console import Console

    Console(width=140).print(table)


def _cell(timed: Timed | None) -> str:
    if timed is None:
        return "-"
    mark = "" if timed.has_same_bits else " !"
    return f"{timed.microseconds:.1f} ({timed.bandwidth_share:.0%}){mark}"


def _described(tile: Tile) -> str:
    schedule = "parallel" if tile.is_parallel else "serial"
    way = ", TMA" if tile.is_tma else ""
    return (
        f"{tile.columns} x {tile.rows}, {tile.warps} warps, {tile.stages} stages, {schedule}{way}"
    )


def _place(settings: Settings) -> tuple[torch.dtype, str]:
    # The interpreter treats bfloat16 bits as integers.
    return (torch.float16, "cpu") if settings.cpu else (torch.bfloat16, "cuda")


def measure(settings: Settings, results: Results, *, keep: Callable[[], None]) -> None:
    """Measure within the time limit; the first model and attention first.

    `keep` is called after every shape, in case the machine is lost.
    """
    from engine_peers.models import copy_bandwidth

    until = time.monotonic() + settings.seconds
    with torch.inference_mode():
        results.copy_bandwidth = copy_bandwidth(_place(settings)[1])
        _say(f"copy bandwidth {results.copy_bandwidth / 1e9:,.0f} GB/s")
        models = settings.models[:1] if settings.cpu else settings.models
        for place, model in enumerate(models):
            for shape in TOY if settings.cpu else shapes_of(model):
                _say(f"{model}: {shape.name}, {shape.columns} x {shape.inputs}")
                measure_shape(shape, settings, results, is_whole=place == 0, until=until)
                keep()
            if place == 0 and settings.attention:
                _say("attention")
                measure_attention(settings, results, until=until)
                keep()


def main() -> None:
    """Measure and print."""
    settings = tyro.cli(Settings, description=__doc__)
    if settings.cpu:
        settings = replace(settings, rows=(3, 20))
        # A fixed order of tiles makes bits comparable.
        sys.path.append(str(Path(__file__).parents[1] / "tests"))
        interpreted = import_module("interpreted")
        assert not interpreted.HAS_CUDA, "the interpreter is for machines without a GPU"
    results = Results()
    try:
        if not settings.cpu:
            began = time.monotonic()
            results.compiled = compile_all(settings)
            _say(f"compiled in {time.monotonic() - began:.0f} s")
        if not settings.compile:
            measure(settings, results, keep=lambda: write(results, settings))
    finally:
        write(results, settings)
    show(results, settings)


def write(results: Results, settings: Settings) -> None:
    """Write the results so far."""
    from provenance import provenance

    if settings.out is None:
        return
    facts = provenance("cpu" if settings.cpu or settings.compile else "cuda")
    facts |= {"settings": asdict(settings), **asdict(results)}
    settings.out.write_text(json.dumps(facts, indent=1, default=str) + "\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
