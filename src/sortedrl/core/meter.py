"""The metrics of a run, computed from its events, one event at a time.

A meter is itself a `Record`, so a run can be measured without keeping its log.
Sums never decrease; a window (a round, the steady state, the life of a group) is the difference
between the sums at its two ends.

Bubble ratio: idle slot-seconds over all slot-seconds of the rollout phases.
Outside bubble: the part of it in which the environment of a conversation was awaited.
Idle share: the same over the whole run, including updates and weight syncs.
Throughput: decoded tokens per second of rollout. Goodput: trained tokens per second of rollout.
Ledger: decoded = trained + discarded + still cached, in every run, or it is a bug.
Steady state: from the close of the first group to the load of the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace

from sortedrl.core.events import (
    Begin,
    Event,
    Finish,
    Harvest,
    Interrupt,
    Load,
    Pause,
    Renew,
    Reply,
    Start,
    SyncWeights,
    Trained,
    Update,
)
from sortedrl.types import Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What happened to the decoded tokens."""

    decoded: int = 0
    """Written by the engine."""
    trained: int = 0
    """Part of an update."""
    discarded: int = 0
    """Discarded: redrawn, too old, or no longer what the policy writes."""
    kept: int = 0
    """Reused from the cache at a resume; a token counts once for each resume it survives."""
    prefilled_again: int = 0
    """Prompt and answer tokens prefilled to resume work."""

    @property
    def cached(self) -> int:
        """Neither trained nor discarded yet."""
        return self.decoded - self.trained - self.discarded


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The numbers of one round, one group, the steady state, or the whole run."""

    seconds: float = 0.0
    rollout_seconds: float = 0.0
    busy_slot_seconds: float = 0.0
    outside_slot_seconds: float = 0.0
    slots: int = 1
    ledger: Ledger = Ledger()
    updates: int = 0
    trajectories: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    trajectory_staleness_sum: int = 0

    @property
    def bubble(self) -> float:
        """Idle share of the slot-seconds of the rollout."""
        return _idle(self.busy_slot_seconds, self.slots * self.rollout_seconds)

    @property
    def outside_bubble(self) -> float:
        """The part of the bubble in which a conversation was outside for each idle slot."""
        return _ratio(self.outside_slot_seconds, self.slots * self.rollout_seconds)

    @property
    def idle_share(self) -> float:
        """Idle share of all slot-seconds, updates and weight syncs included."""
        return _idle(self.busy_slot_seconds, self.slots * self.seconds)

    @property
    def throughput(self) -> float:
        """Decoded tokens per second of rollout."""
        return _ratio(self.ledger.decoded, self.rollout_seconds)

    @property
    def goodput(self) -> float:
        """Trained tokens per second of rollout."""
        return _ratio(self.ledger.trained, self.rollout_seconds)

    @property
    def trained_per_second(self) -> float:
        """Trained tokens per second of the whole, updates and weight syncs included."""
        return _ratio(self.ledger.trained, self.seconds)

    @property
    def mean_length(self) -> float:
        """Mean length of the answers trained on."""
        return _ratio(self.ledger.trained, self.trajectories)

    @property
    def mean_staleness(self) -> float:
        """Mean staleness of the tokens trained on."""
        return _ratio(self.staleness_sum, self.ledger.trained)

    @property
    def mean_trajectory_staleness(self) -> float:
        """Mean over the answers trained on of the staleness of their oldest token."""
        return _ratio(self.trajectory_staleness_sum, self.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBias:
    """Lengths trained on, against the lengths the policy writes when nothing interrupts it."""

    trained_mean: float
    reference_mean: float
    ks_distance: float

    @property
    def ratio(self) -> float:
        """Mean length trained on over mean length written; 1 is no bias."""
        return _ratio(self.trained_mean, self.reference_mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFigures:
    """A group: its own answers, and the time from its load to its close."""

    group: int
    rounds: int
    figures: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Everything measured in a run."""

    schedule: str
    """The name of the schedule."""
    slots: int
    run: Figures
    steady: Figures | None
    rounds: tuple[Figures, ...]
    groups: tuple[GroupFigures, ...]
    trained_lengths: tuple[tuple[Key, int, int], ...]
    """For each answer trained on: its key, the version it was trained at, its length."""


def update_row(
    *, update: int, version: int, seconds: float, run: Figures, window: Figures
) -> dict[str, float]:
    """The metrics row of an update: totals of the run, and the figures of the update's window."""
    return {
        "update": update,
        "version": version,
        "total/seconds": seconds,
        "total/samples": run.trajectories,
        "total/trained_tokens": run.ledger.trained,
        "total/decoded_tokens": run.ledger.decoded,
        **{f"rollout/{name}": value for name, value in numbers(window).items()},
    }


