"""The kernels against plain arithmetic, and the law that a row does not feel its batch.

Without a GPU they run in Triton's interpreter, on small sizes.
Axes as in the kernels' modules; L positions of one sequence.
"""

import math
from dataclasses import dataclass, replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton.language")

from interpreted import HAS_CUDA  # noqa: E402
from sortedrl.engines.native import attention_kernels as kernels  # noqa: E402
from sortedrl.engines.native import sampler  # noqa: E402
from sortedrl.engines.native.sampler import SamplerInputs, TokenFilters, floors  # noqa: E402
from sortedrl.engines.native.sampler_kernels import filter_floors, sample  # noqa: E402

DEVICE = "cuda" if HAS_CUDA else "cpu"
# The interpreter multiplies the bits of bfloat16 as if they were integers.
DTYPES = (torch.float32, torch.float16, *([torch.bfloat16] if HAS_CUDA else []))
# Tall tiles are for matrix instructions, which fp32 has none of: it would compile for minutes.
HALVES = DTYPES[1:] if HAS_CUDA else DTYPES
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
cuda_only = pytest.mark.skipif(not HAS_CUDA, reason="needs a GPU")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Sequence:
    """One sequence, of which the last `num_rows` positions are in the launch."""

    length: int
    num_rows: int


@dataclass(frozen=True)
class World:
    """Sequences in a paged cache, and a query for every row; what nobody may read is NaN."""

    keys: list
    values: list
    key_cache: object
    value_cache: object
    q: object
    rows: kernels.KernelRows
    block_tokens: int

    def attend(self, **changes):
        settings = {"scale": 0.3, "window": None, "num_splits": 3} | changes
        return kernels.paged_attention(
            self.q,
            self.key_cache,
            self.value_cache,
            rows=self.rows,
            block_tokens=self.block_tokens,
            **settings,
        )

    def pick(self, order):
        """The same world with these rows only, one per tile, and two rows of padding."""
        order = torch.tensor(order, device=DEVICE)
        padding = torch.zeros(2, dtype=torch.int32, device=DEVICE)
        trash = padding + len(self.keys)
        num_rows = len(order)
        rows = replace(
            self.rows,
            slots_R=torch.cat((self.rows.slots_R[order], trash)),
            positions_R=torch.cat((self.rows.positions_R[order], padding)),
            tile_starts_R=_ints([*range(num_rows), 0, 0]),
            tile_counts_R=_ints([1] * num_rows + [0, 0]),
        )
        q = torch.cat((self.q[:, :, order], self.q[:, :, :2]), dim=2)
        return replace(self, q=q, rows=rows)

    def tiled(self, tokens):
        """The same world with up to `tokens` rows of a sequence in a tile."""
        starts, counts = _tiles(self.rows.slots_R.tolist(), tokens)
        rows = replace(self.rows, tile_starts_R=starts, tile_counts_R=counts)
        return replace(self, rows=rows)

    def with_spans(self, heights):
        """The same world in tiles of two heights, as the engine launches them."""
        narrow = kernels.tokens_per_tile(self.group, tile_rows=heights.decode)
        wide = kernels.tokens_per_tile(self.group, tile_rows=heights.spans)
        slots = self.rows.slots_R.tolist()
        starts, counts = (tensor.tolist() for tensor in _tiles(slots, wide))
        tiles = [tile for tile in zip(starts, counts, strict=True) if tile[1]]
        small = [tile for tile in tiles if tile[1] <= narrow] or [(0, 0)]
        large = [tile for tile in tiles if tile[1] > narrow] or [(0, 0)]
        starts, counts = zip(*small, strict=True)
        rows = replace(
            self.rows,
            tile_starts_R=_ints(starts),
            tile_counts_R=_ints(counts),
            span_tiles=tuple(map(_ints, zip(*large, strict=True))),
        )
        return replace(self, rows=rows)

    @property
    def group(self):
        """Query heads per key/value head."""
        return self.q.shape[1] // len(self.key_cache)


