"""The event log of a run: one JSON line per event.

A log starts with `begin`, ends with `end`, and between them repeats, round by round:
`hand_over` (if the weights are new), `renew`, then `load`, `start` and `finish` during the rollout
(for conversations also `pause` and `reply`), `harvest`, `interrupt` for every trajectory still
running, `score` (if there are rewards) and `update`.
If updates overlap the rollout, an `update` starts with the next round, and its `landed` precedes
the next `update`.
The rollout of a round lasts from its `hand_over` (or `begin`, or its first `load` or `start` if the
weights are unchanged) to its `harvest`. Every reported metric is a function of this log (see
`metrics`).

A killed and resumed run has a single log: `resume` follows the `update` (or `landed`) of its
checkpoint, while nothing is running, and counts and seconds continue.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar, get_args, get_type_hints

from sortedrl.core.files import LineFile, read_lines
from sortedrl.errors import DataError, unknown_name
from sortedrl.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The run starts. `slots` is the denominator of the bubble ratio."""

    kind: ClassVar = "begin"
    seconds: float
    schedule: str
    slots: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The run resumes from a checkpoint of `round`, with the weights of `version`."""

    kind: ClassVar = "resume"
    seconds: float
    round: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncWeights:
    """Weight sync: the engine has the weights of `version`, after `took_seconds`."""

    kind: ClassVar = "hand_over"
    seconds: float
    round: int
    version: int
    took_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """A complete answer that waited through an update is put back, with `kept` of its tokens."""

    kind: ClassVar = "renew"
    seconds: float
    prompt: int
    sample: int
    tokens: int
    kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A group of prompts was loaded."""

    kind: ClassVar = "load"
    seconds: float
    round: int
    group: int
    prompts: int
    trajectories: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A trajectory was submitted with `cached` tokens, after `dropped` stale ones were removed."""

    kind: ClassVar = "start"
    seconds: float
    round: int
    prompt: int
    sample: int
    group: int
    attempt: int
    prompt_tokens: int
    cached: int
    dropped: int
    running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A turn is complete: the conversation left its slot and waits for its environment."""

    kind: ClassVar = "pause"
    seconds: float
    prompt: int
    sample: int
    tokens: int
    decoded: int
    running: int
    outside: int
    engine_decoded: int
    engine_prefilled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The environment replied with `given` tokens; the conversation waits for a slot again."""

    kind: ClassVar = "reply"
    seconds: float
    prompt: int
    sample: int
    given: int
    outside: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """An answer is complete. `engine_*` are counters of the engine since the start of the run."""

    kind: ClassVar = "finish"
    seconds: float
    prompt: int
    sample: int
    tokens: int
    decoded: int
    reason: FinishReason
    running: int
    engine_decoded: int
    engine_prefilled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Harvest:
    """The rollout of a round was stopped, with `ready` answers to train on."""

    kind: ClassVar = "harvest"
    seconds: float
    round: int
    ready: int
    waiting: int
    running: int
    engine_decoded: int
    engine_prefilled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt:
    """A trajectory was stopped at `tokens` tokens and put back with `kept` of them."""

    kind: ClassVar = "interrupt"
    seconds: float
    prompt: int
    sample: int
    tokens: int
    decoded: int
    kept: int
    running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """The last update is complete, after `took_seconds`; the weights now have `version`.

    It overlapped the rollout for `beside_seconds`; for the rest, the run waited.
    """

    kind: ClassVar = "landed"
    seconds: float
    round: int
    version: int
    took_seconds: float
    beside_seconds: float

    @property
    def waited_seconds(self) -> float:
        """How long the run waited for the update."""
        return self.took_seconds - self.beside_seconds


class Scored(NamedTuple):
    """The reward of one answer; `start` and `took_seconds` if the scorer measured them.

    `reward` is `None` if scoring failed and the answer gets none.
    """

    prompt: int
    sample: int
    reward: float | None
    worker: int | None
    start: float | None
    took_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The answers of the next update are scored, after waiting for `waited_seconds`."""

    kind: ClassVar = "score"
    seconds: float
    round: int
    waited_seconds: float
    scored: tuple[Scored, ...]


