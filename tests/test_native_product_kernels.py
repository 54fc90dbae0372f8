"""Products with a fixed split of K: against float64, and a row that does not feel its batch.

Without a GPU the kernels run in Triton's interpreter, on small sizes.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton.language")

from interpreted import HAS_CUDA  # noqa: E402
from sortedrl.engines.native.product_kernels import (  # noqa: E402
    Tile,
    fixed_split,
    multiply,
    num_slices,
    tile_for,
)

DEVICE = "cuda" if HAS_CUDA else "cpu"
# The interpreter multiplies the bits of bfloat16 as if they were integers.
DTYPES = (torch.bfloat16, torch.float16) if HAS_CUDA else (torch.float32, torch.float16)
SLACK = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SHAPES = ((128, 256), (100, 200), (1, 64), (257, 130), (48, 1000))
if HAS_CUDA:
    SHAPES += ((4096, 4096), (1024, 4096), (4096, 14336), (14336, 4096), (576, 1536), (1000, 5000))
PARALLEL = Tile(columns=64, rows=16, warps=4, stages=2, is_parallel=True)
SERIAL = replace(PARALLEL, is_parallel=False)
TILES = (
    PARALLEL,
    SERIAL,
    replace(PARALLEL, is_tma=True),
    Tile(columns=64, rows=64, warps=4, stages=3, is_parallel=True),
    Tile(columns=128, rows=32, warps=8, stages=2, is_parallel=False),
    Tile(columns=128, rows=128, warps=8, stages=3, is_parallel=False, is_tma=True),
)
if HAS_CUDA:
    TILES += (
        Tile(columns=256, rows=16, warps=8, stages=4, is_parallel=True),
        Tile(columns=256, rows=128, warps=8, stages=3, is_parallel=True),
        Tile(columns=128, rows=64, warps=4, stages=6, is_parallel=False, is_tma=True),
    )


def _operands(columns, inputs, *, rows, dtype):
    generator = torch.Generator().manual_seed(columns + inputs)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    return normal(rows, inputs), normal(columns, inputs) / inputs**0.5, normal(columns)


def _assert_same_bits(left, right):
    assert left.dtype == right.dtype
    assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slices", [1, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_that_of_float64(shape, slices, dtype):
    x, weight, bias = _operands(*shape, rows=5, dtype=dtype)
    exact = x.double() @ weight.double().t()
    for out_dtype in (None, torch.float32):
        for added in (None, bias):
            out = multiply(x, weight, added, slices=slices, out_dtype=out_dtype)
            assert out.dtype == (out_dtype or dtype)
            # In fp32 only the sums round, not the result.
            slack = SLACK[out.dtype]
            expected = exact if added is None else exact + added.double()
            torch.testing.assert_close(out.double(), expected, atol=slack, rtol=slack)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_schedule_and_no_tile_changes_a_bit(shape, dtype):
    x, weight, bias = _operands(*shape, rows=37, dtype=dtype)
    for slices in (1, 4):
        expected = multiply(x, weight, bias, slices=slices, tile=PARALLEL, out_dtype=torch.float32)
        for tile in TILES:
            out = multiply(x, weight, bias, slices=slices, tile=tile, out_dtype=torch.float32)
            _assert_same_bits(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(128, 256), (100, 200), *SHAPES[5:]])
def test_a_row_does_not_feel_its_batch(shape, dtype):
    x, weight, bias = _operands(*shape, rows=100, dtype=dtype)
    for slices in (1, 4):
        whole = multiply(x, weight, bias, slices=slices)
        for rows in (1, 3, 8, 64):
            _assert_same_bits(multiply(x[:rows], weight, bias, slices=slices), whole[:rows])
            _assert_same_bits(multiply(x[-rows:], weight, bias, slices=slices), whole[-rows:])
        order = torch.tensor([99, 3, 50, 51, 0], device=DEVICE)
        _assert_same_bits(multiply(x[order], weight, bias, slices=slices), whole[order])


def test_rows_and_weights_may_be_parts_of_larger_tensors():
    x, weight, _ = _operands(96, 192, rows=9, dtype=DTYPES[0])
    part = multiply(x[:, 64:], weight[32:64, 64:], slices=2)
    whole = multiply(x[:, 64:].contiguous(), weight[32:64, 64:].contiguous(), slices=2)
    _assert_same_bits(part, whole)


def test_the_slices_differ_so_the_test_of_schedules_shows_something():
    x, weight, _ = _operands(64, 512, rows=4, dtype=DTYPES[0])
    one, four = (multiply(x, weight, slices=n, out_dtype=torch.float32) for n in (1, 4))
    assert not torch.equal(one, four)


@pytest.mark.parametrize("shape", [(4096, 4096), (1024, 4096), (4096, 14336), (128256, 4096)])
def test_the_tile_follows_the_rows_and_fits_the_shared_memory_of_a_hopper_gpu(shape):
    slices = num_slices(*shape)
    heights = []
    for rows in (1, 16, 17, 64, 96, 128, 512, 4096):
        tile = tile_for(rows, columns=shape[0], slices=slices)
        heights.append(tile.rows)
        assert tile.stage_bytes() <= 227 << 10
        assert slices > 1 or not tile.is_parallel
    assert heights == [16, 16, 32, 64, 128, 128, 128, 128]
    assert not tile.is_parallel, "4,096 rows fill the GPU without"


@pytest.mark.parametrize("is_wide", [False, True])
def test_a_linear_layer_keeps_the_shape_of_its_input(is_wide):
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 48, device=DEVICE, dtype=DTYPES[0])
    product = fixed_split(layer, is_wide=is_wide)
    x = torch.randn(1, 7, 64, device=DEVICE, dtype=DTYPES[0])
    out = product(x)
    assert out.dtype == (torch.float32 if is_wide else DTYPES[0])
    slack = SLACK[DTYPES[0]]
    torch.testing.assert_close(out.to(DTYPES[0]), layer(x), atol=slack, rtol=slack)


def test_torch_compile_sees_one_operation_for_any_number_of_rows():
    layer = torch.nn.Linear(64, 48, device=DEVICE, dtype=DTYPES[0])
    product = fixed_split(layer, is_wide=False)
    graphs = []

    def counted(graph, inputs):
        del inputs
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda x: product(x * 2) + 1, backend=counted, dynamic=True, fullgraph=True
    )
    with torch.inference_mode():
        for rows in (3, 40, 130, 700):
            x = torch.randn(1, rows, 64, device=DEVICE, dtype=DTYPES[0])
            _assert_same_bits(compiled(x), product(x * 2) + 1)
    assert len(graphs) == 1


BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def _run(*command, **changes):
    environment = {**os.environ, **changes}
    ran = subprocess.run(
        [sys.executable, *command], cwd=BENCHMARKS, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
@pytest.mark.skipif(HAS_CUDA, reason="the interpreter is for machines without a GPU")
def test_the_benchmark_runs_on_toy_sizes(tmp_path):
    out = tmp_path / "products.json"
    printed = _run("products.py", "--cpu", "--out", str(out))
    assert "ours: 0 products that are not batch-invariant" in printed
    assert "DIFFER" not in printed
    assert "q + 2 k" in printed
    facts = json.loads(out.read_text())
    assert {timed["product"] for timed in facts["products"]} == {"cublas", "unsplit", "ours"}
    assert {timed["slices"] for timed in facts["products"]} == {None, 1, 2}
    assert len(facts["attention"]) == 8
    assert 0 < facts["largest_error"] < 1e-2


def test_the_benchmark_keeps_what_it_has_after_every_shape(tmp_path, monkeypatch):
    """A machine that is lent may take it away at any time."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import products

    def measured(shape, settings, results, **_):
        results.left_out.append(shape.name)

    monkeypatch.setattr(products, "measure_shape", measured)
    out = tmp_path / "products.json"
    settings = products.Settings(cpu=True, attention=False, models=("llama-8b",), out=out)
    results, kept = products.Results(), []

    def keep():
        products.write(results, settings)
        kept.append(json.loads(out.read_text())["left_out"])

    products.measure(settings, results, keep=keep)
    assert kept == [results.left_out[: count + 1] for count in range(len(products.TOY))]


