"""Plans the rows of the next pass from the queue, the slots and the blocks; no tensors here.

    queue --admit--> slot, with blocks for all its tokens --finish--> out
      ^                 |
      +----preempt------+   cache full: the youngest loses its blocks, not its tokens

Every request that can decode gets its row in every plan; the rest of the row budget goes to chunked
prefill, oldest first. Long prompts therefore never delay decoding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from sortedrl.engines.native.kv_cache import BlockPool
from sortedrl.engines.native.native_request import Request


class RowSpan(NamedTuple):
    """Consecutive rows of one request, all sampled or none.

    A speculative span is one row whose token the device keeps for the next pass, before the host
    has read it. `epoch` is that of the request when the span was planned: results of an older epoch
    are invalid.
    """

    request: Request
    slot: int
    start: int
    num_rows: int
    is_sampled: bool
    is_speculative: bool
    epoch: int


@dataclass(slots=True)
class DecodeRows:
    """The next row of every request that only decodes, in columns.

    In most passes every slot has one, so rows are not objects: a thousand new ones per pass would
    keep Python's garbage collector busy.
    """

    requests: list[Request] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        """Rows."""
        return len(self.requests)

    def append(self, request: Request, slot: int) -> None:
        """Plan the next row of a request, which is in flight from now on."""
        start = request.num_computed_tokens
        self.requests.append(request)
        self.slots.append(slot)
        self.starts.append(start)
        self.epochs.append(request.epoch)
        request.num_inflight_tokens += 1
        request.num_inflight_passes += 1
        request.num_computed_tokens = start + 1

    def spans(self) -> list[RowSpan]:
        """The same, row by row."""
        return [
            RowSpan(request, slot, start, 1, True, True, epoch)
            for request, slot, start, epoch in zip(
                self.requests, self.slots, self.starts, self.epochs, strict=True
            )
        ]


@dataclass(slots=True)
class Plan:
    """The rows of one forward pass: decode rows, other sampled rows, and the rest.

    `changed` are the requests that got a slot or blocks since the last plan with rows.
    """

    decode: DecodeRows = field(default_factory=DecodeRows)
    verified: list[RowSpan] = field(default_factory=list)
    unsampled: list[RowSpan] = field(default_factory=list)
    changed: list[Request] = field(default_factory=list)
    num_sampled: int = 0
    num_unsampled: int = 0
    num_prefilled: int = 0
    num_running: int = 0

    @property
    def sampled(self) -> list[RowSpan]:
        """The spans that are sampled, in the order of their rows."""
        return self.decode.spans() + self.verified

    @property
    def spans(self) -> list[RowSpan]:
        """All spans, in the order of their rows."""
        return self.sampled + self.unsampled

    @property
    def num_rows(self) -> int:
        """Rows of the pass."""
        return self.num_sampled + self.num_unsampled

    def add_chunk(self, request: Request, slot: int, *, count: int) -> None:
        """Plan the next `count` rows of a request, sampled where needed."""
        start, end = request.num_computed_tokens, request.num_computed_tokens + count
        split = min(max(request.first_sampled, start), end)
        if split > start:
            rows = split - start
            self.unsampled.append(RowSpan(request, slot, start, rows, False, False, request.epoch))
            self.num_unsampled += rows
        if split < end:
            rows = end - split
            is_speculative = not request.num_unverified
            self.verified.append(
                RowSpan(request, slot, split, rows, True, is_speculative, request.epoch)
            )
            self.num_sampled += rows
            request.num_inflight_tokens += is_speculative
            request.num_inflight_passes += 1
        self.num_prefilled += max(0, min(end, request.prefill_end) - start)
        request.num_computed_tokens = end


class Planner:
    """Assigns slots and blocks to requests, first come first served."""

    def __init__(self, *, slots: int, pool: BlockPool, max_rows: int, max_sampled: int) -> None:
        """Start with nothing queued or running."""
        self.pool = pool
        self.num_preemptions = 0
        self._max_rows = max_rows
        self._max_sampled = max_sampled
        self._queue: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._free_slots = list(range(slots - 1, -1, -1))
        self._room_per_slot = max(1, pool.num_usable // slots)
        self._admissions = 0
        self._changed: list[Request] = []

    @property
    def has_work(self) -> bool:
        """Whether anything is queued or running."""
        return bool(self._queue or self._running)

    @property
    def num_running(self) -> int:
        """Requests in a slot."""
        return len(self._running)

    def enqueue(self, requests: Iterable[Request]) -> None:
        """Append requests to the queue."""
        for request in requests:
            # Those that return with a reply find their blocks, unless these were reallocated.
            self.pool.keeps_cached |= bool(request.given_positions)
            self._queue.append(request)

    def plan(self) -> Plan:
        """The rows of the next pass; empty if all requests wait for results in flight."""
        plan = Plan()
        chunked = []
        size = self.pool.block_tokens
        for request in list(self._running.values()):
            computed, slot = request.num_computed_tokens, request.slot
            end = len(request.tokens) + request.num_inflight_tokens
            if slot is None:  # just preempted by an older one
                continue
            if computed != end - 1 or request.num_unverified:
                chunked.append(request)
            elif end < request.max_length and (
                computed < len(request.blocks) * size or self._grow(request)
            ):
                plan.num_prefilled += computed < request.prefill_end
                plan.decode.append(request, slot)
        plan.num_sampled = len(plan.decode)
        for request in chunked:
            self._add_chunk(plan, request)
        self._admit(plan)
        plan.num_running = len(self._running)
        if plan.num_rows:
            plan.changed, self._changed = self._changed, []
        return plan

    def finish(self, request: Request) -> None:
        """Free the slot and the blocks of a complete request."""
        if request.slot is not None:
            self._evict(request)
        else:  # preempted while its last row was in flight
            self._queue.remove(request)

    def clear(self) -> list[Request]:
        """Remove all requests: the running ones, oldest first, then the queue in order."""
        requests = list(self._running.values())
        for request in requests:
            self._evict(request)
        requests += self._queue
        self._queue.clear()
        return requests

    def _add_chunk(self, plan: Plan, request: Request) -> None:
        if request.slot is None:
            return
        count = min(request.end - request.num_computed_tokens, self._max_rows - plan.num_rows)
        unsampled = max(0, request.first_sampled - request.num_computed_tokens)
        count = min(count, unsampled + max(0, self._max_sampled - plan.num_sampled))
        if count > 0:
            plan.add_chunk(request, request.slot, count=count)
            self._cache_blocks(request, min(request.num_computed_tokens, request.prompt_tokens))

    def _admit(self, plan: Plan) -> None:
        while self._queue and self._free_slots and plan.num_rows < self._max_rows:
            request = self._queue[0]
            if request.num_inflight_passes or not self._admitted(request):
                return
            self._queue.popleft()
            self._add_chunk(plan, request)

    def _admitted(self, request: Request) -> bool:
        """Give a request a slot and blocks for its tokens and the next one; false if impossible."""
        shared = self.pool.match_prefix(
            request.tokens, limit=min(request.first_sampled, request.end - 1)
        )
        length = len(request.tokens)
        room = max(length, min(length + 1, request.max_length))
        needed = self.pool.blocks_for(room) - len(shared.blocks)
        if needed > self.pool.num_free_without(shared):
            return False
        self.pool.acquire(shared)
        request.slot = self._free_slots.pop()
        home = 1 + request.slot * self._room_per_slot
        near = shared.blocks[-1] + 1 if shared.blocks else home
        request.blocks = [*shared.blocks, *self.pool.allocate(needed, near=near)]
        request.num_cached_blocks = len(shared.blocks)
        request.prefix_id = shared.prefix_id
        request.num_computed_tokens = len(shared.blocks) * self.pool.block_tokens
        self._admissions += 1
        request.admission = self._admissions
        request.prefill_end = len(request.tokens)
        self._running[request.admission] = request
        self._changed.append(request)
        return True

    def _grow(self, request: Request) -> bool:
        """Allocate a block for the next position; preempts the youngest request if none is free."""
        while not self.pool.num_free:
            youngest = self._running[next(reversed(self._running))]
            self._evict(youngest)
            self._queue.appendleft(youngest)
            self.num_preemptions += 1
            if youngest is request:
                return False
        request.blocks += self.pool.allocate(1, near=request.blocks[-1] + 1)
        self._changed.append(request)
        return True

    def _evict(self, request: Request) -> None:
        assert request.slot is not None, "only requests in a slot can leave one"
        self._cache_blocks(request, min(request.num_computed_tokens, len(request.tokens)))
        self._free_slots.append(request.slot)
        del self._running[request.admission]
        self.pool.release(request.blocks)
        request.release_cache()

    def _cache_blocks(self, request: Request, num_tokens: int) -> None:
        size = self.pool.block_tokens
        for index in range(request.num_cached_blocks, num_tokens // size):
            request.prefix_id = self.pool.cache_block(
                request.blocks[index],
                parent=request.prefix_id,
                tokens=request.tokens[index * size : (index + 1) * size],
            )
            request.num_cached_blocks = index + 1
