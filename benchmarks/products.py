"""Speed of the matrix product and attention kernels of a pass on a GPU.

    python benchmarks/products.py --out products.json    one GPU
    python benchmarks/products.py --cpu                  toy sizes, attention in the interpreter

For the weights of each model and several numbers of rows: default cuBLAS, and cuBLAS without
split-K, as in the engine. Rows must have the same bits at every number of rows. A second table
compares separate weights with packed ones. The third has prefill and decode attention with tiles of
several heights, and whether the bits are those of decode tiles alone.

Products alternate over copies of the weights that exceed the L2 cache, in CUDA graphs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor
from torch.nn.functional import linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure."""

    models: tuple[str, ...] = ("llama-8b", "qwen2.5-32b", "qwen2.5-1.5b", "smollm2-135m")
    """Models whose products to time."""
    rows: tuple[int, ...] = (16, 32, 64, 96, 128, 256, 512)
    """Rows of a pass."""
    seconds: float = 240
    """Time limit: nothing is started later."""
    attention: bool = True
    """Also measure attention."""
    out: Path | None = None
    """Write all numbers to this file, as JSON."""
    cpu: bool = False
    """Run everything with toy sizes, without a GPU; times are meaningless."""


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

    @property
    def title(self) -> str:
        """Which weights of which model, outputs x inputs."""
        return f"{self.model} {self.name} {self.columns} x {self.inputs}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One product at one number of rows."""

    shape: Shape
    rows: int
    product: str
    """`cublas` or `unsplit`."""
    microseconds: float
    bandwidth_share: float
    has_same_bits: bool
    """Whether rows have the same bits as in the largest pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAttention:
    """The attention of one layer over some work, with tiles of two heights."""

    work: str
    decode: int
    spans: int
    microseconds: float
    tokens_per_second: float
    has_same_bits: bool
    """Whether rows have the same bits if all of them come in decode tiles."""


@dataclass(slots=True)
class Results:
    """The measurements so far."""

    copy_bandwidth: float = 0.0
    products: list[Timed] = field(default_factory=list)
    attention: list[TimedAttention] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


# Products.


def shapes_of(model: str) -> list[Shape]:
    """The weights of a model, separate and packed."""
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


_L2_BYTES = 160 << 20
_MOST_COPIES = 256
_REPEATS = 5


def measure_shape(shape: Shape, settings: Settings, results: Results) -> None:
    """Time the products of a shape, and compare their bits over numbers of rows."""
    from sortedrl.engines.native.matmul import no_split_k

    dtype, device = _place(settings)
    size = shape.columns * shape.inputs * dtype.itemsize
    copies = 2 if settings.cpu else max(2, min(_MOST_COPIES, -(-_L2_BYTES // size)))
    torch.manual_seed(0)
    weights = torch.empty(copies, shape.columns, shape.inputs, dtype=dtype, device=device)
    weights.normal_(std=shape.inputs**-0.5)
    bias = torch.randn(shape.columns, dtype=dtype, device=device) if shape.has_bias else None
    most = torch.randn(max(settings.rows), shape.inputs, dtype=dtype, device=device)

    def product(weight: Tensor, x: Tensor) -> Tensor:
        if shape.is_wide and not settings.cpu:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return linear(x, weight, bias)

    products = [partial(product, weight) for weight in weights]
    for name in ("cublas", "unsplit"):
        with nullcontext() if name == "cublas" or settings.cpu else no_split_k():
            whole = products[0](most)
            for rows in settings.rows:
                x = most[:rows]
                out = products[0](x)
                taken = seconds_of(products, x, is_toy=settings.cpu)
                moved = size + x.nbytes + out.nbytes
                timed = Timed(
                    shape=shape, rows=rows, product=name, microseconds=1e6 * taken,
                    bandwidth_share=moved / taken / results.copy_bandwidth,
                    has_same_bits=torch.equal(out, whole[:rows]),
                )  # fmt: skip
                results.products.append(timed)


def seconds_of(products: Sequence[Callable[[Tensor], object]], x: Tensor, *, is_toy: bool) -> float:
    """Seconds of one of these products, without the host's time to launch it.

    They alternate, so that weights come from memory as in a pass.
    """

    def run() -> None:
        for product in products:
            product(x)

    run()
    if is_toy:
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) / len(products)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    for _ in range(_REPEATS):
        graph.replay()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1000 / _REPEATS / len(products)


# Attention.

HEIGHTS = ((16, 16), (16, 64), (16, 128), (64, 64))
"""Rows of a tile: for decoding, and for spans."""
_BLOCK_TOKENS = 32
_Span = tuple[int, int, int]
"""Slot, first position, rows."""


def attention_work(*, is_toy: bool) -> dict[str, list[list[_Span]]]:
    """Prefill in chunks of 2,048 rows, and decoding: the spans of each pass."""
    chunk = 8 if is_toy else 2048
    lengths = (20,) if is_toy else (1024, 4096, 16384)
    decoding = ((3, 20),) if is_toy else ((64, 8192), (128, 1024), (256, 512))
    prefill = {
        f"prefill of {length:,} tokens": [
            [(0, first, min(chunk, length - first))] for first in range(0, length, chunk)
        ]
        for length in lengths
    }
    return prefill | {
        f"decoding of {slots} x {length:,}": [[(slot, length - 1, 1) for slot in range(slots)]]
        for slots, length in decoding
    }


def attention_of(
    spans: Sequence[_Span], heights: tuple[int, int], *, is_narrow: bool, settings: Settings
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Attention of all rows at the shape of LLaMA-3.1-8B, and its random queries.

    `is_narrow` puts all spans into decode tiles.
    """
    from sortedrl.engines.native.attention_kernels import (
        SPLIT_TOKENS,
        KernelRows,
        TileRows,
        paged_attention,
        tokens_per_tile,
    )

    dtype, device = _place(settings)
    key_heads, group, dim = (1, 4, 16) if settings.cpu else (8, 4, 128)
    decode, wide = heights
    small = tokens_per_tile(group, tile_rows=decode)
    large = small if is_narrow else tokens_per_tile(group, tile_rows=wide)
    slots: list[int] = []
    positions: list[int] = []
    tiles: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    for slot, first, count in spans:
        for start in range(0, count, large):
            rows = min(large, count - start)
            tiles[rows > small].append((len(slots) + start, rows))
        slots += [slot] * count
        positions += range(first, first + count)
    longest, num_slots = max(positions) + 1, max(slots) + 1
    blocks = -(-longest // _BLOCK_TOKENS)

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def listed(tiles: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        starts, counts = zip(*tiles, strict=True)
        return ints(starts), ints(counts)

    def random(*size: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(size[1])
        return torch.randn(*size, dtype=dtype, device=device, generator=generator)

    starts, counts = listed(tiles[False] or [(0, 0)])
    cache = key_heads, num_slots * blocks * _BLOCK_TOKENS, dim
    attend = partial(
        paged_attention, key_cache=random(*cache), value_cache=random(*cache).roll(1, 1),
        rows=KernelRows(
            slots_R=ints(slots), positions_R=ints(positions),
            tile_starts_R=starts, tile_counts_R=counts,
            block_tables=ints(range(num_slots * blocks)).view(num_slots, blocks),
            span_tiles=listed(tiles[True]) if tiles[True] else None,
        ),
        block_tokens=_BLOCK_TOKENS, scale=dim**-0.5, window=None,
        tile_rows=TileRows(decode=decode, spans=wide),
        num_splits=1 << (-(-longest // SPLIT_TOKENS) - 1).bit_length(),
    )  # fmt: skip
    return attend, random(1, len(slots), key_heads * group, dim).transpose(1, 2)


def measure_attention(
    name: str, passes: Sequence[Sequence[_Span]], settings: Settings, results: Results
) -> None:
    """Time some work with all heights of tiles, and compare its bits with decode tiles alone."""
    tokens = sum(count for spans in passes for _, _, count in spans)
    for heights in HEIGHTS:
        seconds, is_same = 0.0, True
        for spans in passes:
            attend, q = attention_of(spans, heights, is_narrow=False, settings=settings)
            narrow, _ = attention_of(spans, heights, is_narrow=True, settings=settings)
            is_same = is_same and torch.equal(attend(q), narrow(q))
            seconds += seconds_of([attend], q, is_toy=settings.cpu)
        timed = TimedAttention(
            work=name, decode=heights[0], spans=heights[1], microseconds=1e6 * seconds,
            tokens_per_second=tokens / seconds, has_same_bits=is_same,
        )  # fmt: skip
        results.attention.append(timed)


# The report.


def show(results: Results) -> None:
    """Print the tables."""
    timed = {(t.shape.model, t.shape.name, t.rows, t.product): t for t in results.products}
    show_table(
        "us (share of the copy bandwidth; ! = not batch-invariant)",
        ("weights", "rows", "cublas", "unsplit"),
        [
            (each.shape.title, rows, _cell(each), _cell(timed[model, name, rows, "unsplit"]))
            for (model, name, rows, product), each in timed.items()
            if product == "cublas"
        ],
    )
    us = {key[:3]: t.microseconds for key, t in timed.items() if key[3] == "unsplit"}
    packed = []
    for model, rows in [(model, rows) for model, name, rows in us if name == "gate-up"]:
        q, k, qkv, gate, gate_up = (
            us[model, name, rows] for name in ("q", "k", "qkv", "gate", "gate-up")
        )
        taken = (q + 2 * k, qkv, 2 * gate, gate_up)
        packed.append((model, rows, *(f"{each:.1f}" for each in taken)))
    show_table(
        "us of separate and packed weights, without split-K",
        ("model", "rows", "q + 2 k", "qkv", "2 gate", "gate-up"),
        packed,
    )
    if results.attention:
        show_table(
            "attention of one layer",
            ("work", "tile", "tile of spans", "us", "tokens/s", "bits"),
            [
                (t.work, t.decode, t.spans, f"{t.microseconds:,.0f}", f"{t.tokens_per_second:,.0f}",
                 "same" if t.has_same_bits else "DIFFER")
                for t in results.attention
            ],
        )  # fmt: skip
    for name in results.left_out:
        print(f"no time left for {name}")


def show_table(title: str, headings: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Print one table."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False, title=title)
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=140).print(table)


def _cell(timed: Timed) -> str:
    mark = "" if timed.has_same_bits else " !"
    return f"{timed.microseconds:.1f} ({timed.bandwidth_share:.0%}){mark}"


# The run.


def _place(settings: Settings) -> tuple[torch.dtype, str]:
    # The interpreter treats bfloat16 bits as integers.
    return (torch.float16, "cpu") if settings.cpu else (torch.bfloat16, "cuda")


def measure(settings: Settings, results: Results, *, keep: Callable[[], None]) -> None:
    """Measure within the time limit; `keep` is called after every part."""
    from engine_peers.models import copy_bandwidth

    until = time.monotonic() + settings.seconds
    results.copy_bandwidth = copy_bandwidth(_place(settings)[1])
    _say(f"copy bandwidth {results.copy_bandwidth / 1e9:,.0f} GB/s")
    parts = {
        shape.title: partial(measure_shape, shape, settings, results)
        for model in settings.models
        for shape in shapes_of(model)
    }
    if settings.attention:
        for name, passes in attention_work(is_toy=settings.cpu).items():
            parts[name] = partial(measure_attention, name, passes, settings, results)
    for name, part in parts.items():
        if time.monotonic() > until:
            results.left_out.append(name)
            continue
        _say(name)
        part()
        keep()  # in case the machine is lost


def main() -> None:
    """Measure and print."""
    settings = tyro.cli(Settings, description=__doc__)
    if settings.cpu:
        settings = replace(settings, models=("llama-5m",), rows=(3, 20))
        # A fixed order of sums in a tile makes bits comparable.
        sys.path.append(str(Path(__file__).parents[1] / "tests"))
        interpreted = import_module("interpreted")
        assert not interpreted.HAS_CUDA, "the interpreter is for machines without a GPU"
    results = Results()
    with torch.inference_mode():
        measure(settings, results, keep=lambda: write(results, settings))
    show(results)


def write(results: Results, settings: Settings) -> None:
    """Write the results so far."""
    from provenance import provenance

    if settings.out is None:
        return
    facts = provenance("cpu" if settings.cpu else "cuda")
    facts |= {"settings": asdict(settings), **asdict(results)}
    settings.out.write_text(json.dumps(facts, indent=1, default=str) + "\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
