"""Gumbel noise as a function of its key: (seed, attempt, position, token).

The seed and the attempt of an answer make its *stream*, stream and position make the 64-bit key
of a row, key and token make 31 random bits. Only integer arithmetic is used up to here, so every
device has the same bits; the two logarithms that follow agree to a few units in the last place.

The bits are the top resolution of `w`, uniform in (0, 1), near 0, where the large noise comes
from: `gumbel = -log(-log(1 - w))` reaches 22, far enough that nothing a vocabulary holds is
cut off.

Axes: R rows, V tokens of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sortedrl.core.randomness import mix

GOLDEN_64 = 0x9E3779B97F4A7C15
ROUND_64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
GOLDEN_32 = 0x9E3779B1
ROUND_32 = (0x21F0AAAD, 0x735A2D97)
MASK_31 = 0x7FFFFFFF
LARGEST = 1 - 2**-24
SERIES_BELOW = 1 / 64


def stream(seed: int, attempt: int) -> int:
    """The noise stream of one attempt at an answer, as a signed 64-bit number."""
    return signed(mix(seed, attempt), bits=64)


def signed(value: int, *, bits: int) -> int:
    """The two's complement reading of an unsigned number: torch has no unsigned arithmetic."""
    return value - (1 << bits) if value >> (bits - 1) else value


def row_keys(streams_R: Tensor, positions_R: Tensor) -> Tensor:
    """The 64-bit key of each row: one more round of the mix that made the stream."""
    state = (streams_R ^ positions_R.long()) + signed(GOLDEN_64, bits=64)
    state = (state ^ _shift(state, 30, bits=64)) * signed(ROUND_64[0], bits=64)
    state = (state ^ _shift(state, 27, bits=64)) * signed(ROUND_64[1], bits=64)
    return state ^ _shift(state, 31, bits=64)


def random_bits(keys_R: Tensor, tokens_V: Tensor) -> Tensor:
    """31 random bits for each row and token."""
    low = keys_R.to(torch.int32)[:, None]
    high = (keys_R >> 32).to(torch.int32)[:, None]
    bits = tokens_V.to(torch.int32) * signed(GOLDEN_32, bits=32) + low
    bits ^= _shift(bits, 16, bits=32)
    bits *= ROUND_32[0]
    bits ^= _shift(bits, 15, bits=32)
    bits ^= high
    bits *= ROUND_32[1]
    bits ^= _shift(bits, 15, bits=32)
    bits &= MASK_31
    return bits


def exponential(bits: Tensor) -> Tensor:
    """Exponential noise `-log(1 - w)`, accurate in its small values."""
    return bits.float().mul_(-(2.0**-31)).sub_(2.0**-32).clamp_(min=-LARGEST).log1p_().neg_()


def gumbel(keys_R: Tensor, tokens_V: Tensor) -> Tensor:
    """Gumbel noise for each row and token, in fp32."""
    return -torch.log(exponential(random_bits(keys_R, tokens_V)))


def _shift(value: Tensor, count: int, *, bits: int) -> Tensor:
    """A logical shift to the right: torch's is arithmetic."""
    shifted = value >> count
    shifted &= (1 << (bits - count)) - 1
    return shifted