def numbers(figures: Figures) -> dict[str, float]:
    """The numbers of a window as one flat row, for tables and scripts."""
    ledger = figures.ledger
    return {
        "bubble": figures.bubble,
        "outside_bubble": figures.outside_bubble,
        "idle_share": figures.idle_share,
        "goodput": figures.goodput,
        "throughput": figures.throughput,
        "trained_per_second": figures.trained_per_second,
        "mean_length": figures.mean_length,
        "decoded_tokens": ledger.decoded,
        "trained_tokens": ledger.trained,
        "discarded_tokens": ledger.discarded,
        "cached_tokens": ledger.cached,
        "kept_tokens": ledger.kept,
        "prefilled_again_tokens": ledger.prefilled_again,
        "mean_staleness": figures.mean_staleness,
        "max_staleness": figures.staleness_max,
        "mean_trajectory_staleness": figures.mean_trajectory_staleness,
        "updates": figures.updates,
        "trajectories": figures.trajectories,
        "rollout_seconds": figures.rollout_seconds,
        "seconds": figures.seconds,
    }


def length_bias(trained: Sequence[int], reference: Sequence[int]) -> LengthBias:
    """Compare two samples of lengths."""
    return LengthBias(
        trained_mean=_ratio(sum(trained), len(trained)),
        reference_mean=_ratio(sum(reference), len(reference)),
        ks_distance=ks_distance(trained, reference),
    )


def ks_distance(first: Sequence[float], second: Sequence[float]) -> float:
    """The largest gap between the two empirical distribution functions."""
    if not first or not second:
        return 0.0
    left, right = sorted(first), sorted(second)
    i = j = 0
    gap = 0.0
    while i < len(left) and j < len(right):
        value = min(left[i], right[j])
        while i < len(left) and left[i] == value:
            i += 1
        while j < len(right) and right[j] == value:
            j += 1
        gap = max(gap, abs(i / len(left) - j / len(right)))
    return gap


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _idle(busy: float, capacity: float) -> float:
    return max(0.0, 1 - busy / capacity) if capacity else 0.0


def measure(events: Iterable[Event]) -> Metrics:
    """The metrics of a whole log."""
    meter = Meter()
    for event in events:
        meter(event)
    return meter.metrics()


@dataclass(slots=True)
class _Sums:
    """Sums since the start of the run."""

    seconds: float = 0.0
    rollout_seconds: float = 0.0
    busy_slot_seconds: float = 0.0
    outside_slot_seconds: float = 0.0
    decoded: int = 0
    trained: int = 0
    discarded: int = 0
    kept: int = 0
    prefilled_again: int = 0
    updates: int = 0
    trajectories: int = 0
    staleness_sum: int = 0
    trajectory_staleness_sum: int = 0

    def since(self, start: _Sums) -> _Sums:
        pairs = zip(astuple(self), astuple(start), strict=True)
        return _Sums(*(now - before for now, before in pairs))

    def train(self, trained: Trained) -> None:
        self.trained += trained.tokens
        self.trajectories += 1
        self.staleness_sum += trained.staleness_sum
        self.trajectory_staleness_sum += trained.staleness_max

    def figures(self, *, slots: int, staleness_max: int) -> Figures:
        sums = asdict(self)
        ledger = Ledger(**{entry.name: sums.pop(entry.name) for entry in fields(Ledger)})
        return Figures(**sums, ledger=ledger, slots=slots, staleness_max=staleness_max)


@dataclass(slots=True)
class _OpenGroup:
    """A group between its load and its close: the sums of its own answers."""

    opened: _Sums
    round: int
    own: _Sums = field(default_factory=_Sums)
    staleness_max: int = 0


