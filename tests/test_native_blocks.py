"""The cache's blocks: nobody loses one, nobody shares one unknowingly, memory tells the truth."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sortedrl.engines.native.kv_cache import EMPTY_PREFIX, PADDING_BLOCK, BlockPool

texts = st.lists(st.integers(0, 1), min_size=1, max_size=9)


@dataclass(eq=False)
class Sequence:
    """A text in the cache, as its request keeps it."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0
    prefix_id: int = EMPTY_PREFIX


class Blocks(RuleBasedStateMachine):
    """Sequences come, grow and go; `holds` is what was really written into each block."""

    @initialize(num_blocks=st.integers(2, 12), block_tokens=st.integers(1, 3))
    def begin(self, num_blocks, block_tokens):
        self.pool = BlockPool(num_blocks, block_tokens=block_tokens)
        self.size = block_tokens
        self.sequences = []
        self.holds = {}

    def held(self):
        return Counter(block for sequence in self.sequences for block in sequence.blocks)

    def write(self, sequence, start):
        """Fill blocks from a block on with the sequence's text."""
        for index in range(start, len(sequence.tokens) // self.size):
            block = sequence.blocks[index]
            assert self.held()[block] == 1
            self.holds[block] = tuple(sequence.tokens[: (index + 1) * self.size])

    def allocate(self, sequence, count, *, near):
        held = self.held()
        given_away = self.pool.allocate(count, near=near)
        assert len(given_away) == len(set(given_away)) == count
        assert not any(held[block] for block in given_away)
        for block in given_away:
            self.holds.pop(block, None)
        sequence.blocks += given_away

    @rule(tokens=texts, cut=st.integers(0, 3), near=st.integers(0, 12))
    def take_in(self, tokens, cut, near):
        pool, sequence = self.pool, Sequence(tokens)
        shared = pool.match_prefix(tokens, limit=len(tokens) - cut)
        assert len(shared.blocks) * self.size <= max(0, len(tokens) - cut)
        for index, block in enumerate(shared.blocks):
            assert self.holds[block] == tuple(tokens[: (index + 1) * self.size])
        needed = pool.blocks_for(len(tokens)) - len(shared.blocks)
        free = pool.num_free_without(shared)
        assert free == pool.num_usable - len(set(self.held()) | set(shared.blocks))
        if needed > free:
            return
        pool.acquire(shared)
        sequence.blocks += shared.blocks
        sequence.num_cached_blocks, sequence.prefix_id = len(shared.blocks), shared.prefix_id
        self.sequences.append(sequence)
        self.allocate(sequence, needed, near=near)
        self.write(sequence, len(shared.blocks))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data, token):
        sequence = data.draw(st.sampled_from(self.sequences))
        if len(sequence.tokens) % self.size == 0:
            if not self.pool.num_free:
                return
            self.allocate(sequence, 1, near=sequence.blocks[-1] + 1)
        sequence.tokens.append(token)
        if len(sequence.tokens) % self.size == 0:
            self.write(sequence, len(sequence.tokens) // self.size - 1)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def remember(self, data):
        sequence = data.draw(st.sampled_from(self.sequences))
        full = len(sequence.tokens) // self.size
        until = data.draw(st.integers(min(sequence.num_cached_blocks, full), full))
        for index in range(sequence.num_cached_blocks, until):
            tokens = sequence.tokens[index * self.size : (index + 1) * self.size]
            sequence.prefix_id = self.pool.cache_block(
                sequence.blocks[index], parent=sequence.prefix_id, tokens=tokens
            )
            sequence.num_cached_blocks = index + 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def let_go(self, data):
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        self.pool.release(sequence.blocks)

    @rule()
    def change_weights(self):
        """As the engine does it: everything is stopped first, then all content forgotten."""
        for sequence in self.sequences:
            self.pool.release(sequence.blocks)
        self.sequences.clear()
        self.pool.reset_prefix_cache()
        self.holds.clear()

    @invariant()
    def a_block_is_free_or_held(self):
        held = set(self.held())
        assert self.pool.num_free + len(held) == self.pool.num_usable
        assert PADDING_BLOCK not in held
        assert all(1 <= block <= self.pool.num_usable for block in held)

    @invariant()
    def a_block_with_several_holders_holds_the_same_text_for_all(self):
        for sequence in self.sequences:
            for index in range(len(sequence.tokens) // self.size):
                text = tuple(sequence.tokens[: (index + 1) * self.size])
                assert self.holds[sequence.blocks[index]] == text

    def teardown(self):
        if hasattr(self, "pool"):
            self.change_weights()
            assert self.pool.num_free == self.pool.num_usable
            given_away = self.pool.allocate(self.pool.num_usable, near=1)
            assert sorted(given_away) == list(range(1, self.pool.num_usable + 1))


Blocks.TestCase.settings = settings(stateful_step_count=60)
TestBlocks = Blocks.TestCase


def remembered(pool, tokens):
    """A text that was written, remembered and let go."""
    blocks = pool.allocate(pool.blocks_for(len(tokens)), near=PADDING_BLOCK)
    content = EMPTY_PREFIX
    for index in range(len(tokens) // pool.block_tokens):
        part = tokens[index * pool.block_tokens : (index + 1) * pool.block_tokens]
        content = pool.cache_block(blocks[index], parent=content, tokens=part)
    pool.release(blocks)
    return blocks


@given(st.lists(texts, min_size=1, max_size=4), texts, st.integers(1, 3))
def test_the_longest_common_beginning_is_found(known, text, block_tokens):
    pool = BlockPool(100, block_tokens=block_tokens)
    for tokens in known:
        remembered(pool, tokens)
    longest = 0
    for tokens in known:
        full = len(tokens) // block_tokens * block_tokens
        for end in range(block_tokens, full + 1, block_tokens):
            if tokens[:end] == text[:end]:
                longest = max(longest, end)
    assert len(pool.match_prefix(text, limit=len(text)).blocks) * block_tokens == longest


def test_blocks_come_one_after_the_other_where_they_can():
    pool = BlockPool(10, block_tokens=4)
    assert pool.allocate(3, near=4) == [4, 5, 6]
    assert pool.allocate(3, near=8) == [8, 9, 1]
    assert pool.allocate(3, near=4) == [2, 3, 7]


def test_what_was_free_longest_is_given_away_first_and_the_end_of_a_text_before_its_beginning():
    pool = BlockPool(5, block_tokens=1)
    remembered(pool, [1, 2])
    remembered(pool, [3, 4])
    pool.allocate(1, near=PADDING_BLOCK)
    assert [len(pool.match_prefix(t, limit=2).blocks) for t in ([1, 2], [3, 4])] == [1, 2]


def test_a_text_known_by_another_block_stays_known_by_that_one():
    pool = BlockPool(5, block_tokens=2)
    first, second = pool.allocate(2, near=1)
    content = pool.cache_block(first, parent=EMPTY_PREFIX, tokens=[1, 2])
    assert pool.cache_block(second, parent=EMPTY_PREFIX, tokens=[1, 2]) == content
    assert pool.match_prefix([1, 2], limit=2).blocks == (first,)


def test_the_same_tokens_after_another_beginning_are_another_content():
    pool = BlockPool(9, block_tokens=2)
    remembered(pool, [1, 2, 5, 6])
    assert len(pool.match_prefix([3, 4, 5, 6], limit=4).blocks) == 0
    assert len(pool.match_prefix([5, 6], limit=2).blocks) == 0


def test_a_block_is_not_released_more_often_than_held():
    pool = BlockPool(3, block_tokens=2)
    blocks = pool.allocate(1, near=1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="once for each reference"):
        pool.release(blocks)