def _ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def _tiles(slots, tokens):
    starts, counts = [], []
    for row, slot in enumerate(slots):
        if starts and slots[starts[-1]] == slot and counts[-1] < tokens:
            counts[-1] += 1
        else:
            starts.append(row)
            counts.append(1)
    padding = [0] * (len(slots) - len(starts))
    return _ints(starts + padding), _ints(counts + padding)


def _world(sequences, *, group, key_heads=2, dim=16, block_tokens=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(group * dim + len(sequences))

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    sizes = [-(-sequence.length // block_tokens) for sequence in sequences]
    blocks = (torch.randperm(sum(sizes) + 3, generator=generator) + 1).tolist()
    tables = torch.zeros(len(sequences) + 1, max(sizes) + 1, dtype=torch.int32)
    for slot, size in enumerate(sizes):
        tables[slot, :size] = torch.tensor([blocks.pop() for _ in range(size)])
    num_places = (sum(sizes) + 4) * block_tokens
    key_cache = torch.full((key_heads, num_places, dim), torch.nan, dtype=dtype, device=DEVICE)
    value_cache = key_cache.clone()
    keys, values, slots, positions = [], [], [], []
    for slot, sequence in enumerate(sequences):
        keys.append(normal(key_heads, sequence.length, dim))
        values.append(normal(key_heads, sequence.length, dim))
        places = _places(tables[slot], torch.arange(sequence.length), block_tokens)
        key_cache[:, places], value_cache[:, places] = keys[-1], values[-1]
        slots += [slot] * sequence.num_rows
        positions += range(sequence.length - sequence.num_rows, sequence.length)
    starts, counts = _tiles(slots, kernels.tokens_per_tile(group))
    rows = kernels.KernelRows(
        slots_R=_ints(slots),
        positions_R=_ints(positions),
        tile_starts_R=starts,
        tile_counts_R=counts,
        block_tables=tables.to(DEVICE),
    )
    q = normal(1, len(slots), key_heads * group, dim).transpose(1, 2)
    return World(keys, values, key_cache, value_cache, q, rows, block_tokens)


def _places(table, positions, block_tokens):
    blocks = table[positions // block_tokens].long()
    return (blocks * block_tokens + positions % block_tokens).to(DEVICE)


def _reference(world, *, scale=0.3, window=None):
    outputs = []
    slots, positions = world.rows.slots_R.tolist(), world.rows.positions_R.tolist()
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        first = 0 if window is None else max(0, position - window + 1)
        keys_KLD = world.keys[slot][:, first : position + 1].double()
        values_KLD = world.values[slot][:, first : position + 1].double()
        q_KGD = world.q[0, :, row].double().unflatten(0, (len(keys_KLD), -1))
        weights = (q_KGD @ keys_KLD.transpose(1, 2) * scale).softmax(-1)
        outputs.append((weights @ values_KLD).flatten(0, 1))
    return torch.stack(outputs)[None]


def _assert_close(out, expected):
    tolerance = TOLERANCES[out.dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def _assert_same_bits(left, right):
    assert left.dtype == right.dtype
    assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


RAGGED = [Sequence(1, 1), Sequence(70, 4), Sequence(515, 5), Sequence(16, 6), Sequence(1030, 1)]


@pytest.mark.parametrize("group", [1, 3, 6, 7, 20])
@pytest.mark.parametrize(("dim", "block_tokens"), [(16, 32), (64, 16), (80, 16)])
def test_attention_is_softmax_over_the_pages(group, dim, block_tokens):
    sequences = [Sequence(1, 1), Sequence(70, 7), Sequence(515, 5)]
    world = _world(sequences, group=group, dim=dim, block_tokens=block_tokens)
    _assert_close(world.attend(num_splits=2), _reference(world))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 40, 64, 600])
def test_a_window_shows_the_last_keys_only(dtype, window):
    world = _world(RAGGED, group=3, dtype=dtype)
    _assert_close(world.attend(window=window), _reference(world, window=window))


@cuda_only
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [96, 128, 192, 256])
def test_wide_heads_fit_the_machine(dtype, dim):
    world = _world(RAGGED, group=4, dim=dim, dtype=dtype)
    _assert_close(world.attend(scale=dim**-0.5), _reference(world, scale=dim**-0.5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "window"), [(1, None), (3, None), (3, 600), (7, 50)])
@pytest.mark.filterwarnings("ignore:(overflow|invalid):RuntimeWarning")  # of undefined rows
def test_a_row_does_not_feel_its_batch(dtype, group, window):
    world = _world(RAGGED, group=group, key_heads=1, dtype=dtype)
    out = world.attend(window=window)
    assert out.isfinite().all()
    for tokens in (1, 2):
        _assert_same_bits(world.tiled(tokens).attend(window=window), out)
    _assert_same_bits(world.attend(window=window, num_splits=5), out)
    order = [16, 7, 0, 4, 3, 15]
    _assert_same_bits(world.pick(order).attend(window=window)[:, :6], out[:, order])
    _assert_same_bits(world.pick([3]).attend(window=window)[:, :1], out[:, [3]])


HEIGHTS = (
    kernels.TileRows(spans=64),
    kernels.TileRows(decode=32, spans=64),
    *([kernels.TileRows(spans=128)] if HAS_CUDA else []),
)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("group", "dim"), [(1, 16), (4, 64), *([(4, 128), (5, 128)] if HAS_CUDA else [])]
)
@pytest.mark.filterwarnings("ignore:(overflow|invalid):RuntimeWarning")  # of undefined rows
def test_a_row_does_not_feel_the_height_of_its_tile(dtype, group, dim):
    sequences = [Sequence(1, 1), Sequence(1030, 7), Sequence(70, 20 if group > 1 else 40)]
    if HAS_CUDA:
        sequences += [Sequence(2100, 1500), Sequence(130, 100)]
    world = _world(sequences, group=group, key_heads=1, dim=dim, dtype=dtype)
    for window in (None, 90) if HAS_CUDA else (None,):
        exact = _reference(world, window=window)
        alone = world.tiled(1).attend(window=window, tile_rows=HEIGHTS[0])
        _assert_close(alone, exact)
        for heights in HEIGHTS:
            out = world.with_spans(heights).attend(window=window, tile_rows=heights)
            _assert_same_bits(out, alone)


@pytest.mark.parametrize("dtype", HALVES)
def test_one_tall_tile_for_all_rows_is_as_good(dtype):
    world = _world([Sequence(70, 25), Sequence(515, 2)], group=3, key_heads=1, dtype=dtype)
    tall = kernels.TileRows(decode=64, spans=64)
    _assert_close(world.attend(tile_rows=tall), _reference(world))
    alone = world.tiled(1).attend(tile_rows=tall)
    for tokens in (21,):
        _assert_same_bits(world.tiled(tokens).attend(tile_rows=tall), alone)


def test_heights_of_tiles_are_those_of_matrix_instructions():
    for wrong in ({"decode": 8}, {"spans": 48}, {"decode": 64, "spans": 32}):
        with pytest.raises(ValueError, match="16, 32, 64 or 128 rows"):
            kernels.TileRows(**wrong)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_split_written_directly_is_one_split_merged(dtype):
    world = _world([Sequence(512, 6), Sequence(3, 3)], group=6, dim=64, dtype=dtype)
    _assert_same_bits(world.attend(num_splits=1), world.attend(num_splits=2))
    _assert_same_bits(world.attend(num_splits=1, window=9), world.attend(num_splits=4, window=9))


def test_a_tile_never_holds_more_rows_than_its_shape():
    assert [kernels.tokens_per_tile(group) for group in (1, 3, 7, 8, 9, 16, 20)] == [
        16, 5, 2, 2, 1, 1, 1,
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("key_heads", "dim"), [(1, 80), (3, 16), (12, 64)])
def test_new_keys_and_values_go_to_their_places_and_nowhere_else(dtype, key_heads, dim):
    world = _world([Sequence(40, 3), Sequence(17, 17)], group=1, key_heads=key_heads, dim=dim)
    cache = torch.zeros_like(world.key_cache, dtype=dtype)
    key_cache, value_cache = cache.clone(), cache.clone()
    k_RKD, v_RKD = torch.randn(2, 20, key_heads, dim).to(DEVICE, dtype)
    kernels.write_cache(
        k_RKD.transpose(0, 1)[None],
        v_RKD.transpose(0, 1)[None],
        key_cache,
        value_cache,
        rows=world.rows,
        block_tokens=world.block_tokens,
    )
    for new_RKD, written in ((k_RKD, key_cache), (v_RKD, value_cache)):
        expected = cache.clone()
        for row in range(20):
            table = world.rows.block_tables[world.rows.slots_R[row]].cpu()
            place = _places(table, world.rows.positions_R[row].cpu(), world.block_tokens)
            expected[:, place] = new_RKD[row]
        _assert_same_bits(written, expected)


@cuda_only
@pytest.mark.slow
def test_a_cache_of_more_than_two_to_the_31_elements_is_reached_to_its_end():
    num_blocks, dim = 2**20 + 8, 128
    key_cache = torch.zeros(2, num_blocks * 16, dim, dtype=torch.bfloat16, device=DEVICE)
    value_cache = torch.zeros_like(key_cache)
    rows = kernels.KernelRows(
        slots_R=_ints([0] * 16),
        positions_R=_ints(range(16)),
        tile_starts_R=_ints(range(16)),
        tile_counts_R=_ints([1] * 16),
        block_tables=_ints([[num_blocks - 1], [0]]),
    )
    q, k, v = torch.randn(3, 1, 2, 16, dim, dtype=torch.bfloat16, device=DEVICE)
    kernels.write_cache(k, v, key_cache, value_cache, rows=rows, block_tokens=16)
    world = World([k[0]], [v[0]], key_cache, value_cache, q, rows, 16)
    _assert_close(world.attend(num_splits=1), _reference(world))


@cuda_only
def test_a_captured_launch_gives_the_same_bits():
    world = _world(RAGGED, group=3, dim=64, dtype=torch.bfloat16)
    eager = world.attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = world.attend()
    graph.replay()
    _assert_same_bits(captured, eager)


def _choices(logits_QV, **changes):
    num_rows = len(logits_QV)
    generator = torch.Generator().manual_seed(num_rows)
    inputs = {
        "streams_Q": torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator),
        "positions_Q": _ints(range(num_rows)),
        "inverse_temperatures_Q": torch.linspace(0.5, 2.0, num_rows),
        "floors_Q": torch.full((num_rows,), -torch.inf),
        "expected_Q": _ints([-1] * num_rows),
        "commit_slots_Q": _ints([-1] * num_rows),
        "last_tokens_S": _ints([7] * 4),
    } | changes
    inputs = {name: tensor.to(DEVICE) for name, tensor in inputs.items()}
    of_rows = {name: inputs[name] for name in SamplerInputs._fields}
    others = {name: tensor for name, tensor in inputs.items() if name not in of_rows}
    return sample(logits_QV, SamplerInputs(**of_rows), **others), inputs