class Meter:
    """Measures one run."""

    def __init__(self) -> None:
        """Start with empty sums."""
        self._begin: Begin | None = None
        self._now = 0.0
        self._running = 0
        self._outside: set[Key] = set()
        self._is_rollout = True
        self._round: int | None = None
        self._sums = _Sums()
        self._round_start = _Sums()
        self._window = (_Sums(), _Sums())
        self._first_close: _Sums | None = None
        self._last_load: _Sums | None = None
        self._rounds: list[Figures] = []
        self._groups: list[GroupFigures] = []
        self._open: dict[int, _OpenGroup] = {}
        self._group_of: dict[Key, int] = {}
        self._cached_at_start: dict[Key, int] = {}
        self._update_staleness: list[int] = []
        self._lengths: list[tuple[Key, int, int]] = []

    def __call__(self, event: Event) -> None:
        """Process the next event."""
        if isinstance(event, SyncWeights):
            self._enter_round(event.round)
        self._pass_time(event)
        if isinstance(event, SyncWeights | Load | Start | Harvest):
            self._enter_round(event.round)
            self._is_rollout = not isinstance(event, Harvest)
        if isinstance(event, Start):
            self._start(event)
        elif isinstance(event, Pause | Finish | Interrupt):
            self._stop(event)
        elif isinstance(event, Reply):
            self._outside.remove((event.prompt, event.sample))
        elif isinstance(event, Renew):
            self._discard((event.prompt, event.sample), event.tokens - event.kept)
        elif isinstance(event, Load):
            self._last_load = replace(self._sums)
            self._open[event.group] = _OpenGroup(replace(self._sums), event.round)
        elif isinstance(event, Update):
            self._update(event)

    @property
    def run(self) -> Figures:
        """The numbers of the whole run so far."""
        return self._figures(_Sums(), self._sums)

    def window(self) -> Figures:
        """The numbers from the update before the last one to the last one."""
        return self._figures(*self._window)

    def metrics(self) -> Metrics:
        """The numbers so far."""
        if self._begin is None:
            raise ValueError("the log is empty; a run writes 'begin' first")
        steady, rounds = None, self._rounds
        if self._round is not None:
            rounds = [*rounds, self._figures(self._round_start, self._sums)]
        if self._first_close is not None and self._last_load is not None:
            window = self._figures(self._first_close, self._last_load)
            steady = window if window.ledger.decoded > 0 else None
        return Metrics(
            schedule=self._begin.schedule,
            slots=self._begin.slots,
            run=self._figures(_Sums(), self._sums),
            steady=steady,
            rounds=tuple(rounds),
            groups=tuple(self._groups),
            trained_lengths=tuple(self._lengths),
        )

    def _pass_time(self, event: Event) -> None:
        if self._begin is None:
            if not isinstance(event, Begin):
                raise ValueError(f"a log opens with 'begin', got {event.kind!r}")
            self._begin = event
            self._now = event.seconds
        passed = event.seconds - self._now
        self._now = event.seconds
        self._sums.seconds += passed
        if self._is_rollout:
            self._sums.rollout_seconds += passed
            slots = self._begin.slots
            busy = min(self._running, slots)
            self._sums.busy_slot_seconds += passed * busy
            self._sums.outside_slot_seconds += passed * min(len(self._outside), slots - busy)

    def _enter_round(self, number: int) -> None:
        if self._round is not None and number != self._round:
            self._rounds.append(self._figures(self._round_start, self._sums))
            self._round_start = replace(self._sums)
        self._round = number

    def _start(self, event: Start) -> None:
        key = (event.prompt, event.sample)
        if key in self._group_of:
            again = event.prompt_tokens + event.cached
            self._sums.prefilled_again += again
            self._open[event.group].own.prefilled_again += again
        self._group_of[key] = event.group
        self._cached_at_start[key] = event.cached
        self._running = event.running
        self._discard(key, event.dropped)

    def _stop(self, event: Pause | Finish | Interrupt) -> None:
        key = (event.prompt, event.sample)
        if key in self._outside:
            self._outside.remove(key)
            if isinstance(event, Interrupt):
                self._discard(key, event.tokens - event.kept)
            return
        kept = event.tokens - event.decoded
        discarded = self._cached_at_start.pop(key) - kept
        if isinstance(event, Pause):
            self._outside.add(key)
        if isinstance(event, Interrupt):
            discarded += event.tokens - event.kept
        own = self._open[self._group_of[key]].own
        own.decoded += event.decoded
        own.kept += kept
        self._sums.decoded += event.decoded
        self._sums.kept += kept
        self._discard(key, discarded)
        self._running = event.running

    def _discard(self, key: Key, tokens: int) -> None:
        if tokens:
            self._sums.discarded += tokens
            self._open[self._group_of[key]].own.discarded += tokens

    def _update(self, event: Update) -> None:
        self._sums.updates += 1
        for trained in event.trained:
            key = (trained.prompt, trained.sample)
            del self._group_of[key]
            group = self._open[trained.group]
            group.own.train(trained)
            group.staleness_max = max(group.staleness_max, trained.staleness_max)
            self._sums.train(trained)
            self._lengths.append((key, event.version, trained.tokens))
        self._update_staleness.append(max((t.staleness_max for t in event.trained), default=0))
        for number in event.closed:
            self._close(number, event.round)
        self._window = (self._window[1], replace(self._sums))

    def _close(self, number: int, round_number: int) -> None:
        assert self._begin is not None
        group = self._open.pop(number)
        window, own = self._sums.since(group.opened), group.own
        own.seconds, own.rollout_seconds = window.seconds, window.rollout_seconds
        own.busy_slot_seconds, own.updates = window.busy_slot_seconds, window.updates
        own.outside_slot_seconds = window.outside_slot_seconds
        figures = own.figures(slots=self._begin.slots, staleness_max=group.staleness_max)
        rounds = round_number - group.round + 1
        self._groups.append(GroupFigures(group=number, rounds=rounds, figures=figures))
        if self._first_close is None:
            self._first_close = replace(self._sums)

    def _figures(self, start: _Sums, end: _Sums) -> Figures:
        assert self._begin is not None
        stale = self._update_staleness[start.updates : end.updates]
        return end.since(start).figures(
            slots=self._begin.slots, staleness_max=max(stale, default=0)
        )
