"""The planner without a model: a device that writes at random and knows what its cache holds.

Tokens are 0 and 1, and 2 ends an answer, so texts often begin alike.
"""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, replace
from random import Random

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from native_worlds import fresh
from sortedrl.engines.native.cuda_runner import BlockTables, SlotState
from sortedrl.engines.native.kv_cache import BlockPool
from sortedrl.engines.native.native_request import Request
from sortedrl.engines.native.planner import Planner
from sortedrl.engines.sampling import Sampling
from sortedrl.types import Segment

STOP = 2
texts = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def request_for(trajectory, *, limit, is_verified=False):
    """As the engine makes it."""
    return Request(
        trajectory=trajectory,
        sampling=Sampling(),
        stop_tokens=frozenset({STOP}),
        max_tokens=limit,
        max_context=10_000,
        stream=0,
        tolerance=0.0,
        tokens=[*trajectory.prompt.tokens, *trajectory.tokens],
        kept_segments=() if is_verified else trajectory.segments,
        num_unverified=trajectory.num_tokens if is_verified else 0,
    )


@dataclass
class Device:
    """Checks that every row reads its own text from the cache, and samples at random.

    Each place remembers the whole text up to the token it was fed. Like a GPU, the device knows
    the tokens that the host has not read yet.
    """

    random: Random
    size: int

    def __post_init__(self):
        self.places = {}
        self.unread = defaultdict(list)

    def launch(self, plan):
        for span in plan.spans:
            text = self.text(span.request)
            for position in range(span.start, span.start + span.num_rows):
                self.places[self.place(span, position)] = text[: position + 1]
        for span in plan.spans:
            text = self.text(span.request)
            for position in range(span.start + span.num_rows):
                assert self.places[self.place(span, position)] == text[: position + 1]
        chosen = [[self.sampled() for _ in range(span.num_rows)] for span in plan.sampled]
        for span, tokens in zip(plan.sampled, chosen, strict=True):
            if span.is_speculative:
                self.unread[span.request] += tokens
        return chosen

    def collect(self, plan):
        for span in plan.sampled:
            if span.is_speculative:
                del self.unread[span.request][0]

    def sampled(self):
        return STOP if self.random.random() < 0.1 else self.random.randrange(2)

    def text(self, request):
        return (*request.tokens, *self.unread[request])

    def place(self, span, position):
        return span.request.blocks[position // self.size], position % self.size


class Planning(RuleBasedStateMachine):
    """Requests in, random results back, with interrupts and changes of the weights between."""

    @initialize(
        slots=st.integers(1, 4),
        usable=st.integers(5, 16),
        block_tokens=st.integers(1, 3),
        chunk=st.sampled_from((2, 1, 6)),
        lag=st.integers(0, 2),
        seed=st.integers(0, 2**16),
    )
    def begin(self, slots, usable, block_tokens, chunk, lag, seed):
        self.slots, self.lag = slots, lag
        self.max_rows = slots + chunk
        self.pool = BlockPool(usable + 1, block_tokens=block_tokens)
        self.random = Random(seed)
        self.device = Device(self.random, block_tokens)
        self.max_sampled = self.random.randint(slots, self.max_rows)
        self.planner = Planner(
            slots=slots, pool=self.pool, max_rows=self.max_rows, max_sampled=self.max_sampled
        )
        self.slot_state = SlotState(slots, usable + 1, torch.device("cpu"))
        self.in_flight = deque()
        self.inside = {}
        self.num_submitted = self.num_out = 0

    @property
    def running(self):
        """Requests in a slot, the oldest first."""
        return sorted((r for r in self.inside if r.slot is not None), key=lambda r: r.admission)

    def enqueue(self, request):
        self.num_submitted += 1
        self.inside[request] = self.num_submitted
        self.planner.enqueue([request])

    def out(self, request):
        """A request leaves; it must have been inside, and so it leaves once."""
        del self.inside[request]
        self.num_out += 1

    def absorb(self):
        """Read the oldest pass as the engine reads it."""
        plan, chosen = self.in_flight.popleft()
        self.device.collect(plan)
        for span, tokens in zip(plan.sampled, chosen, strict=True):
            request = span.request
            request.num_inflight_passes -= 1
            request.num_inflight_tokens -= span.is_speculative
            if span.epoch == request.epoch and request.finish_reason is None:
                self.read(request, tokens)
                if request.finish_reason is not None:
                    self.planner.finish(request)
                    self.out(request)

    def read(self, request, tokens):
        for token in tokens:
            if not request.num_unverified:
                request.accept(token, 0.0)
            elif self.random.random() < 0.8:
                request.confirm(0.0, gap=0.0)
            else:
                request.diverge(token, 0.0)
                return
            if request.finish_reason is not None:
                return

    def stop(self):
        while self.in_flight:
            self.absorb()
        stopped = self.planner.clear()
        assert [self.inside[request] for request in stopped] == sorted(self.inside.values())
        assert self.pool.num_free == self.pool.num_usable
        for request in stopped:
            self.out(request)
        return stopped

    def advance(self):
        due = [
            (request, request.num_computed_tokens)
            for request in self.running
            if not request.num_unverified
            and request.num_computed_tokens == len(request.tokens) + request.num_inflight_tokens - 1
            and len(request.tokens) + request.num_inflight_tokens < request.max_length
        ]
        plan = self.planner.plan()
        self.check(plan)
        rows = {(span.request, span.start) for span in plan.sampled}
        assert all(row in rows for row in due if row[0].slot is not None)
        if plan.num_rows:
            self.in_flight.append((plan, self.device.launch(plan)))
            if len(self.in_flight) <= self.lag:
                return
        if self.in_flight:
            self.absorb()
        else:
            assert not self.inside, "work that is inside goes on"

    def check(self, plan):
        assert all(span.request in self.inside for span in plan.spans)
        assert plan.num_sampled == sum(span.num_rows for span in plan.sampled) <= self.max_sampled
        assert plan.num_unsampled == sum(span.num_rows for span in plan.unsampled)
        assert plan.num_rows <= self.max_rows
        assert plan.num_running == len(self.running)
        self.check_slot_state(plan)
        written = Counter(
            self.device.place(span, position)
            for span in plan.spans
            for position in range(span.start, span.start + span.num_rows)
        )
        assert written.total() == len(written) == plan.num_rows
        for span in plan.spans:
            assert span.slot == span.request.slot
            assert span.start + span.num_rows < span.request.max_length, "the last is not fed"

    def check_slot_state(self, plan):
        """What the plan says has changed is all that the device must be sent."""
        for request in plan.changed:
            self.slot_state.update(request)
        self.slot_state.send()
        for span in plan.spans:
            blocks = span.request.blocks
            assert self.slot_state.block_tables[span.slot, : len(blocks)].tolist() == blocks

    @rule(
        prompt=texts,
        cached=st.lists(st.integers(0, 1), max_size=5),
        limit=st.integers(1, 12),
        siblings=st.integers(1, 3),
        ends_in_stop=st.booleans(),
        is_verified=st.booleans(),
    )
    def submit(self, prompt, cached, limit, siblings, ends_in_stop, is_verified):
        cached = [*cached, STOP] if cached and ends_in_stop else cached
        room = self.pool.num_usable * self.pool.block_tokens
        if len(prompt) + max(limit, len(cached)) > room or len(cached) > limit:
            return
        segments = (Segment(cached, [0.0] * len(cached), 0),) if cached else ()
        trajectory = replace(fresh(prompt), segments=segments)
        for _ in range(siblings):
            request = request_for(trajectory, limit=limit, is_verified=is_verified)
            if request.finish_reason is None:
                self.enqueue(request)

    @rule(steps=st.integers(1, 8))
    def step(self, steps):
        for _ in range(steps):
            self.advance()

    @precondition(lambda self: self.inside)
    @rule(is_verified=st.booleans(), order=st.randoms(use_true_random=False))
    def interrupt(self, is_verified, order):
        """Stop, change the weights if what is cached will be verified, and go on with some."""
        stopped = self.stop()
        if is_verified:
            self.pool.reset_prefix_cache()
        order.shuffle(stopped)
        for old in stopped[: len(stopped) // 2 + 1]:
            request = request_for(old.result(0), limit=old.max_tokens, is_verified=is_verified)
            if request.finish_reason is None:
                self.enqueue(request)

    @invariant()
    def a_block_is_free_or_held_by_requests_in_slots(self):
        held = {block for request in self.running for block in request.blocks}
        assert self.pool.num_free + len(held) == self.pool.num_usable
        assert 0 not in held
        assert not any(request.blocks for request in self.inside if request.slot is None)

    @invariant()
    def slots_are_never_exceeded(self):
        slots = [request.slot for request in self.running]
        assert len(slots) == len(set(slots)) <= self.slots
        assert all(0 <= slot < self.slots for slot in slots)

    @invariant()
    def who_came_first_runs_first_and_only_the_youngest_is_preempted(self):
        numbers = [self.inside[request] for request in self.running]
        waiting = [number for r, number in self.inside.items() if r.slot is None]
        assert numbers == sorted(numbers)
        assert not waiting or not numbers or max(numbers) < min(waiting)

    def teardown(self):
        """Every request comes out exactly once: from wherever we stand, in finitely many steps."""
        if not hasattr(self, "planner"):
            return
        steps = 0
        while self.planner.has_work or self.in_flight:
            steps += 1
            assert steps < 5000, "the engine would never end"
            self.advance()
            self.a_block_is_free_or_held_by_requests_in_slots()
            self.who_came_first_runs_first_and_only_the_youngest_is_preempted()
        assert self.num_out == self.num_submitted
        assert self.pool.num_free == self.pool.num_usable


Planning.TestCase.settings = settings(stateful_step_count=40, report_multiple_bugs=False)
TestPlanning = Planning.TestCase


def planner(*, slots=2, usable=100, block_tokens=2, chunk=4):
    pool = BlockPool(usable + 1, block_tokens=block_tokens)
    return Planner(slots=slots, pool=pool, max_rows=slots + chunk, max_sampled=slots + chunk)


def absorbed(plan, token=0):
    """All results of a plan: the same token for every row."""
    for span in plan.sampled:
        span.request.num_inflight_passes -= 1
        span.request.num_inflight_tokens -= span.is_speculative
        span.request.accept(token, 0.0)


def rows(plan):
    return [(span.request, span.start, span.num_rows, span.is_sampled) for span in plan.spans]


def test_a_long_prompt_comes_in_chunks_beside_the_decoding_of_others():
    ours = planner(slots=2, chunk=4)
    short = request_for(fresh([0]), limit=50)
    long = request_for(fresh([1] * 12), limit=50)
    ours.enqueue([short])
    absorbed(ours.plan())
    ours.enqueue([long])
    plan = ours.plan()
    assert rows(plan) == [(short, 1, 1, True), (long, 0, 5, False)]
    absorbed(plan)
    assert rows(ours.plan()) == [(short, 2, 1, True), (long, 5, 5, False)]


def test_only_what_was_taken_in_of_a_prompt_is_remembered():
    ours = planner(slots=1, chunk=4)
    ours.enqueue([request_for(fresh([1] * 12), limit=5)])
    assert ours.plan().num_rows == 5
    ours.clear()
    again = request_for(fresh([1] * 12), limit=5)
    ours.enqueue([again])
    assert rows(ours.plan()) == [(again, 4, 5, False)]


def test_siblings_admitted_together_compute_their_prompt_once():
    ours = planner(slots=4, chunk=20)
    siblings = [request_for(fresh([0, 1] * 4, sample=n), limit=5) for n in range(4)]
    ours.enqueue(siblings)
    plan = ours.plan()
    assert plan.num_prefilled == 8 + 3 * 2
    shared = siblings[0].blocks[:3]
    assert all(sibling.blocks[:3] == shared for sibling in siblings)


def test_a_full_cache_costs_the_youngest_its_blocks_and_no_token():
    ours = planner(slots=2, usable=4, block_tokens=2)
    old, young = (request_for(fresh([n] * 3), limit=4) for n in range(2))
    ours.enqueue([old, young])
    absorbed(ours.plan())
    plan = ours.plan()
    assert rows(plan) == [(old, 3, 1, True), (young, 3, 1, True)]
    absorbed(plan)
    plan = ours.plan()
    assert rows(plan) == [(old, 4, 1, True)]
    assert ours.num_preemptions == 1
    assert (young.slot, young.blocks, young.tokens) == (None, [], [1, 1, 1, 0, 0])
    assert ours.clear() == [old, young]


def test_a_pass_that_only_decodes_sends_the_new_blocks_and_nothing_else():
    ours = planner(slots=3, usable=30, block_tokens=2, chunk=20)
    requests = [request_for(fresh([n] * (3 + n % 2)), limit=9) for n in range(3)]
    ours.enqueue(requests)
    plan = ours.plan()
    assert plan.changed == requests
    absorbed(plan)
    plan = ours.plan()
    assert plan.changed == []
    absorbed(plan)
    plan = ours.plan()
    assert plan.changed == [requests[0], requests[2]]
    assert len(plan.decode) == 3
    assert plan.verified == plan.unsampled == []


def test_only_changed_cells_of_the_block_tables_are_sent_and_the_last_value_wins():
    tables = BlockTables((3, 4), torch.device("cpu"))
    tables.write(1, 0, [5, 6])
    tables.write(2, 3, [7])
    tables.write(1, 0, [8])
    tables.send()
    assert tables.device.tolist() == [[0] * 4, [8, 6, 0, 0], [0, 0, 0, 7]]
    tables.device.zero_()
    tables.write(0, 0, [1, 2, 3, 4])
    tables.send()
    tables.send()
    assert tables.device.tolist() == [[1, 2, 3, 4], [0] * 4, [0] * 4]


class SlicedList(list):
    """Remembers the longest slice that was taken of it."""

    longest = 0

    def __getitem__(self, place):
        taken = super().__getitem__(place)
        if isinstance(place, slice):
            self.longest = max(self.longest, len(taken))
        return taken


def test_the_search_for_stop_strings_takes_no_longer_in_a_long_answer():
    request = Request(
        trajectory=fresh([0] * 50),
        sampling=Sampling(stop_strings=("ab", "xyz")),
        stop_tokens=frozenset(),
        max_tokens=3000,
        max_context=10_000,
        stream=0,
        tolerance=0.0,
        tokens=[0] * 50,
        kept_segments=(),
        num_unverified=0,
        decode=lambda tokens: "".join(map(chr, tokens)),
    )
    request.tokens = SlicedList(request.tokens)
    for _ in range(2000):
        request.accept(ord("a"), 0.0)
    assert request.finish_reason is None
    assert request.tokens.longest < 20
    request.accept(ord("b"), 0.0)
    assert request.finish_reason == "stop"
