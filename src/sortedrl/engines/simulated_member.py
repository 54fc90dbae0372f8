"""One engine of a simulated pool: a batch, its place in time, and whether it lives.

A member is looked at only when something happens to it. In between it is `start` plus the
seconds of its prefill and of the steps since, so it costs nothing while others work.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace

from sortedrl.engines.simulated_batch import SimulatedBatch, Work
from sortedrl.types import Trajectory


class SimulatedMember:
    """A batch with a speed of its own."""

    def __init__(
        self, batch: SimulatedBatch, *, number: int, slowness: float, prefill_token_seconds: float
    ) -> None:
        """Alive and empty; everything takes it `slowness` times as long."""
        self.batch = batch
        self.number = number
        self.is_alive = True
        self.failures = 0
        self.decoded = self.prefilled = 0
        """Tokens since `take_tokens` was last called."""
        self.turn = 0
        """Counts its plans: what was expected of an earlier one does not happen."""
        self._slowness = slowness
        self._prefill_token_seconds = prefill_token_seconds
        self._start = 0.0
        self._prefill_seconds = 0.0

    @property
    def has_room(self) -> bool:
        """Whether it lives and has a free slot."""
        return self.is_alive and self.batch.num_held < self.batch.slots

    @property
    def load(self) -> float:
        """The share of its slots that is taken."""
        return self.batch.num_held / self.batch.slots

    def plan(self, now: float) -> float | None:
        """Take what is queued into the batch; gives when its next answer will be complete.

        New work comes in after the step that is under way. `None` if the plan stays as it was:
        nothing is to be done, or that step completes an answer, and the rest comes after it.
        """
        batch = self.batch
        if batch.num_running:
            steps = self._steps_under_way(now)
            if steps == batch.steps_to_finish:
                return None
            self._decode(steps)
        else:
            self._start = now
        prefilled = batch.admit()
        self.prefilled += prefilled
        self._prefill_seconds = prefilled * self._prefill_token_seconds
        if not batch.num_running:
            return None
        self.turn += 1
        return self._time_after(batch.steps_to_finish)

    def finish(self) -> list[Trajectory]:
        """Work to the next finish."""
        return self._decode(self.batch.steps_to_finish)

    def interrupt(self, now: float) -> tuple[float, Sequence[Trajectory]]:
        """Stop after the step that is under way: when that is, and all work as unfinished."""
        self.turn += 1
        complete = self._decode(self._steps_under_way(now)) if self.batch.num_running else ()
        stopped = [replace(answer, finish_reason=None) for answer in complete]
        until = max(now, self._start)
        return until, [*stopped, *(trajectory for trajectory, _ in self.batch.stop())]

    def fail(self, now: float, *, loses_tokens: bool) -> list[Work]:
        """Die at once: gives its work, with the tokens of the steps that were complete."""
        self.turn += 1
        self.is_alive = False
        self.failures += 1
        # Without a step to make, an answer is complete but for its prefill: it goes back too.
        if count := self.batch.steps_to_finish:
            self._decode(max(0, bisect_right(range(count), now, key=self._time_after) - 1))
        return self.batch.lose() if loses_tokens else self.batch.stop()

    def take_tokens(self) -> tuple[int, int]:
        """Decoded and prefilled tokens since this was last asked for."""
        tokens = self.decoded, self.prefilled
        self.decoded = self.prefilled = 0
        return tokens

    def _steps_under_way(self, now: float) -> int:
        """Steps made or begun by now, at most to the next finish."""
        if now <= self._start:
            return 0
        return bisect_left(range(self.batch.steps_to_finish), now, key=self._time_after)

    def _time_after(self, steps: int) -> float:
        seconds = self._prefill_seconds + self.batch.decode_seconds(steps)
        return self._start + seconds * self._slowness

    def _decode(self, steps: int) -> list[Trajectory]:
        self._start = self._time_after(steps)
        self._prefill_seconds = 0.0
        self.decoded += self.batch.num_running * steps
        return self.batch.decode(steps)