def _perturbed(logits_QV, inputs):
    tokens_V = torch.arange(logits_QV.shape[1], device=DEVICE)
    keys_Q = sampler.row_keys(inputs["streams_Q"], inputs["positions_Q"])
    scaled_QV = logits_QV.float() * inputs["inverse_temperatures_Q"][:, None]
    return scaled_QV + sampler.gumbel(keys_Q, tokens_V)


def _logits(num_rows, vocabulary, dtype=torch.float32):
    generator = torch.Generator().manual_seed(vocabulary)
    return (torch.randn(num_rows, vocabulary, generator=generator) * 3).to(DEVICE, dtype)


def _at(values_QV, tokens_Q):
    return values_QV.gather(1, tokens_Q.long()[:, None])[:, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [50, 4096, 9001])
def test_the_choice_is_the_largest_of_logits_and_noise(dtype, vocabulary):
    logits_QV = _logits(6, vocabulary, dtype)
    expected_Q = _ints([3, -1, 0, vocabulary - 1, 17, 5])
    choices, inputs = _choices(logits_QV, expected_Q=expected_Q)
    perturbed_QV = _perturbed(logits_QV, inputs)
    tokens_Q = perturbed_QV.argmax(-1)
    assert choices.tokens_Q.tolist() == tokens_Q.tolist()
    expected_Q = torch.where(expected_Q >= 0, expected_Q, tokens_Q)
    scaled_QV = logits_QV.double() * inputs["inverse_temperatures_Q"][:, None]
    logprobs_QV = scaled_QV.log_softmax(-1).float()
    gaps_Q = _at(perturbed_QV, tokens_Q) - _at(perturbed_QV, expected_Q)
    close = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(choices.logprobs_Q, _at(logprobs_QV, tokens_Q), **close)
    torch.testing.assert_close(choices.expected_logprobs_Q, _at(logprobs_QV, expected_Q), **close)
    torch.testing.assert_close(choices.gaps_Q, gaps_Q, atol=1e-4, rtol=1e-5)


