"""The choice of a token: softmax frequencies, the filters of transformers, rows that stand alone.

Axes: Q rows, V vocabulary.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from native_worlds import chi_square_p, fresh, plain_logits, roll_out, shared_model
from sortedrl.engines.native import NativeEngine, Sampling
from sortedrl.engines.native.sampler import (
    SamplerInputs,
    TokenFilters,
    _floors_few,
    choose,
    floors,
    random_bits,
    row_keys,
)
from sortedrl.errors import ConfigError

NEVER = 1e-4
WAYS = [
    Sampling(),
    Sampling(temperature=1.7),
    Sampling(top_k=7),
    Sampling(top_p=0.8),
    Sampling(min_p=0.1),
    Sampling(temperature=1.4, top_k=30, top_p=0.9, min_p=0.02),
]


def warped(logits_QV, sampling):
    """The logits as transformers leaves them, -inf where a token may not be chosen."""
    warpers = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k is not None:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return LogitsProcessorList(warpers)(None, logits_QV)


def draw_for(rows, *, temperature=1.0, expected=-1, streams=None):
    """A draw for `rows` rows, each with noise of its own."""
    return SamplerInputs(
        streams_Q=torch.full((rows,), 77) if streams is None else streams,
        positions_Q=torch.arange(rows),
        inverse_temperatures_Q=torch.full((rows,), 1 / temperature if temperature else 0.0),
        expected_Q=torch.full((rows,), expected),
    )


def filter_for(rows, sampling, *, vocabulary):
    return TokenFilters(
        top_k_Q=torch.full((rows,), sampling.top_k or vocabulary),
        top_p_Q=torch.full((rows,), sampling.top_p),
        min_p_Q=torch.full((rows,), sampling.min_p),
    )


def random_logits(rows, vocabulary, *, scale=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, vocabulary, generator=generator)


@pytest.mark.parametrize("sampling", WAYS, ids=str)
def test_the_tokens_a_model_writes_follow_its_softmax(sampling):
    """6,000 first tokens through the whole engine, against transformers' own filters."""
    model = shared_model("llama", std=0.1, num_hidden_layers=1)
    engine = NativeEngine(model, slots=300, max_tokens=1, sampling=sampling, stop_tokens=())
    prompt = [5, 99, 31]
    drawn = roll_out(engine, [fresh(prompt, sample=n) for n in range(6000)])
    counts = torch.bincount(torch.tensor([t.tokens[0] for t in drawn]), minlength=128)
    chances = warped(plain_logits(model, drawn[0])[:1], sampling)[0].softmax(-1)
    assert not counts[chances == 0].any()
    assert (chances > 0).sum() >= 7
    assert chi_square_p(counts, chances) > NEVER


@settings(max_examples=100)
@given(
    st.integers(0, 2**32),
    st.sampled_from((0.3, 1.0, 2.0)),
    st.none() | st.integers(1, 60),
    st.sampled_from((1.0, 0.999, 0.9, 0.5, 0.1, 1e-6)),
    st.sampled_from((0.0, 0.01, 0.2, 0.9)),
)
def test_the_allowed_tokens_are_those_of_transformers(seed, temperature, top_k, top_p, min_p):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = random_logits(20, 50, seed=seed)
    lowest = floors(
        logits,
        draw_for(20, temperature=temperature),
        filter_for(20, sampling, vocabulary=50),
    )
    ours = logits >= lowest[:, None]
    theirs = warped(logits, sampling) > -math.inf
    # Sums of probabilities are rounded, so a token right at the border may fall to either side.
    assert (ours != theirs).sum() <= 1
    assert ours.any(-1).all()


def reference_kept(logits, sampling):
    """The filters by a sort and sums in float64, and the distance of each token from the border.

    The distance is in probability: from `top_p` to the mass above the token.
    """
    scaled = (logits / torch.tensor(sampling.temperature)).double()
    order = scaled.argsort(-1, descending=True)
    ordered = scaled.gather(-1, order)
    if sampling.top_k is not None and sampling.top_k < logits.shape[1]:
        lowest = ordered[:, sampling.top_k - 1 : sampling.top_k]
        ordered = ordered.masked_fill(ordered < lowest, -math.inf)
    mass = ordered.softmax(-1)
    above = mass.cumsum(-1) - mass
    kept = (above < sampling.top_p) | (sampling.top_p >= 1)
    kept &= (ordered > -math.inf) & (mass >= sampling.min_p * mass[:, :1])
    away = (above - sampling.top_p).abs()
    back = order.argsort(-1)
    return kept.gather(-1, back), away.gather(-1, back)


