"""The noise: the same bits for ever, and nothing to see in them.

All keys are fixed, so a test here passes always or never.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from native_worlds import chi_square_p
from sortedrl.core.randomness import mix
from sortedrl.engines.native.sampler import exponential, gumbel, random_bits, row_keys, stream

MANY = 1 << 17
NEVER = 1e-4
MASK_32 = (1 << 32) - 1


def bits_of(*, seed=1, attempt=0, position=0, token=0):
    """31 bits, in plain Python and by the book: splitmix64 for the row, lowbias32 for the token."""
    key = mix_from(mix(seed, attempt), position)
    low, high = key & MASK_32, key >> 32
    state = (token * 0x9E3779B1 + low) & MASK_32
    state ^= state >> 16
    state = state * 0x21F0AAAD & MASK_32
    state ^= state >> 15
    state ^= high
    state = state * 0x735A2D97 & MASK_32
    state ^= state >> 15
    return state & 0x7FFFFFFF


def mix_from(state, part):
    """One more part for a mix that has come to `state`."""
    mask = (1 << 64) - 1
    state = ((state ^ part) + 0x9E3779B97F4A7C15) & mask
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
    return state ^ (state >> 31)


def noise_words(*, seeds=(1,), attempts=(0,), positions=(0,), tokens=(0,)):
    """One row for each seed, attempt and position, one column for each token."""
    keys = [(stream(seed, attempt), p) for seed in seeds for attempt in attempts for p in positions]
    streams, places = torch.tensor(keys, dtype=torch.long).T
    return random_bits(row_keys(streams, places), torch.as_tensor(tokens))


ALONG = {
    "tokens": lambda count: noise_words(tokens=torch.arange(count))[0],
    "positions": lambda count: noise_words(positions=range(count))[:, 0],
    "attempts": lambda count: noise_words(attempts=range(count))[:, 0],
    "seeds": lambda count: noise_words(seeds=range(count))[:, 0],
    "text": lambda count: noise_words(
        positions=range(count // 128), tokens=torch.arange(128)
    ).flatten(),
}
along = pytest.mark.parametrize("axis", ALONG)


def as_bits(numbers):
    """`[numbers, 31]` of zeros and ones."""
    return (numbers[:, None] >> torch.arange(31)) & 1


def test_the_bits_never_change():
    """An answer cached by one release must be the same answer in the next."""
    assert stream(0, 0) == 5095610196844313600
    assert stream(2**64 - 1, 7) == 6280106522154841398
    found = noise_words(seeds=(0, 1), positions=(0, 1000), tokens=(0, 1, 151935))
    assert found.tolist() == [
        [1222745017, 2109747761, 1217917467],
        [1030248720, 423730903, 1730876561],
        [1777646442, 1889903114, 23389967],
        [1613447016, 442032463, 14428165],
    ]


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**31),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**24),
)
def test_the_bits_are_those_of_plain_arithmetic(seed, attempt, position, token):
    found = noise_words(seeds=[seed], attempts=[attempt], positions=[position], tokens=[token])
    expected = bits_of(seed=seed, attempt=attempt, position=position, token=token)
    assert found.item() == expected


@along
def test_high_and_low_bits_are_uniform(axis):
    found = ALONG[axis](MANY)
    even = torch.full((256,), 1 / 256)
    for shift in (0, 8, 16, 23):
        counts = torch.bincount((found >> shift) & 255, minlength=256)
        assert chi_square_p(counts, even) > NEVER


@along
def test_every_bit_is_a_fair_coin(axis):
    ones = as_bits(ALONG[axis](MANY)).sum(0)
    assert ((ones - MANY / 2).abs() < 5 * math.sqrt(MANY) / 2).all()


@along
@pytest.mark.parametrize("distance", [1, 2, 128])
def test_neighbours_share_no_bits(axis, distance):
    """No bit of a number says anything about any bit of its neighbour."""
    signs = 2.0 * as_bits(ALONG[axis](MANY)) - 1
    products = signs[:-distance].T @ signs[distance:] / math.sqrt(MANY - distance)
    assert products.abs().max() < 5.5


def test_streams_differ_from_each_other_at_all_places():
    """Two answers to one prompt, and two attempts at one answer, share no noise."""
    places = {"positions": range(1 << 10), "tokens": torch.arange(64)}
    first = noise_words(seeds=[mix(0, 5, 0)], **places)
    for other in ({"seeds": [mix(0, 5, 1)]}, {"seeds": [mix(0, 5, 0)], "attempts": [1]}):
        second = noise_words(**places, **other)
        signs = 2.0 * as_bits(first.flatten()) - 1, 2.0 * as_bits(second.flatten()) - 1
        assert (signs[0].T @ signs[1] / math.sqrt(first.numel())).abs().max() < 5.5
        assert (first == second).sum() <= 2


@pytest.mark.parametrize(
    ("part", "flips"), [("seed", 64), ("attempt", 16), ("position", 17), ("token", 18)]
)
def test_one_bit_of_the_key_flips_half_of_the_noise(part, flips):
    for flip in range(flips):
        changed = [
            bits_of(**(key := {"seed": n, "attempt": n % 3, "position": n, "token": 7 * n}))
            ^ bits_of(**(key | {part: key[part] ^ (1 << flip)}))
            for n in range(1000)
        ]
        share = as_bits(torch.tensor(changed)).float().mean(0)
        assert abs(share.mean() - 0.5) < 0.02
        assert (share - 0.5).abs().max() < 0.1


def test_exponential_noise_is_accurate_where_it_is_small_and_never_zero_or_infinite():
    edges = torch.tensor([0, 1, 2, 1000, 1 << 24, 1 << 25, 1 << 30, (1 << 31) - 1])
    found = exponential(edges)
    exact = -torch.log1p(-(edges.double() + 0.5) * 2.0**-31)
    assert torch.allclose(found[:-1].double(), exact[:-1], rtol=1e-6)
    assert found[-1] == pytest.approx(24 * math.log(2), rel=1e-6)
    assert (found > 0).all()


def test_gumbel_noise_has_the_moments_and_the_distribution_of_its_name():
    keys = row_keys(torch.tensor([stream(3, 0)] * 512), torch.arange(512))
    noise = gumbel(keys, torch.arange(512)).flatten().double()
    count = len(noise)
    deviation = math.pi / math.sqrt(6)
    assert noise.mean() == pytest.approx(0.5772157, abs=5 * deviation / math.sqrt(count))
    assert noise.std() == pytest.approx(deviation, rel=0.01)
    skewness = ((noise - noise.mean()) / noise.std()).pow(3).mean()
    assert skewness == pytest.approx(1.1395, abs=0.05)
    exact = torch.exp(-torch.exp(-noise.sort().values))
    steps = torch.arange(count + 1) / count
    distance = torch.maximum((exact - steps[:-1]).abs().max(), (exact - steps[1:]).abs().max())
    assert distance < 2.2 / math.sqrt(count)


def test_large_noise_is_as_frequent_as_it_must_be():
    """A vocabulary of 150,000 draws its winners from far out."""
    keys = row_keys(torch.tensor([stream(4, 0)] * 64), torch.arange(64))
    noise = gumbel(keys, torch.arange(1 << 17))
    for bound in (5, 8, 10, 12):
        expected = noise.numel() * -math.expm1(-math.exp(-bound))
        assert abs((noise > bound).sum() - expected) < 5 * math.sqrt(expected)
    assert noise.max() < 22.3


@pytest.mark.parametrize("axis", ["positions", "seeds", "attempts"])
def test_the_largest_perturbed_logit_follows_the_softmax(axis):
    logits = torch.linspace(-3, 3, 40) + torch.sin(torch.arange(40.0))
    draws = {"positions": (0,), "seeds": (1,), "attempts": (0,), axis: range(40_000)}
    noise = -torch.log(exponential(noise_words(tokens=torch.arange(40), **draws)))
    counts = torch.bincount((logits + noise).argmax(-1), minlength=40)
    assert chi_square_p(counts, logits.softmax(-1)) > NEVER