def test_an_expected_token_that_is_chosen_has_no_gap():
    logits_QV = _logits(6, 300)
    chosen, _ = _choices(logits_QV)
    again, _ = _choices(logits_QV, expected_Q=chosen.tokens_Q)
    assert again.tokens_Q.tolist() == chosen.tokens_Q.tolist()
    assert again.gaps_Q.tolist() == [0.0] * 6
    _assert_same_bits(again.expected_logprobs_Q, again.logprobs_Q)


def test_greedy_takes_the_first_of_the_largest_logits_and_scores_it_at_temperature_one():
    logits_QV = _logits(3, 5000)
    logits_QV[0, [40, 4999]] = logits_QV[1, [4096, 4097]] = logits_QV[2, [0, 1]] = 30.0
    logits_QV[:, 77] = -torch.inf
    expected_Q = _ints([10, 4096, 77])
    choices, _ = _choices(logits_QV, inverse_temperatures_Q=torch.zeros(3), expected_Q=expected_Q)
    assert choices.tokens_Q.tolist() == [40, 4096, 0]
    logprobs_Q = _at(logits_QV.log_softmax(-1), choices.tokens_Q)
    torch.testing.assert_close(choices.logprobs_Q, logprobs_Q, atol=1e-5, rtol=1e-5)
    gaps_Q = [30.0 - logits_QV[0, 10].item(), 0.0, torch.inf]
    assert choices.gaps_Q.tolist() == pytest.approx(gaps_Q)


