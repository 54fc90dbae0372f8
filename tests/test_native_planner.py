"""The planner without a model: a device that writes at random and knows what its cache holds.

Tokens are 0 and 1, and 2 ends an answer, so texts often begin alike.
"""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, replace
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from native_worlds import fresh
from sortedrl.engines.native.cache import BlockPool
from sortedrl.engines.native.planner import Planner
from sortedrl.engines.native.request import Request
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
        limit=limit,
        stream=0,
        tolerance=0.0,
        tokens=[*trajectory.prompt.tokens, *trajectory.tokens],
        kept_segments=() if is_verified else trajectory.segments,
        unchecked=trajectory.num_tokens if is_verified else 0,
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
        for piece in plan.pieces:
            text = self.text(piece.request)
            for position in range(piece.start, piece.start + piece.num_rows):
                self.places[self.place(piece, position)] = text[: position + 1]
        for piece in plan.pieces:
            text = self.text(piece.request)
            for position in range(piece.start + piece.num_rows):
                assert self.places[self.place(piece, position)] == text[: position + 1]
        chosen = [[self.sampled() for _ in range(piece.num_rows)] for piece in plan.sampled]
        for piece, tokens in zip(plan.sampled, chosen, strict=True):
            if piece.is_speculative:
                self.unread[piece.request] += tokens
        return chosen

    def collect(self, plan):
        for piece in plan.sampled:
            if piece.is_speculative:
                del self.unread[piece.request][0]

    def sampled(self):
        return STOP if self.random.random() < 0.1 else self.random.randrange(2)

    def text(self, request):
        return (*request.tokens, *self.unread[request])

    def place(self, piece, position):
        return piece.request.blocks[position // self.size], position % self.size


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
        self.under_way = deque()
        self.inside = {}
        self.num_submitted = self.num_out = 0

    @property
    def running(self):
        """Requests in a slot, the oldest first."""
        return sorted((r for r in self.inside if r.slot is not None), key=lambda r: r.age)

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
        plan, chosen = self.under_way.popleft()
        self.device.collect(plan)
        for piece, tokens in zip(plan.sampled, chosen, strict=True):
            request = piece.request
            request.in_flight -= 1
            request.pending -= piece.is_speculative
            if piece.life == request.life and request.finish_reason is None:
                self.read(request, tokens)
                if request.finish_reason is not None:
                    self.planner.finish(request)
                    self.out(request)

    def read(self, request, tokens):
        for token in tokens:
            if not request.unchecked:
                request.accept(token, 0.0)
            elif self.random.random() < 0.8:
                request.confirm(0.0)
            else:
                request.part(token, 0.0)
                return
            if request.finish_reason is not None:
                return

    def stop(self):
        while self.under_way:
            self.absorb()
        stopped = self.planner.clear()
        assert [self.inside[request] for request in stopped] == sorted(self.inside.values())
        assert self.pool.num_free == self.pool.num_usable
        for request in stopped:
            self.out(request)
        return stopped

    def advance(self):
        due = [
            (request, request.fed)
            for request in self.running
            if not request.unchecked
            and request.fed == len(request.tokens) + request.pending - 1
            and len(request.tokens) + request.pending < request.max_length
        ]
        plan = self.planner.plan()
        self.check(plan)
        rows = {(piece.request, piece.start) for piece in plan.sampled}
        assert all(row in rows for row in due if row[0].slot is not None)
        if plan.num_rows:
            self.under_way.append((plan, self.device.launch(plan)))
            if len(self.under_way) <= self.lag:
                return
        if self.under_way:
            self.absorb()
        else:
            assert not self.inside, "work that is inside goes on"

    def check(self, plan):
        assert all(piece.request in self.inside for piece in plan.pieces)
        assert plan.num_sampled == sum(piece.num_rows for piece in plan.sampled) <= self.max_sampled
        assert plan.num_unsampled == sum(piece.num_rows for piece in plan.unsampled)
        assert plan.num_rows <= self.max_rows
        assert plan.num_running == len(self.running)
        written = Counter(
            self.device.place(piece, position)
            for piece in plan.pieces
            for position in range(piece.start, piece.start + piece.num_rows)
        )
        assert written.total() == len(written) == plan.num_rows
        for piece in plan.pieces:
            assert piece.slot == piece.request.slot
            assert piece.start + piece.num_rows < piece.request.max_length, "the last is not fed"

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
            self.pool.forget()
        order.shuffle(stopped)
        for old in stopped[: len(stopped) // 2 + 1]:
            request = request_for(old.result(0), limit=old.limit, is_verified=is_verified)
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
        while self.planner.has_work or self.under_way:
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
    for piece in plan.sampled:
        piece.request.in_flight -= 1
        piece.request.pending -= piece.is_speculative
        piece.request.accept(token, 0.0)


def rows(plan):
    return [(piece.request, piece.start, piece.num_rows, piece.is_sampled) for piece in plan.pieces]


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
