"""Which rows run next: the queue, the slots and the blocks, in plain Python without a tensor.

    queue --admit--> slot, with blocks for all its tokens --finish--> out
      ^                 |
      +----preempt------+   the cache is full: the youngest loses its blocks, not its tokens

Every request in a slot that can be decoded gets its row in every plan; what is left of the row
budget goes to prompts, oldest first, in chunks. So long prompts never starve decoding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from sortedrl.engines.native.cache import BlockPool
from sortedrl.engines.native.request import Request


class Piece(NamedTuple):
    """Consecutive rows of one request, all sampled or none.

    A speculative piece is one row whose token the device keeps for the next pass, before the host
    has seen it. `life` is the request's when the piece was planned: results for an older life are
    void.
    """

    request: Request
    slot: int
    start: int
    num_rows: int
    is_sampled: bool
    is_speculative: bool
    life: int


@dataclass(slots=True)
class Plan:
    """The rows of one forward pass, the sampled ones first."""

    sampled: list[Piece] = field(default_factory=list)
    unsampled: list[Piece] = field(default_factory=list)
    num_sampled: int = 0
    num_unsampled: int = 0
    num_prefilled: int = 0
    num_running: int = 0

    @property
    def pieces(self) -> list[Piece]:
        """All pieces, in the order of their rows."""
        return self.sampled + self.unsampled

    @property
    def num_rows(self) -> int:
        """Rows of the pass."""
        return self.num_sampled + self.num_unsampled

    def add_decode(self, request: Request, slot: int) -> None:
        """Plan the next row of a request that needs nothing but its last token."""
        start = request.fed
        self.sampled.append(Piece(request, slot, start, 1, True, True, request.life))
        self.num_sampled += 1
        self.num_prefilled += start < request.prefill_end
        request.pending += 1
        request.in_flight += 1
        request.fed = start + 1

    def add_chunk(self, request: Request, slot: int, *, count: int) -> None:
        """Plan the next `count` rows of a request, sampled or not as they need."""
        start, end = request.fed, request.fed + count
        split = min(max(request.first_sampled, start), end)
        if split > start:
            rows = split - start
            self.unsampled.append(Piece(request, slot, start, rows, False, False, request.life))
            self.num_unsampled += rows
        if split < end:
            rows = end - split
            is_speculative = not request.unchecked
            self.sampled.append(
                Piece(request, slot, split, rows, True, is_speculative, request.life)
            )
            self.num_sampled += rows
            request.pending += is_speculative
            request.in_flight += 1
        self.num_prefilled += max(0, min(end, request.prefill_end) - start)
        request.fed = end


class Planner:
    """Slots and blocks for the requests in front of it, first come first served."""

    def __init__(self, *, slots: int, pool: BlockPool, max_rows: int, max_sampled: int) -> None:
        """Nothing queued and nothing running."""
        self.pool = pool
        self.num_preemptions = 0
        self._max_rows = max_rows
        self._max_sampled = max_sampled
        self._queue: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._free_slots = list(range(slots - 1, -1, -1))
        self._room_per_slot = max(1, pool.num_usable // slots)
        self._admissions = 0

    @property
    def has_work(self) -> bool:
        """Whether anything is queued or running."""
        return bool(self._queue or self._running)

    @property
    def num_running(self) -> int:
        """Requests in a slot."""
        return len(self._running)

    def enqueue(self, requests: Iterable[Request]) -> None:
        """Put requests behind those that wait."""
        self._queue.extend(requests)

    def plan(self) -> Plan:
        """The rows of the next pass; empty if all that is left waits for results."""
        plan = Plan()
        chunked = []
        size = self.pool.block_tokens
        for request in list(self._running.values()):
            fed, slot = request.fed, request.slot
            end = len(request.tokens) + request.pending
            if slot is None:  # preempted for an older one just now
                continue
            if fed != end - 1 or request.unchecked:
                chunked.append(request)
            elif end < request.max_length and (
                fed < len(request.blocks) * size or self._grow(request)
            ):
                plan.add_decode(request, slot)
        for request in chunked:
            self._add_chunk(plan, request)
        self._admit(plan)
        plan.num_running = len(self._running)
        return plan

    def finish(self, request: Request) -> None:
        """A request is complete: its slot and blocks are free."""
        if request.slot is not None:
            self._evict(request)
        else:  # preempted while its last row was under way
            self._queue.remove(request)

    def clear(self) -> list[Request]:
        """Take out everything, the oldest first, then the queue in its order."""
        requests = list(self._running.values())
        for request in requests:
            self._evict(request)
        requests += self._queue
        self._queue.clear()
        return requests

    def _add_chunk(self, plan: Plan, request: Request) -> None:
        if request.slot is None:
            return
        count = min(request.end - request.fed, self._max_rows - plan.num_rows)
        unsampled = max(0, request.first_sampled - request.fed)
        count = min(count, unsampled + max(0, self._max_sampled - plan.num_sampled))
        if count > 0:
            plan.add_chunk(request, request.slot, count=count)
            self._remember(request, min(request.fed, request.prompt_tokens))

    def _admit(self, plan: Plan) -> None:
        while self._queue and self._free_slots and plan.num_rows < self._max_rows:
            request = self._queue[0]
            if request.in_flight or not self._take_in(request):
                return
            self._queue.popleft()
            self._add_chunk(plan, request)

    def _take_in(self, request: Request) -> bool:
        """Give a request a slot and blocks for all its tokens and one more, if there are enough."""
        shared = self.pool.match(request.tokens, limit=min(request.first_sampled, request.end - 1))
        length = len(request.tokens)
        room = max(length, min(length + 1, request.max_length))
        needed = self.pool.blocks_for(room) - len(shared.blocks)
        if needed > self.pool.num_free_without(shared):
            return False
        self.pool.hold(shared)
        request.slot = self._free_slots.pop()
        home = 1 + request.slot * self._room_per_slot
        near = shared.blocks[-1] + 1 if shared.blocks else home
        request.blocks = [*shared.blocks, *self.pool.allocate(needed, near=near)]
        request.remembered = len(shared.blocks)
        request.content = shared.content
        request.fed = len(shared.blocks) * self.pool.block_tokens
        self._admissions += 1
        request.age = self._admissions
        request.prefill_end = len(request.tokens)
        self._running[request.age] = request
        return True

    def _grow(self, request: Request) -> bool:
        """Find a block for the next position, if need be at the cost of the youngest."""
        while not self.pool.num_free:
            youngest = self._running[next(reversed(self._running))]
            self._evict(youngest)
            self._queue.appendleft(youngest)
            self.num_preemptions += 1
            if youngest is request:
                return False
        request.blocks += self.pool.allocate(1, near=request.blocks[-1] + 1)
        return True

    def _evict(self, request: Request) -> None:
        assert request.slot is not None, "only requests in a slot can leave one"
        self._remember(request, min(request.fed, len(request.tokens)))
        self._free_slots.append(request.slot)
        del self._running[request.age]
        self.pool.release(request.blocks)
        request.leave_cache()

    def _remember(self, request: Request, num_tokens: int) -> None:
        size = self.pool.block_tokens
        for index in range(request.remembered, num_tokens // size):
            request.content = self.pool.remember(
                request.blocks[index],
                parent=request.content,
                tokens=request.tokens[index * size : (index + 1) * size],
            )
            request.remembered = index + 1