def test_a_floor_keeps_tokens_from_being_chosen_and_nothing_else():
    logits_QV = _logits(6, 4500)
    floors_Q = logits_QV.topk(3).values[:, 2].clone()
    free, _ = _choices(logits_QV, expected_Q=_ints([11] * 6))
    choices, inputs = _choices(logits_QV, floors_Q=floors_Q, expected_Q=_ints([11] * 6))
    is_out_QV = logits_QV < floors_Q[:, None]
    best_Q = _perturbed(logits_QV, inputs).masked_fill(is_out_QV, -torch.inf).argmax(-1)
    assert choices.tokens_Q.tolist() == best_Q.tolist()
    assert choices.gaps_Q.tolist() == [torch.inf] * 6
    _assert_same_bits(choices.expected_logprobs_Q, free.expected_logprobs_Q)


FILTERS = (
    # top-k, top-p, min-p, inverse temperature
    (9000, 1.0, 0.0, 1.0),
    (50, 1.0, 0.0, 1.0),
    (9000, 0.9, 0.0, 1.3),
    (9000, 0.05, 0.0, 0.5),
    (200, 0.7, 0.0, 2.0),
    (9000, 1.0, 0.02, 1.0),
    (3000, 0.999, 0.001, 0.8),
    (1, 0.5, 0.5, 0.0),
)


def _filtered(logits_QV, filters):
    top_k, top_p, min_p, inverse = zip(*filters, strict=True)
    rows = len(filters)
    draw = SamplerInputs(
        streams_Q=torch.zeros(rows, dtype=torch.long, device=DEVICE),
        positions_Q=_ints(range(rows)),
        inverse_temperatures_Q=torch.tensor(inverse, device=DEVICE),
        expected_Q=_ints([-1] * rows),
    )
    keep = TokenFilters(
        torch.tensor(top_k, device=DEVICE),
        torch.tensor(top_p, device=DEVICE),
        torch.tensor(min_p, device=DEVICE),
    )
    return logits_QV, draw, keep


