"""The run's record: one JSON line per thing that happened.

A log opens with `begin`, closes with `end`, and between them repeats, round by round:
`hand_over` (when the weights are new), `renew`, then `load`, `start` and `finish` as the rollout
goes, `harvest`, `interrupt` for what was still running, `score` (where rewards are given) and
`update`.
Where updates run beside the rollout, an `update` begins with the next round, and its `landed`
comes before the next `update`.
The rollout of a round lasts from its `hand_over` (or `begin`, or its first `load` or `start` where
the weights stayed) to its `harvest`. Every number we report is a function of this log (see
`metrics`).

A run that was killed and taken up again is one run with one log: `resume` stands after the
`update` (or `landed`) of its checkpoint, where nothing runs, and counts and seconds go on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, get_args, get_origin, get_type_hints

from sortedrl.errors import DataError, unknown_name
from sortedrl.line_file import LineFile, read_lines
from sortedrl.types import FinishReason, Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The run of a schedule starts. `slots` is what the bubble ratio is measured against."""

    kind: ClassVar = "begin"
    seconds: float
    schedule: str
    slots: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The run goes on from a checkpoint made in `round`, with the weights of `version`."""

    kind: ClassVar = "resume"
    seconds: float
    round: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """The engine has new weights; it took `took_seconds`."""

    kind: ClassVar = "hand_over"
    seconds: float
    round: int
    version: int
    took_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """A complete answer that waited through an update goes back, `kept` of its tokens with it."""

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
    """A trajectory went to the engine with `cached` tokens, after `dropped` too old ones."""

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
class Finish:
    """An answer is complete. `engine_*` count what the engine did since the run began."""

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
    """A trajectory was stopped at `tokens` tokens and went back with `kept` of them."""

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
    """The last update is done, after `took_seconds`; the weights are those of `version` now.

    `beside_seconds` of them passed while the rollout went on; the rest was waited for until now.
    """

    kind: ClassVar = "landed"
    seconds: float
    round: int
    version: int
    took_seconds: float
    beside_seconds: float

    @property
    def waited_seconds(self) -> float:
        """How long everything else stood still for the update."""
        return self.took_seconds - self.beside_seconds


class Scored(NamedTuple):
    """The reward of one answer: `start` and `took_seconds` where the scorer took the time.

    `reward` is `None` where scoring failed and the answer is left without one.
    """

    prompt: int
    sample: int
    reward: float | None
    worker: int | None
    start: float | None
    took_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The answers of the next update have their rewards, `waited_seconds` after they were asked."""

    kind: ClassVar = "score"
    seconds: float
    round: int
    waited_seconds: float
    scored: tuple[Scored, ...]


class Trained(NamedTuple):
    """One trajectory of an update, with the staleness of its tokens summed and at its most."""

    prompt: int
    sample: int
    group: int
    tokens: int
    staleness_sum: int
    staleness_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The weights of `version` were trained on these; groups listed in `closed` are done.

    An update that was skipped leaves the weights, and the next one has the same version.
    One that runs beside the rollout is only about to begin, and `took_seconds` are those before it.
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
    """The prompts are used up and everything is trained."""

    kind: ClassVar = "end"
    seconds: float
    rounds: int
    trained: int


Event = (
    Begin
    | Resume
    | HandOver
    | Renew
    | Load
    | Start
    | Finish
    | Harvest
    | Interrupt
    | Landed
    | Score
    | Update
    | End
)  # the order of a round
Record = Callable[[Event], None]

_KINDS: dict[str, type[Event]] = {event.kind: event for event in get_args(Event)}
_NAMES = {kind: tuple(f.name for f in fields(event)) for kind, event in _KINDS.items()}
_VALUES = {kind: attrgetter(*names) for kind, names in _NAMES.items()}
_ACCEPTED: dict[object, tuple[type, ...]] = {
    float: (float, int),
    float | None: (float, int, type(None)),
    int | None: (int, type(None)),
    FinishReason: (str,),
}
_TYPES = {
    kind: {
        name: _ACCEPTED.get(hint, (get_origin(hint) or hint,))
        for name, hint in get_type_hints(event).items()
    }
    for kind, event in {**_KINDS, "scored": Scored, "trained": Trained}.items()
}


def to_json(event: Event) -> str:
    """The event as one line, without its newline."""
    kind = event.kind
    values = dict(zip(_NAMES[kind], _VALUES[kind](event), strict=True))
    return json.dumps({"event": kind} | values, separators=(",", ":"))


def from_json(line: str) -> Event:
    """The event a line holds; `ValueError` says why it holds none."""
    row = _DECODER.decode(line)
    if not isinstance(row, dict) or "event" not in row:
        raise ValueError("expected a JSON object with a field 'event'")
    kind = row.pop("event")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(unknown_name("event", str(kind), _KINDS))
    if set(row) != set(_NAMES[kind]):
        raise ValueError(f"event {kind!r} must have the fields {', '.join(_NAMES[kind])}")
    if kind == "score":
        row["scored"] = tuple(Scored(*entry) for entry in row["scored"])
        for scored in row["scored"]:
            _check_types("scored", scored._asdict())
    elif kind == "update":
        row["trained"] = tuple(Trained(*entry) for entry in row["trained"])
        row["closed"] = tuple(row["closed"])
        for trained in row["trained"]:
            _check_types("trained", trained._asdict())
        if not all(type(group) is int for group in row["closed"]):
            raise ValueError(f"closed groups must be whole numbers, got {list(row['closed'])}")
    _check_types(kind, row)
    if kind == "finish" and row["reason"] not in get_args(FinishReason):
        raise ValueError(unknown_name("reason", row["reason"], get_args(FinishReason)))
    return _KINDS[kind](**row)