@pytest.mark.parametrize(
    ("scale", "sampling"),
    [
        (3.0, Sampling(top_p=0.9)),
        (0.01, Sampling(top_p=0.9)),
        (0.01, Sampling(top_k=5000, top_p=0.5)),
        (3.0, Sampling(temperature=0.7, top_k=5000)),
        (0.3, Sampling(temperature=1.3, top_k=2000, top_p=0.97, min_p=0.05)),
    ],
    ids=str,
)
def test_the_kept_tokens_of_a_large_vocabulary_are_those_of_a_sort_in_float64(scale, sampling):
    """Flat rows keep more tokens than are sorted at first, steep ones fewer."""
    logits = random_logits(6, 20_000, scale=scale)
    logits[:3] *= 3
    lowest = floors(
        logits,
        draw_for(6, temperature=sampling.temperature),
        filter_for(6, sampling, vocabulary=20_000),
    )
    kept, away = reference_kept(logits, sampling)
    differs = (logits >= lowest[:, None]) != kept
    assert not (differs & (away > 1e-6)).any()
    assert differs.sum() <= 6


def test_a_floor_has_the_same_bits_whether_a_row_is_sorted_in_part_or_as_a_whole():
    logits = random_logits(4, 20_000, scale=0.5)
    keep = filter_for(4, Sampling(top_p=0.3, top_k=15_000), vocabulary=20_000)
    whole = _floors_few(logits, torch.ones(4), keep, num_sorted=20_000)
    for num_sorted in (1, 100, 4096):
        assert torch.equal(_floors_few(logits, torch.ones(4), keep, num_sorted=num_sorted), whole)


@pytest.mark.parametrize("sampling", [Sampling(top_k=3), Sampling(top_p=0.5), Sampling(min_p=0.5)])
def test_equal_logits_are_kept_or_left_out_together(sampling):
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 2.0, -3.0]])
    lowest = floors(logits, draw_for(1), filter_for(1, sampling, vocabulary=6))
    assert (logits >= lowest[:, None]).tolist() == [[False, True, True, True, True, False]]


def test_a_row_without_a_filter_may_choose_any_token_whatever_its_neighbours_do():
    """Its probabilities sum to 1 long before its last token, and that must not matter."""
    logits = torch.cat((torch.tensor([[20.0, 0.0, -3.0, -90.0]]), random_logits(1, 4)))
    lowest = floors(
        logits,
        draw_for(2),
        TokenFilters(torch.tensor([4, 2]), torch.tensor([1.0, 0.9]), torch.tensor([0.0, 0.1])),
    )
    assert (logits[0] >= lowest[0]).all()


def test_top_k_alone_leaves_exactly_k_tokens():
    logits = torch.tensor([[20.0, 0.0, -1.0, -2.0, -3.0]])
    lowest = floors(logits, draw_for(1), filter_for(1, Sampling(top_k=3), vocabulary=5))
    assert (logits >= lowest[:, None]).sum() == 3


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_the_winner_has_the_largest_logit_plus_noise_and_gaps_are_in_nats(temperature):
    rows, vocabulary = 50, 200
    logits = random_logits(rows, vocabulary)
    draw = draw_for(rows, temperature=temperature, expected=17)
    choice = choose(logits, draw)
    numbers = random_bits(row_keys(draw.streams_Q, draw.positions_Q), torch.arange(vocabulary))
    uniform = (numbers.double() + 0.5) * 2.0**-31
    perturbed = logits.double() / temperature - torch.log(-torch.log1p(-uniform))
    best, winners = perturbed.max(-1)
    assert choice.tokens_Q.tolist() == winners.tolist()
    assert torch.allclose(choice.gaps_Q.double(), best - perturbed[:, 17], atol=1e-4)
    logprobs = (logits / temperature).log_softmax(-1)
    own = logprobs.gather(-1, winners[:, None])[:, 0]
    assert torch.allclose(choice.logprobs_Q, own, atol=1e-5)
    assert torch.allclose(choice.expected_logprobs_Q, logprobs[:, 17], atol=1e-5)


