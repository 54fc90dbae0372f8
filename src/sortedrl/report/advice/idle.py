"""Where the slots of a run stood idle: functions of its events, counted as the meter counts.

Idle slot-seconds of the rollout fall into three places that add up to all of them:
`tail`, when nothing waited though more prompts were to come (the last long answers of a group);
`ending`, when nothing waited after the last prompts of the data were loaded;
`elsewhere`, when work waited that the strategy did not start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sortedrl.events import (
    Begin,
    End,
    Event,
    Finish,
    HandOver,
    Harvest,
    Interrupt,
    Load,
    Renew,
    Start,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Idle slot-seconds of the rollout by place, and how full the slots were."""

    tail: float = 0.0
    ending: float = 0.0
    elsewhere: float = 0.0
    rollout_seconds: float = 0.0
    full_seconds: float = 0.0
    """Seconds of rollout with an answer in every slot."""
    peak: int = 0
    """The most answers that ran at the same time."""

    @property
    def total(self) -> float:
        """All idle slot-seconds of the rollout."""
        return self.tail + self.ending + self.elsewhere

    @property
    def tail_share(self) -> float:
        """Share of the idle slot-seconds that more work at hand would have filled."""
        return self.tail / self.total if self.total else 0.0

    @property
    def full_share(self) -> float:
        """Share of the rollout with every slot busy."""
        return self.full_seconds / self.rollout_seconds if self.rollout_seconds else 0.0


def idle(events: Iterable[Event]) -> Idle:
    """The idle slot-seconds of a log; an empty log has none."""
    watch = _Watch()
    for event in events:
        watch(event)
    return watch.idle()


class _Watch:
    """Counts who runs and who waits while time passes."""

    def __init__(self) -> None:
        self._slots = 1
        self._now: float | None = None
        self._running = self._waiting = self._peak = 0
        self._is_rollout = True
        self._is_ended = False
        self._tail = self._elsewhere = self._rollout = self._full = 0.0
        self._tail_at_last_load = 0.0

    def __call__(self, event: Event) -> None:
        self._pass_time(event.seconds)
        if isinstance(event, HandOver | Load | Start | Harvest):
            self._is_rollout = not isinstance(event, Harvest)
        if isinstance(event, Begin):
            self._slots = event.slots
        elif isinstance(event, Load):
            self._waiting += event.trajectories
            self._tail_at_last_load = self._tail
        elif isinstance(event, Start):
            self._waiting -= 1
            self._running = event.running
            self._peak = max(self._peak, event.running)
        elif isinstance(event, Finish):
            self._running = event.running
        elif isinstance(event, Interrupt):
            self._waiting += 1
            self._running = event.running
        elif isinstance(event, Renew):
            self._waiting += 1
        elif isinstance(event, End):
            self._is_ended = True

    def idle(self) -> Idle:
        tail = self._tail_at_last_load if self._is_ended else self._tail
        return Idle(
            tail=tail,
            ending=self._tail - tail,
            elsewhere=self._elsewhere,
            rollout_seconds=self._rollout,
            full_seconds=self._full,
            peak=self._peak,
        )

    def _pass_time(self, seconds: float) -> None:
        passed = 0.0 if self._now is None else seconds - self._now
        self._now = seconds
        if not self._is_rollout:
            return
        free = self._slots - min(self._running, self._slots)
        self._rollout += passed
        self._full += 0.0 if free else passed
        if self._waiting:
            self._elsewhere += passed * free
        else:
            self._tail += passed * free