@pytest.mark.parametrize("wrong", [1.5, float("nan")])
def test_the_benchmark_shows_products_that_are_wrong(wrong, monkeypatch, capsys):
    """Wrong sums may be the same in any batch."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import products
    from sortedrl.engines.native import product_kernels

    def scaled(x, weight, bias, **_):
        return torch.nn.functional.linear(x, weight, bias) * wrong

    monkeypatch.setattr(product_kernels, "multiply", scaled)
    settings = products.Settings(cpu=True, rows=(3, 20), attention=False)
    results = products.Results(copy_bandwidth=1e9)
    shape = products.TOY[0]
    products.measure_shape(shape, settings, results, is_whole=False, until=float("inf"))
    products.show(results, settings)
    assert not results.largest_error < 0.4
    assert f"by at most {results.largest_error:.1e}" in capsys.readouterr().out


_COMPILE = """
import json
from products import Shape, compiled_attention, compiled_product
from sortedrl.engines.native.attention_kernels import TileRows
from sortedrl.engines.native.product_kernels import tile_for
from dataclasses import replace

shape = Shape(model="llama-8b", name="q", columns=4096, inputs=4096, has_bias=True)
found = []
for rows in (64, 4096):
    tile = tile_for(rows, columns=4096, slices=4)
    for is_tma in (False, True):
        found += compiled_product((shape, rows, 4, replace(tile, is_tma=is_tma)))
found += compiled_attention((4, 128, 2, TileRows(spans=64)))
print(json.dumps(found))
"""


@pytest.mark.slow
def test_the_kernels_compile_for_hopper_on_any_machine(tmp_path):
    """Triton brings its own compiler and assembler."""
    pytest.importorskip("triton.backends.nvidia")
    printed = _run("-c", _COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    products, attention = [], []
    for kernel in json.loads(printed.splitlines()[-1]):
        assert kernel["spilled_bytes"] == 0
        assert kernel["shared_bytes"] <= 227 << 10
        (products if kernel["kernel"] == "_multiply" else attention).append(kernel)
    assert all(kernel["wgmma"] and not kernel["mma"] for kernel in products)
    assert [bool(kernel["tma"]) for kernel in products] == [False, True, False, True]
    assert [bool(kernel["wgmma"]) for kernel in attention] == [False, True]


@pytest.mark.skipif(not HAS_CUDA, reason="needs a GPU")
def test_a_captured_product_gives_the_same_bits():
    x, weight, bias = _operands(4096, 4096, rows=64, dtype=torch.bfloat16)
    eager = multiply(x, weight, bias, slices=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = multiply(x, weight, bias, slices=4)
    for _ in range(3):
        graph.replay()
        _assert_same_bits(captured, eager)