@pytest.mark.parametrize("vocabulary", [50, 9000])
def test_floors_without_a_sort_are_those_of_a_sort(vocabulary):
    logits_QV = _logits(len(FILTERS), vocabulary)
    logits_QV[1, :30] = 2.5
    logits_QV[2, ::2] = -0.0
    logits_QV[2, 1::2] = 0.0
    inputs = _filtered(logits_QV, FILTERS)
    kept_QV = logits_QV >= filter_floors(*inputs)[:, None]
    sorted_QV = logits_QV >= floors(*inputs)[:, None]
    # Exponentials may differ in the last bit, so one token at the border may fall to either side.
    assert ((kept_QV != sorted_QV).sum(-1) <= 1).all()
    assert kept_QV.any(-1).all()
    assert kept_QV[0].all()
    assert kept_QV[-1].all()
    assert kept_QV[1].sum() == 50
    assert kept_QV[2].all()


def test_a_floor_does_not_feel_its_batch():
    order = [6, 4, 2]
    logits_QV = _logits(len(FILTERS), 9000)
    together_Q = filter_floors(*_filtered(logits_QV, FILTERS))
    alone_Q = filter_floors(*_filtered(logits_QV[order], [FILTERS[row] for row in order]))
    _assert_same_bits(alone_Q, together_Q[order])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_floor_of_logits_that_are_not_finite_leaves_the_others_alone(poison):
    logits_QV, filters = _logits(3, 500), FILTERS[2:5]
    healthy_Q = filter_floors(*_filtered(logits_QV, filters))
    logits_QV[1] = poison
    broken_Q = filter_floors(*_filtered(logits_QV, filters))
    _assert_same_bits(broken_Q[[0, 2]], healthy_Q[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_chosen_tokens_are_committed_to_their_slots(dtype):
    last_tokens_S = torch.full((5,), 7, dtype=dtype, device=DEVICE)
    choices, _ = _choices(
        _logits(4, 500), last_tokens_S=last_tokens_S, commit_slots_Q=_ints([3, -1, 0, -1])
    )
    tokens = choices.tokens_Q.tolist()
    assert last_tokens_S.tolist() == [tokens[2], 7, 7, tokens[0], 7]


def test_a_choice_does_not_feel_its_batch():
    logits_QV = _logits(6, 9000)
    choices, inputs = _choices(logits_QV)
    order = torch.tensor([4, 1], device=DEVICE)
    inputs = {name: value[order] for name, value in inputs.items() if name.endswith("_Q")}
    picked, _ = _choices(logits_QV[order], **inputs)
    for alone, together in zip(picked, choices, strict=True):
        _assert_same_bits(alone, together[order])


@pytest.mark.filterwarnings("ignore:(invalid|All-NaN):RuntimeWarning")
def test_a_row_of_nan_chooses_a_token_of_the_vocabulary_and_leaves_the_others_alone():
    logits_QV = _logits(3, 5000)
    choices, _ = _choices(logits_QV)
    logits_QV[1] = torch.nan
    broken, _ = _choices(logits_QV)
    assert 0 <= broken.tokens_Q[1] < 5000
    assert broken.logprobs_Q[1].isnan()
    for left, right in zip(choices, broken, strict=True):
        _assert_same_bits(left[[0, 2]], right[[0, 2]])


@pytest.mark.filterwarnings("ignore:(invalid|All-NaN):RuntimeWarning")
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 4999, 8999])
def test_one_logit_that_is_not_finite_shows_in_the_log_probability(poison, place):
    """The engine looks at nothing else to find a model that is broken."""
    logits_QV = _logits(3, 9000)
    logits_QV[1, place] = poison
    choices, _ = _choices(logits_QV)
    assert choices.logprobs_Q.isfinite().tolist() == [True, False, True]


@pytest.mark.filterwarnings("ignore:(invalid|All-NaN):RuntimeWarning")
def test_a_row_without_any_possible_token_shows_in_the_log_probability():
    logits_QV = _logits(3, 9000)
    logits_QV[1] = -math.inf
    choices, _ = _choices(logits_QV)
    assert choices.logprobs_Q.isfinite().tolist() == [True, False, True]
