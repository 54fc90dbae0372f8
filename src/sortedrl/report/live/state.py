"""Folds a run's events and rows into what a frame shows, one at a time.

It knows what the meter does not: who sits in which slot, how much is ready, how far the groups
are. The numbers themselves stay the meter's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sortedrl.events import Event, Finish, HandOver, Harvest, Interrupt, Load, Renew, Start, Update
from sortedrl.metrics import Figures
from sortedrl.report.live.history import History
from sortedrl.report.live.memory import Memory
from sortedrl.report.live.slots import Slots
from sortedrl.run_log import Value

COURSES = {
    "reward": "reward/mean",
    "length": "length/mean",
    "bubble": "rollout/bubble",
    "goodput": "rollout/goodput",
    "staleness": "rollout/mean_staleness",
    "score": "evaluation/score",
}
"""The numbers that are drawn over the run, and their names in a row of metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A number over the run so far, and the last it was."""

    values: tuple[float, ...]
    last: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroup:
    """How far the oldest open group is, and how many younger ones are open beside it."""

    number: int
    trained: int
    total: int
    num_younger: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Everything that one frame shows. Of a run that is still being loaded, little is known."""

    activity: str = ""
    """What goes on, in words."""
    done: float = 0.0
    """The share of the run that is behind."""
    seconds: float = 0.0
    schedule: str = ""
    updates: int = 0
    skipped: int = 0
    round: int = 0
    is_rollout: bool = False
    running: int = 0
    shares: tuple[float | None, ...] = ()
    """For each slot how much of a long answer is written, from 0 to 1; `None` where it is idle."""
    ready: int = 0
    update_batch: int = 0
    group: OpenGroup | None = None
    figures: Figures | None = None
    courses: Mapping[str, Course] = field(default_factory=dict)
    memory: Memory | None = None


@dataclass(slots=True)
class _Group:
    total: int
    trained: int = 0


class LiveState:
    """What a run looks like now."""

    def __init__(
        self,
        *,
        schedule: str,
        slots: int,
        update_batch: int,
        max_tokens: int,
        decoded: Callable[[], int],
    ) -> None:
        """A run that has not begun; `decoded` gives all tokens its engine has written so far."""
        self._schedule = schedule
        self._slots = Slots(slots, decoded=decoded)
        self._update_batch = update_batch
        self._max_tokens = max_tokens
        self._longest = 0
        self._updates = self._skipped = self._round = self._ready = 0
        self._is_rollout = False
        self._groups: dict[int, _Group] = {}
        self._histories = {name: History() for name in COURSES}

    @property
    def running(self) -> int:
        """Answers being written."""
        return self._slots.running

    @property
    def ready(self) -> int:
        """Answers complete and not trained on yet."""
        return self._ready

    def __call__(self, event: Event) -> None:
        """Take in the next event."""
        if isinstance(event, HandOver | Load | Start | Harvest):
            self._round = event.round
            self._is_rollout = not isinstance(event, Harvest)
        if isinstance(event, Start):
            self._slots.start((event.prompt, event.sample), cached=event.cached)
        elif isinstance(event, Finish):
            self._slots.stop((event.prompt, event.sample))
            self._longest = max(self._longest, event.tokens)
            self._ready += 1
        elif isinstance(event, Interrupt):
            self._slots.stop((event.prompt, event.sample))
        elif isinstance(event, Renew):
            self._ready -= 1
        elif isinstance(event, Load):
            self._groups[event.group] = _Group(event.trajectories)
        elif isinstance(event, Update):
            self._update(event)

    def updated(self, row: Mapping[str, Value]) -> None:
        """Take in a row of metrics, of an update or of an evaluation."""
        for name, key in COURSES.items():
            value = row.get(key)
            if isinstance(value, int | float):
                self._histories[name].add(value)
        if row.get("skipped_steps"):
            self._skipped += 1

    def moment(
        self,
        *,
        activity: str,
        done: float,
        seconds: float,
        figures: Figures | None,
        memory: Memory | None,
    ) -> Moment:
        """What there is to see now, with what others know."""
        return Moment(
            activity=activity,
            done=done,
            seconds=seconds,
            schedule=self._schedule,
            updates=self._updates,
            skipped=self._skipped,
            round=self._round,
            is_rollout=self._is_rollout,
            running=self._slots.seated,
            shares=self._shares(),
            ready=self._ready,
            update_batch=self._update_batch,
            group=self._oldest(),
            figures=figures,
            courses={
                name: Course(values=history.values(), last=history.last)
                for name, history in self._histories.items()
                if history.last is not None
            },
            memory=memory,
        )

    def _shares(self) -> tuple[float | None, ...]:
        """Against the longest answer there was; before there was one, against the limit."""
        tokens = self._slots.tokens()
        written = max((count for count in tokens if count is not None), default=0.0)
        scale = max(self._longest or self._max_tokens, written, 1)
        return tuple([None if count is None else max(0.0, count / scale) for count in tokens])

    def _update(self, event: Update) -> None:
        self._updates += 1
        self._ready -= len(event.trained)
        for trained in event.trained:
            self._groups[trained.group].trained += 1
        for number in event.closed:
            del self._groups[number]

    def _oldest(self) -> OpenGroup | None:
        if not self._groups:
            return None
        number = min(self._groups)
        group = self._groups[number]
        return OpenGroup(
            number=number,
            trained=group.trained,
            total=group.total,
            num_younger=len(self._groups) - 1,
        )
