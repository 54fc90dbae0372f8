"""The simulated engine, with simulated trainer, scorer and prompts.

The engine jumps from one finished answer to the next. In between every running answer grows by one
token per step, so the seconds of any number of steps have a closed form. Its policy is
deterministic: the token at position `i` is `i`, with log-probability 0. An answer that diverged
from its cached tokens under version `v` continues with other tokens, `v * BRANCH + i`, so its
tokens show where it diverged.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, overload

from sortedrl.core.clock import VirtualClock
from sortedrl.core.randomness import uniform
from sortedrl.simulate.costs import Costs
from sortedrl.simulate.lengths import Divergence, LengthSettings
from sortedrl.types import FinishReason, Key, Prompt, Segment, Step, TrainBatch, Trajectory, Weights

BRANCH = 1 << 32
_VERIFY_KEY = 0x766572696679

Work = tuple[Trajectory, float | None]
"""A trajectory to be written, and the tolerance it was submitted with."""


class Zeros(Sequence[float]):
    """A sequence of zeros that takes no memory: the log-probabilities of simulated tokens."""

    __slots__ = ("_length",)

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> Zeros: ...
    def __getitem__(self, index: int | slice) -> float | Zeros:
        """Zero, or a shorter sequence of zeros."""
        if isinstance(index, slice):
            return Zeros(len(range(self._length)[index]))
        range(self._length)[index]
        return 0.0


@dataclass(frozen=True, slots=True)
class _Running:
    """A trajectory in a slot, with the step at which it started and its tokens then."""

    trajectory: Trajectory
    tolerance: float | None
    kept: tuple[Segment, ...]
    kept_tokens: int
    given: Sequence[int]
    divergence: Divergence | None
    length: int
    since: int


class LengthSource(Protocol):
    """The source of the lengths of answers, or of the turns of conversations."""

    @property
    def settings(self) -> LengthSettings:
        """Settings, among them the rate at which cached tokens are rejected."""

    @property
    def max_tokens(self) -> int:
        """Tokens after which an answer is cut off."""

    def length(
        self, trajectory: Trajectory, *, version: int, divergence: Divergence | None = None
    ) -> int:
        """Tokens at which these weights end the answer."""


class SimulatedBatch:
    """Continuous batching without a clock."""

    def __init__(self, *, slots: int, lengths: LengthSource, costs: Costs) -> None:
        """Empty, with the weights of version 0."""
        self.slots = slots
        self.version = 0
        self._lengths = lengths
        self._costs = costs
        self._queue: deque[Work] = deque()
        self._running: dict[Key, _Running] = {}
        self._finishes: list[tuple[int, Key]] = []
        self._steps = 0
        self._cached = 0
        self._held: dict[Key, int] = {}

    @property
    def num_running(self) -> int:
        """Sequences in the slots."""
        return len(self._running)

    @property
    def num_held(self) -> int:
        """Sequences in the slots and in the queue before them."""
        return len(self._running) + len(self._queue)

    @property
    def steps_to_finish(self) -> int:
        """Steps until the next answer is complete; 0 if nothing runs."""
        return self._finishes[0][0] - self._steps if self._finishes else 0

    def queue(self, works: Sequence[Work]) -> None:
        """Queue work; what exceeds the slots waits."""
        self._queue.extend(works)

    def admit(self) -> int:
        """Move queued work into free slots; returns the number of tokens to prefill."""
        prefilled = 0
        while self._queue and len(self._running) < self.slots:
            trajectory, tolerance = self._queue.popleft()
            prefilled += self._to_prefill(trajectory)
            divergence = _divergence(trajectory)
            cached = trajectory.num_tokens
            begun, kept_tokens = trajectory, cached
            if tolerance is not None and math.isfinite(tolerance):
                kept_tokens = self._verified(trajectory)
                if kept_tokens < cached:
                    divergence = Divergence(self.version, kept_tokens)
            if tolerance is not None:
                begun = _cut(trajectory, kept_tokens, version=self.version)
            length = self._lengths.length(begun, version=self.version, divergence=divergence)
            length = max(length, kept_tokens)
            self._running[trajectory.key] = _Running(
                trajectory,
                tolerance,
                begun.segments,
                kept_tokens,
                begun.given,
                divergence,
                length,
                self._steps,
            )
            finish = self._steps + length - kept_tokens
            heapq.heappush(self._finishes, (finish, trajectory.key))
            self._cached += len(trajectory.prompt.tokens) + begun.num_given + kept_tokens
        return prefilled

    def _to_prefill(self, trajectory: Trajectory) -> int:
        """All tokens, or only the reply if the previous turn is still in the cache."""
        if self._held.pop(trajectory.key, None) == self.version:
            return len(trajectory.given)
        return len(trajectory.prompt.tokens) + trajectory.num_given + trajectory.num_tokens

    def decode_seconds(self, count: int) -> float:
        """Seconds of the next steps, if the running set does not change."""
        running = len(self._running)
        cached = count * self._cached + running * count * (count - 1) // 2
        return (
            count * (self._costs.step_seconds + running * self._costs.sequence_seconds)
            + cached * self._costs.cached_token_seconds
        )

    def decode(self, count: int) -> list[Trajectory]:
        """Run that many steps, at most to the next finish; returns the answers complete then."""
        self._steps += count
        self._cached += len(self._running) * count
        finished = []
        while self._finishes and self._finishes[0][0] == self._steps:
            _, key = heapq.heappop(self._finishes)
            finished.append(self._leave(key, is_finished=True))
        return finished

    def stop(self) -> list[Work]:
        """Return everything that is not complete, with its tokens."""
        works: list[Work] = []
        for key in sorted(self._running):
            tolerance = self._running[key].tolerance
            works.append((self._leave(key, is_finished=False), tolerance))
        return [*works, *self._emptied()]

    def lose(self) -> list[Work]:
        """Return everything as it was submitted, and count the lost tokens as decoded."""
        works: list[Work] = []
        for key in sorted(self._running):
            running = self._running[key]
            decoded = self._leave(key, is_finished=False).decoded_tokens
            lost = replace(running.trajectory, decoded_tokens=decoded)
            works.append((lost, running.tolerance))
        return [*works, *self._emptied()]

    def _emptied(self) -> list[Work]:
        works = list(self._queue)
        self._queue.clear()
        self._finishes.clear()
        return works

    def _verified(self, trajectory: Trajectory) -> int:
        """How many cached tokens the current weights reproduce: a geometric prefix.

        An exponential budget is spent at the mismatch rate for each version of staleness.
        """
        hazard = -math.log1p(-self._lengths.settings.mismatch_rate)
        budget = -math.log(uniform(trajectory.seed, trajectory.attempt, _VERIFY_KEY, self.version))
        kept = 0
        for segment in trajectory.segments:
            rate = hazard * (self.version - segment.version)
            if rate * len(segment.tokens) >= budget:
                return kept + min(int(budget / rate), len(segment.tokens) - 1)
            budget -= rate * len(segment.tokens)
            kept += len(segment.tokens)
        return kept

    def _leave(self, key: Key, *, is_finished: bool) -> Trajectory:
        running = self._running.pop(key)
        trajectory = running.trajectory
        decoded = self._steps - running.since
        given = sum(len(segment.given) for segment in running.kept) + len(running.given)
        self._cached -= len(trajectory.prompt.tokens) + given + running.kept_tokens + decoded
        reason: FinishReason = "stop" if running.length < self._lengths.max_tokens else "length"
        if is_finished:
            self._held[key] = self.version
        return replace(
            trajectory,
            segments=self._written(running, decoded),
            given=() if decoded else running.given,
            decoded_tokens=trajectory.decoded_tokens + decoded,
            finish_reason=reason if is_finished else None,
        )

    def _written(self, running: _Running, decoded: int) -> tuple[Segment, ...]:
        """The kept segments and the tokens written since; merged if they are contiguous."""
        if not decoded:
            return running.kept
        branch = 0 if running.divergence is None else running.divergence.version
        start = branch * BRANCH + running.kept_tokens
        stop, kept, given = start + decoded, running.kept, running.given
        goes_on = bool(kept) and not given and kept[-1].version == self.version
        if goes_on and kept[-1].tokens[-1] == start - 1:
            start, kept, given = kept[-1].tokens[0], kept[:-1], kept[-1].given
        return (*kept, Segment(range(start, stop), Zeros(stop - start), self.version, given))


def _divergence(trajectory: Trajectory) -> Divergence | None:
    """Where the answer last diverged from cached tokens, read from its own tokens."""
    if not trajectory.segments:
        return None
    branch = trajectory.segments[-1].tokens[-1] // BRANCH
    start = 0
    for segment in trajectory.segments:
        if segment.tokens[0] // BRANCH == branch:
            break
        start += len(segment.tokens)
    return Divergence(branch, start) if branch else None


def _cut(trajectory: Trajectory, tokens: int, *, version: int) -> Trajectory:
    """The first tokens of the trajectory, stamped anew, with the replies up to there."""
    kept: list[Segment] = []
    for segment in trajectory.segments:
        count = min(tokens, len(segment.tokens))
        if not count:
            return replace(trajectory, segments=tuple(kept), given=segment.given)
        kept.append(
            Segment(segment.tokens[:count], segment.logprobs[:count], version, segment.given)
        )
        tokens -= count
        if count < len(segment.tokens):
            return replace(trajectory, segments=tuple(kept), given=())
    return replace(trajectory, segments=tuple(kept))


class SimulatedEngine:
    """Continuous batching on a virtual clock."""

    def __init__(
        self,
        *,
        slots: int,
        lengths: LengthSource,
        costs: Costs,
        clock: VirtualClock,
        until: Callable[[], float | None] = lambda: None,
    ) -> None:
        """An empty engine with the weights of version 0.

        A step ends with the next complete answer, or at the time returned by `until`, if sooner.
        """
        self._until = until
        self.slots = slots
        self._batch = SimulatedBatch(slots=slots, lengths=lengths, costs=costs)
        self._costs = costs
        self._clock = clock

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._batch.version

    @version.setter
    def version(self, version: int) -> None:
        self._batch.version = version

    def submit(self, trajectories: Sequence[Trajectory], *, tolerance: float | None) -> None:
        """Submit work; what exceeds the slots is queued."""
        self._batch.queue([(trajectory, tolerance) for trajectory in trajectories])

    def step(self) -> Step:
        """Work until the next answer is complete."""
        batch = self._batch
        prefilled = batch.admit()
        count, running = batch.steps_to_finish, batch.num_running
        prefill_seconds = prefilled * self._costs.prefill_token_seconds
        count = self._steps_until(count, self._clock.seconds() + prefill_seconds)
        self._clock.advance(prefill_seconds + batch.decode_seconds(count))
        return Step(
            finished=tuple(batch.decode(count)),
            decoded_tokens=running * count,
            prefilled_tokens=prefilled,
        )

    def _steps_until(self, count: int, now: float) -> int:
        """The smallest number of steps that reaches the stop time, within 1..`count`."""
        until = self._until()
        if until is None or count <= 1:
            return count
        seconds = until - now
        return 1 + bisect_left(
            range(1, count), seconds, key=lambda steps: self._batch.decode_seconds(steps)
        )

    def interrupt(self) -> Sequence[Trajectory]:
        """Stop, and return everything that is not complete."""
        self._clock.advance(self._costs.interrupt_seconds)
        return [trajectory for trajectory, _ in self._batch.stop()]

    def load_weights(self, weights: Weights) -> None:
        """Set the version and advance the clock by a weight sync."""
        assert not self._batch.num_running, "weights change only while nothing runs"
        self._clock.advance(self._costs.weight_sync_seconds)
        self.version = weights.version


class SimulatedTrainer:
    """Counts versions and advances the clock."""

    def __init__(self, *, costs: Costs, clock: VirtualClock) -> None:
        self.version = 0
        self._costs = costs
        self._clock = clock

    def update(self, batch: TrainBatch) -> None:
        """Advance the clock by one update."""
        tokens = batch.num_tokens * self._costs.update_token_seconds
        self._clock.advance(self._costs.update_seconds + tokens)
        self.version += 1

    def weights(self) -> Weights:
        """The version, without tensors."""
        return Weights(self.version)


class SimulatedScorer:
    """Gives no rewards and takes no time."""

    def submit(self, trajectory: Trajectory) -> None:
        """Nothing to do."""

    def cancel(self, trajectory: Trajectory) -> None:
        """Nothing to do."""

    def collect(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """The trajectories unchanged."""
        return trajectories


class SimulatedPrompts:
    """Prompts that are only numbers, all of one length."""

    def __init__(self, count: int, *, prompt_tokens: int) -> None:
        """`count` prompts."""
        self._count = count
        self._tokens = range(prompt_tokens)
        self._next = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether no prompt is left."""
        return self._next >= self._count

    def take(self, count: int) -> Sequence[Prompt]:
        """The next prompts."""
        first = self._next
        self._next = min(first + count, self._count)
        return [Prompt(id=number, tokens=self._tokens) for number in range(first, self._next)]