def test_an_expected_winner_has_no_gap_and_a_forbidden_one_an_infinite_gap():
    logits = random_logits(20, 30)
    winners = choose(logits, draw_for(20)).tokens_Q
    again = choose(logits, draw_for(20)._replace(expected_Q=winners))
    assert (again.gaps_Q == 0).all()
    assert torch.equal(again.expected_logprobs_Q, again.logprobs_Q)
    worst = logits.argmin(-1)
    lowest = floors(logits, draw_for(20), filter_for(20, Sampling(top_k=3), vocabulary=30))
    forbidden = choose(logits, draw_for(20)._replace(expected_Q=worst), floors_Q=lowest)
    assert (forbidden.gaps_Q == math.inf).all()


def test_temperature_0_takes_the_most_likely_token_with_its_plain_log_probability():
    logits = random_logits(30, 100)
    for floors_Q in (None, floors(logits, draw_for(30, temperature=0), every_token(30, 100))):
        choice = choose(logits, draw_for(30, temperature=0), floors_Q=floors_Q)
        assert choice.tokens_Q.tolist() == logits.argmax(-1).tolist()
        assert torch.allclose(choice.logprobs_Q, logits.log_softmax(-1).amax(-1), atol=1e-6)


def every_token(rows, vocabulary):
    return filter_for(rows, Sampling(), vocabulary=vocabulary)


@pytest.mark.parametrize(("vocabulary", "threads"), [(100, 1), (33_000, 2)])
def test_a_row_has_the_same_bits_alone_and_among_others(vocabulary, threads):
    """Beyond 32,768 numbers torch would add up a lone row on all threads, in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = 10
        logits, draw = random_logits(rows, vocabulary, scale=5.0), draw_for(rows, expected=3)
        keep = filter_for(rows, Sampling(top_k=50, top_p=0.95), vocabulary=vocabulary)
        together = choose(logits, draw, floors_Q=floors(logits, draw, keep))
        for row in range(rows):
            own = slice(row, row + 1)
            one, only = (type(part)(*(c[own] for c in columns(part))) for part in (draw, keep))
            alone = choose(logits[own], one, floors_Q=floors(logits[own], one, only))
            for a, b in zip(columns(together), columns(alone), strict=True):
                assert torch.equal(a[own], b)
    finally:
        torch.set_num_threads(before)


def columns(rows):
    """The tensors of a draw, a filter or a choice."""
    return [getattr(rows, name) for name in type(rows).__annotations__]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "must be 0 .greedy. or lie in 0.0001..100, got -1.0"),
        ({"temperature": 1e-6}, "lie in 0.0001..100, got 1e-06"),
        ({"temperature": 1e6}, "lie in 0.0001..100, got 1000000.0"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_k": 0}, "top_k must be at least 1, got 0; leave it out"),
        ({"top_p": 0.0}, "top_p must lie in .0, 1., got 0.0"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": 1.0}, "min_p"),
        ({"stop_strings": ("a", "")}, "empty"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**settings)


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_extreme_temperatures_are_greedy_or_uniform_and_never_break(temperature):
    logits = random_logits(200, 10)
    choice = choose(logits, draw_for(200, temperature=temperature))
    if temperature < 1:
        assert choice.tokens_Q.tolist() == logits.argmax(-1).tolist()
    else:
        assert len(set(choice.tokens_Q.tolist())) == 10
    assert choice.logprobs_Q.isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1.0, 100.0])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_one_logit_that_is_not_finite_shows_in_the_log_probability(temperature, poison):
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    logits[1, 37] = poison
    draw = draw_for(3, temperature=temperature)
    filtered = floors(logits, draw, every_token(3, 100))
    for floors_Q in (None, filtered):
        choice = choose(logits, draw, floors_Q=floors_Q)
        assert choice.logprobs_Q.isfinite().tolist() == [True, False, True]


def test_a_row_without_any_possible_token_shows_in_the_log_probability():
    logits = torch.zeros(2, 100)
    logits[1] = -math.inf
    assert choose(logits, draw_for(2)).logprobs_Q.isfinite().tolist() == [True, False]