class Trained(NamedTuple):
    """One trajectory of an update, with the sum and the maximum of the staleness of its tokens."""

    prompt: int
    sample: int
    group: int
    tokens: int
    staleness_sum: int
    staleness_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The weights of `version` were trained on these; the groups in `closed` are complete.

    A skipped update keeps the weights, and the next one has the same version.
    An update that overlaps the rollout only starts here; `took_seconds` is the time before it.
    """

    kind: ClassVar = "update"
    seconds: float
    round: int
    version: int
    took_seconds: float
    trained: tuple[Trained, ...]
    closed: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """All prompts are trained."""

    kind: ClassVar = "end"
    seconds: float
    rounds: int
    trained: int


Event = (
    Begin
    | Resume
    | SyncWeights
    | Renew
    | Load
    | Start
    | Pause
    | Reply
    | Finish
    | Harvest
    | Interrupt
    | Landed
    | Score
    | Update
    | End
)  # in the order of a round
Record = Callable[[Event], None]

_KINDS: dict[str, type[Event]] = {event.kind: event for event in get_args(Event)}
_NAMES = {kind: tuple(f.name for f in fields(event)) for kind, event in _KINDS.items()}
_VALUES = {kind: attrgetter(*names) for kind, names in _NAMES.items()}
_MOST = 2**63
_MOST_SLOTS = 2**20


def _checks(event: type) -> list[tuple[str, frozenset[type]]]:
    """The fields of an event, or of an entry of one, with the types that they may have in JSON."""
    accepted: dict[object, set[type]] = {
        int: {int},
        float: {int, float},
        str: {str},
        FinishReason: {str},
        int | None: {int, type(None)},
        float | None: {int, float, type(None)},
    }
    hints = get_type_hints(event)
    return [(n, frozenset(accepted[h])) for n, h in hints.items() if h in accepted]


_CHECKS = {kind: _checks(event) for kind, event in _KINDS.items()}
_SCORED_CHECKS, _TRAINED_CHECKS = _checks(Scored), _checks(Trained)


def to_json(event: Event) -> str:
    """The event as one line of JSON, without newline."""
    kind = event.kind
    values = dict(zip(_NAMES[kind], _VALUES[kind](event), strict=True))
    return json.dumps({"event": kind} | values, separators=(",", ":"))


def from_json(line: str) -> Event:
    """Parse a line; `ValueError` if it is not a valid event."""
    try:
        row = json.loads(line)
    except RecursionError as error:
        raise ValueError("must not be nested this deeply") from error
    if not isinstance(row, dict) or "event" not in row:
        raise ValueError("expected a JSON object with a field 'event'")
    kind = row.pop("event")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(unknown_name("event", str(kind), _KINDS))
    if set(row) != set(_NAMES[kind]):
        raise ValueError(f"event {kind!r} must have the fields {', '.join(_NAMES[kind])}")
    _check(row, _CHECKS[kind])
    if kind == "score":
        row["scored"] = tuple(_entry(Scored, entry, _SCORED_CHECKS) for entry in row["scored"])
    elif kind == "update":
        row["trained"] = tuple(_entry(Trained, entry, _TRAINED_CHECKS) for entry in row["trained"])
        row["closed"] = tuple(row["closed"])
        if any(type(group) is not int for group in row["closed"]):
            raise ValueError(f"field 'closed' must hold group numbers, got {row['closed']!r}")
    elif kind == "finish" and row["reason"] not in get_args(FinishReason):
        raise ValueError(unknown_name("reason", row["reason"], get_args(FinishReason)))
    return _KINDS[kind](**row)


def _check(row: Mapping[str, object], checks: Sequence[tuple[str, frozenset[type]]]) -> None:
    for name, types in checks:
        value = row[name]
        most = math.inf if name == "reward" else _MOST
        least = -1 if type(value) is int and name not in ("seed", "reward") else -most
        if type(value) not in types or (
            isinstance(value, int | float) and not least < value < most
        ):
            kinds = " or ".join(sorted(kind.__name__ for kind in types))
            raise ValueError(
                f"field {name!r} must be a finite value of type {kinds}, got {value!r:.80}"
            )


_Entry = TypeVar("_Entry", Scored, Trained)


def _entry(
    kind: type[_Entry], values: object, checks: Sequence[tuple[str, frozenset[type]]]
) -> _Entry:
    if not isinstance(values, list) or len(values) != len(checks):
        names = ", ".join(name for name, _ in checks)
        raise ValueError(f"an entry must be a list of {names}, got {values!r:.80}")
    _check(dict(zip((name for name, _ in checks), values, strict=True)), checks)
    return kind(*values)


class Order:
    """Checks that each event may follow the previous ones."""

    def __init__(self) -> None:
        """Start before the first event."""
        self._seconds: float | None = None
        self._round = 0
        self._rounds: set[int] = set()
        self._groups: set[int] = set()
        self._group_of: dict[tuple[int, int], int] = {}
        self._running: set[tuple[int, int]] = set()
        self._outside: set[tuple[int, int]] = set()

    def __call__(self, event: Event) -> None:
        """Check the next event; `ValueError` if it cannot come next."""
        if (self._seconds is None) != isinstance(event, Begin):
            raise ValueError(f"a log must start with 'begin', once, got {event.kind!r} here")
        if self._seconds is not None and event.seconds < self._seconds:
            raise ValueError(
                f"time must not go backwards, got {self._seconds} s, then {event.seconds} s"
            )
        self._seconds = event.seconds
        if isinstance(event, Begin) and not 1 <= event.slots <= _MOST_SLOTS:
            raise ValueError(f"'begin' must have 1..{_MOST_SLOTS} slots, got {event.slots}")
        if isinstance(event, SyncWeights | Load | Start | Harvest):
            self._refuse(event.round < self._round, event)
            self._round = event.round
            self._rounds.add(event.round)
        self._follow(event)

    def _follow(self, event: Event) -> None:
        if isinstance(event, Load):
            self._refuse(event.group in self._groups, event)
            self._groups.add(event.group)
        elif isinstance(event, Start):
            self._start(event)
        elif isinstance(event, Pause | Reply | Finish | Interrupt):
            self._move(event)
        elif isinstance(event, Renew):
            self._refuse((event.prompt, event.sample) not in self._group_of, event)
        elif isinstance(event, Update):
            self._update(event)

    def _move(self, event: Pause | Reply | Finish | Interrupt) -> None:
        key = (event.prompt, event.sample)
        may_be_outside = not isinstance(event, Pause)
        is_outside = may_be_outside and key in self._outside
        may_be_running = not isinstance(event, Reply)
        self._refuse(not is_outside and not (may_be_running and key in self._running), event)
        (self._outside if is_outside else self._running).remove(key)
        if isinstance(event, Pause):
            self._outside.add(key)

    def _start(self, event: Start) -> None:
        key = (event.prompt, event.sample)
        is_active = key in self._running or key in self._outside
        is_begun = is_active or self._group_of.get(key, event.group) != event.group
        self._refuse(is_begun or event.group not in self._groups, event)
        self._group_of[key] = event.group
        self._running.add(key)

    def _update(self, event: Update) -> None:
        self._refuse(event.round not in self._rounds and bool(event.closed), event)
        for entry in event.trained:
            key = (entry.prompt, entry.sample)
            self._refuse(self._group_of.pop(key, None) != entry.group, event)
            is_active = key in self._running or key in self._outside
            self._refuse(entry.group not in self._groups or is_active, event)
        for group in event.closed:
            self._refuse(group not in self._groups, event)
            self._groups.remove(group)

    def _refuse(self, is_wrong: bool, event: Event) -> None:
        if is_wrong:
            raise ValueError(
                f"event {event.kind!r} cannot follow the events before it; lines are missing, "
                "duplicated or changed"
            )


class EventFile(LineFile):
    """Appends events to a JSONL file as they happen."""

    def __init__(
        self, path: Path, *, keep_bytes: int | None = None, is_watched: bool = False
    ) -> None:
        """Create the file, replacing an existing one; or keep its first bytes and append.

        Readers see everything up to the last update; if watched, every event at once.
        """
        super().__init__(path, keep_bytes=keep_bytes)
        self._is_watched = is_watched

    def __call__(self, event: Event) -> None:
        """Append one event."""
        self.write(to_json(event))
        if self._is_watched or event.kind in ("update", "landed", "end"):
            self.flush()


def read_events(path: Path) -> Iterator[Event]:
    """The events of a log; `DataError` at the first that cannot follow the previous ones.

    A last line without newline (the run was killed or is still writing) is skipped.
    """
    check = Order()
    for number, line in read_lines(path):
        try:
            event = from_json(line)
            check(event)
        except (ValueError, TypeError) as error:
            raise DataError(path, str(error), line=number) from error
        yield event
