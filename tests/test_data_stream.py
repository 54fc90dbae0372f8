"""The stream of prompts: every row once per epoch, and a resumed stream goes on where it was."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.data.stream import PromptStream, TokenizedRow
from sortedrl.errors import ConfigError

COUNTS = st.integers(1, 12)


def rows(count):
    return [TokenizedRow((number,), {"row": number}) for number in range(count)]


def drained(stream, sizes=()):
    prompts = []
    for size in sizes:
        prompts += stream.take(size)
    while not stream.is_exhausted:
        prompts += stream.take(3)
    return prompts


@given(count=COUNTS, epochs=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_every_epoch_asks_every_row_once(count, epochs, seed):
    stream = PromptStream(rows(count), epochs=epochs, seed=seed)
    prompts = drained(stream)
    assert [prompt.id for prompt in prompts] == list(range(count * epochs))
    for epoch in range(epochs):
        asked = Counter(p.fields["row"] for p in prompts[epoch * count : (epoch + 1) * count])
        assert asked == dict.fromkeys(range(count), 1)
    assert stream.take(1) == []


@given(
    count=COUNTS, epochs=st.integers(1, 3), seed=st.integers(0, 99), cut=st.integers(0, 36),
    sizes=st.lists(st.integers(0, 5), max_size=4),
)  # fmt: skip
def test_a_stream_opened_in_the_middle_goes_on_as_the_first_would(count, epochs, seed, cut, sizes):
    whole = drained(PromptStream(rows(count), epochs=epochs, seed=seed), sizes)
    position = min(cut, count * epochs)
    rest = PromptStream(rows(count), epochs=epochs, seed=seed, position=position)
    assert drained(rest) == whole[position:]


def test_epochs_and_seeds_differ_in_their_order():
    def order(**options):
        return [p.fields["row"] for p in drained(PromptStream(rows(50), **options))]

    two = order(epochs=2, seed=1)
    assert two[:50] != two[50:]
    assert order(seed=1) == two[:50]
    assert order(seed=2) != order(seed=1)


def test_a_position_outside_the_data_is_refused():
    with pytest.raises(ConfigError, match=r"position must lie in 0..6 \(2 epochs of 3 rows\)"):
        PromptStream(rows(3), epochs=2, position=7)
    with pytest.raises(ConfigError, match="set epochs to at least 3"):
        PromptStream(rows(3), epochs=2, position=7)


def test_other_rows_have_another_fingerprint():
    assert PromptStream(rows(3)).fingerprint == PromptStream(rows(3)).fingerprint
    assert PromptStream(rows(3)).fingerprint != PromptStream(rows(4)).fingerprint
    joined = PromptStream([TokenizedRow((0, 1), {}), TokenizedRow((), {})])
    assert joined.fingerprint != PromptStream(rows(2)).fingerprint