def _check_types(kind: str, row: Mapping[str, Any]) -> None:
    """Refuse a value that is not of its field's type: whoever reads the log relies on them."""
    types = _TYPES[kind]
    for name, value in row.items():
        # exact types, because a boolean is an int too
        if type(value) not in types[name]:
            raise ValueError(f"{kind}.{name} has a value of another type, {value!r:.80}")
        if isinstance(value, float) and not -_LARGEST <= value <= _LARGEST:
            raise ValueError(f"{kind}.{name} must be finite, up to {_LARGEST:.0e}, got {value}")
        if isinstance(value, int) and name != "seed" and not 0 <= value <= _LARGEST:
            raise ValueError(f"{kind}.{name} must lie in 0..{_LARGEST:.0e}, got another number")
    if kind == "begin" and not 1 <= row["slots"] <= _MOST_SLOTS:
        raise ValueError(f"begin.slots must lie in 1..{_MOST_SLOTS:,}, got {row['slots']}")


class _Course:
    """What a log has said so far; refuses an event that cannot follow."""

    def __init__(self) -> None:
        self._has_begun = False
        self._round = 0
        self._rounds: set[int] = set()
        self._open: set[int] = set()
        self._started: dict[Key, int] = {}
        self._running: set[Key] = set()

    def __call__(self, event: Event) -> None:
        """Take in the next event; `ValueError` says why it cannot be the next."""
        if isinstance(event, Begin) == self._has_begun:
            raise ValueError(f"a log opens with 'begin', once, got {event.kind!r}")
        self._has_begun = True
        if isinstance(event, HandOver | Load | Start | Harvest):
            self._require(event.round >= self._round, event, f"round {self._round} has begun")
            self._round = event.round
            self._rounds.add(event.round)
        if isinstance(event, Load):
            self._open.add(event.group)
        elif isinstance(event, Start):
            key = (event.prompt, event.sample)
            self._require(event.group in self._open, event, f"group {event.group} is not open")
            self._started[key] = event.group
            self._running.add(key)
        elif isinstance(event, Finish | Interrupt):
            key = (event.prompt, event.sample)
            self._require(key in self._running, event, f"{key} is not being written")
            self._running.discard(key)
        elif isinstance(event, Renew):
            key = (event.prompt, event.sample)
            self._require(key in self._started, event, f"{key} was not started")
        elif isinstance(event, Update):
            self._update(event)

    def _update(self, event: Update) -> None:
        has_begun = event.round in self._rounds or not event.closed
        self._require(has_begun, event, f"round {event.round} has not begun")
        for trained in event.trained:
            key = (trained.prompt, trained.sample)
            is_written = self._started.pop(key, None) == trained.group and key not in self._running
            self._require(is_written, event, f"{key} was not written")
            self._require(trained.group in self._open, event, f"group {trained.group} is not open")
        for group in event.closed:
            self._require(group in self._open, event, f"group {group} is not open")
            self._open.discard(group)

    @staticmethod
    def _require(holds: bool, event: Event, reason: str) -> None:
        if not holds:
            raise ValueError(
                f"{event.kind!r} cannot follow what stands before it: {reason}; lines are missing, "
                "or of another run"
            )


def _no_constant(name: str) -> None:
    raise ValueError(f"must be finite numbers, got {name}")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_LARGEST = 10**15
_MOST_SLOTS = 1_000_000


class EventFile:
    """Appends events to a JSONL file as they happen."""

    def __init__(
        self, path: Path, *, keep_bytes: int | None = None, is_watched: bool = False
    ) -> None:
        """Create the file in place of an older one; or keep its first bytes and go on there.

        Others can read everything up to the last update; of a watched file, every event at once.
        """
        self._file = LineFile(path, keep_bytes=keep_bytes)
        self._is_watched = is_watched

    def __call__(self, event: Event) -> None:
        """Append one event."""
        self._file.write(to_json(event))
        if self._is_watched or event.kind in ("update", "landed", "end"):
            self._file.flush()

    def sync(self) -> int:
        """Push everything so far to the disk, and give the length of the file in bytes."""
        return self._file.sync()

    def close(self) -> None:
        """Write out what is left."""
        self._file.close()


def read_events(path: Path) -> Iterator[Event]:
    """The events of a log.

    A last line without its newline is a run that was killed or is still writing: it is left out.
    Each event can follow those before it: nothing ends that did not start.
    """
    course = _Course()
    for number, line in read_lines(path):
        try:
            event = from_json(line)
            course(event)
        except (ValueError, TypeError, RecursionError) as error:
            raise DataError(path, str(error), line=number) from error
        yield event
