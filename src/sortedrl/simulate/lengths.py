"""Answer lengths: sampled from a distribution, read from a file, or estimated from a run.

The length of an answer is a quantile of the distribution at a normal number `z`. A share of the
variance of `z` belongs to the prompt, so siblings and redraws of one prompt have similar lengths;
the rest belongs to the answer's noise stream, keyed by its seed and attempt. Observed lengths come
from a CSV or JSONL file, or from the events of a run.

`written_lengths` estimates lengths of uninterrupted answers from a run with interruptions
(Kaplan-Meier). An observation of one answer's length: it was already longer than
`entry` tokens when first seen, and it ended at `exit` tokens or was last seen there unfinished.
The share of answers longer than `t` is a product over the lengths at which answers ended,

    S(t) = product over ends e <= t of (1 - ended at e / seen at e)

where an observation is at risk at every length above its entry up to its exit. So an interrupted
answer counts as far as it was seen: neither dropped (which favours short answers) nor taken as
complete. A prompt with long answers is redrawn more often than others, and its redraws are long
too, so ends are counted among first draws while enough of these are at risk, and among all draws
beyond.
"""

from __future__ import annotations

import csv
import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Literal, NamedTuple

from sortedrl.config.checks import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    check_values,
    require,
    within,
)
from sortedrl.core.events import Event, Finish, Interrupt, Start, Update, read_events
from sortedrl.core.randomness import mix, normal
from sortedrl.errors import DataError
from sortedrl.types import Key, Trajectory

_FIELDS = ("length", "tokens", "response_length")
_MOST_TOKENS = 10**9
_SHOWN_LETTERS = 80
_TEXT = "utf-8-sig"  # with or without the byte order mark of spreadsheets


def read_lengths(path: Path) -> list[int]:
    """The lengths in the file, in its order (for events: in the order of the data set).

    CSV: a header with one of the columns length, tokens, response_length; or one bare number per
    line. JSONL: objects with such a field, or bare numbers.
    """
    try:
        if path.suffix == ".csv":
            lengths = list(_from_csv(path))
        elif path.suffix == ".jsonl":
            lengths = _from_events(path) if is_event_log(path) else list(_from_jsonl(path))
        else:
            raise DataError(path, "lengths are read from .csv and .jsonl files; rename or convert")
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(path, f"cannot be read ({reason}); check the path") from error
    except UnicodeDecodeError as error:
        raise DataError(path, "is not UTF-8 text; save it as UTF-8") from error
    except csv.Error as error:
        raise DataError(path, f"is not CSV ({error})") from error
    if not lengths:
        raise DataError(path, "has no lengths; give at least one")
    return lengths


def _from_csv(path: Path) -> Iterator[int]:
    with path.open(encoding=_TEXT, newline="") as file:
        rows = csv.reader(file)
        column: int | None = None
        for row in rows:
            if not row or not any(cell.strip() for cell in row):
                continue
            if column is None:
                is_header = not _is_number(row[0])
                column = _column(path, row, rows.line_num) if is_header else 0
                if is_header:
                    continue
            if column >= len(row):
                raise DataError(path, f"row has no column {column + 1}", line=rows.line_num)
            yield _length(path, row[column], rows.line_num)


def _from_jsonl(path: Path) -> Iterator[int]:
    with path.open(encoding=_TEXT) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(path, f"not JSON: {error}", line=number) from error
            if isinstance(row, dict):
                name = next((name for name in _FIELDS if name in row), None)
                if name is None:
                    raise DataError(path, f"no field {' or '.join(_FIELDS)}", line=number)
                row = row[name]
            yield _length(path, row, number)


def _from_events(path: Path) -> list[int]:
    finished = {(e.prompt, e.sample): e.tokens for e in read_events(path) if isinstance(e, Finish)}
    return [tokens for _, tokens in sorted(finished.items())]


def event_log(path: Path) -> Path:
    """The event log of a path; for a run folder, the log in it."""
    log = path / "events.jsonl"
    return log if log.is_file() else path


def is_event_log(path: Path) -> bool:
    """Whether this is an event log of ours, or a run folder."""
    log = event_log(path)
    if log.suffix != ".jsonl" or log.is_dir():
        return False
    with log.open(encoding=_TEXT, errors="replace") as file:
        return file.readline(64).startswith('{"event":"begin"')


def _column(path: Path, header: list[str], line: int) -> int:
    names = [cell.strip().lower() for cell in header]
    for name in _FIELDS:
        if name in names:
            return names.index(name)
    raise DataError(
        path,
        f"header must name one of {', '.join(_FIELDS)}, got {names}; commas go between columns",
        line=line,
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _length(path: Path, value: object, line: int) -> int:
    try:
        number = float(value) if isinstance(value, int | float | str) else float("nan")
    except (ValueError, OverflowError):
        number = float("nan")
    if isinstance(value, bool) or not 1 <= number <= _MOST_TOKENS or number != int(number):
        shown = (
            repr(value)
            if len(repr(value)) <= _SHOWN_LETTERS
            else f"{repr(value)[:_SHOWN_LETTERS]}..."
        )
        raise DataError(
            path,
            f"a length must be a whole number of at least 1 token, at most {_MOST_TOKENS:,}, "
            f"got {shown}",
            line=line,
        )
    return int(number)


AfterMismatch = Literal["same", "fresh"]

_NORMAL = NormalDist()
_PROMPT_KEY = 0x70726F6D7074
_FRESH_TRIES = 64
_MOST_EXPONENT = 700.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSettings:
    """How long the answers are: lognormal, unless a mixture or observed lengths are given."""

    median: PositiveFloat = 1097.0
    """Median length of the lognormal, in tokens."""
    sigma: NonNegativeFloat = 1.0
    """Standard deviation of the lognormal's logarithm."""
    components: tuple[tuple[float, float, float], ...] = ()
    """A mixture of lognormals instead: weight, median and sigma of each."""
    length_file: Path | None = None
    """Observed lengths instead: a CSV or JSONL file with a field length or tokens, or the
    events of a run."""
    values: tuple[int, ...] = ()
    """Observed lengths instead, given here."""
    replay: bool = False
    """Use observed lengths in order, one per trajectory, instead of drawing them."""
    prompt_share: Fraction = 0.0
    """Share of the variance, 0 to 1, that belongs to the prompt; the rest is redrawn with the
    answer. It determines how much redrawing shortens the answers in on_policy mode."""
    drift: Annotated[float, within(-1, 1, ends="()")] = 0.0
    """Growth of all lengths with each update: 0.001 is one tenth of a per cent."""
    prompt_tokens: NonNegativeInt = 256
    """Length of a prompt, in tokens."""
    mismatch_rate: Annotated[float, within(0, 1, ends="[)")] = 0.00077
    """Coupled mode: chance that a cached token is not kept, per token and version."""
    after_mismatch: AfterMismatch = "same"
    """Coupled mode: length of an answer after a mismatch. same: unchanged (it depends on noise and
    prompt). fresh: redrawn from the mismatch on (worst case: it shortens answers)."""

    def __post_init__(self) -> None:
        check_values(self, "lengths.")
        given = [bool(self.components), bool(self.values), self.length_file is not None]
        require(
            sum(given) <= 1,
            "lengths must have one source: give lengths.components, lengths.values or "
            f"lengths.length_file, got {sum(given)} of them",
        )
        for weight, median, sigma in self.components:
            require(
                weight > 0 and median > 0 and sigma >= 0,
                "each of lengths.components must be [weight > 0, median > 0, sigma >= 0], got "
                f"{[weight, median, sigma]}",
            )
        for value in self.values:
            require(value >= 1, f"lengths.values must be at least 1 token each, got {value}")
        require(
            not self.replay or bool(self.values) or self.length_file is not None,
            "lengths.replay needs observed lengths; give lengths.values or lengths.length_file",
        )


class Divergence(NamedTuple):
    """Where an answer last diverged from its cached tokens: the version, and the tokens kept."""

    version: int
    kept: int


Quantile = Callable[[float], float]
"""A length distribution: the length at the quantile of a standard normal number."""


class Lengths:
    """Draws the length of every answer of a run; the same key gives the same length."""

    def __init__(
        self, settings: LengthSettings, *, seed: int, max_tokens: int, samples_per_prompt: int
    ) -> None:
        """Read the length file, if there is one."""
        self.settings = settings
        self._seed = seed
        self.max_tokens = max_tokens
        self._samples_per_prompt = samples_per_prompt
        self._observed: tuple[int, ...] = settings.values
        if settings.length_file is not None:
            self._observed = tuple(read_lengths(settings.length_file))
        self._quantile = _quantile(settings, self._observed)
        self._prompt_weight = math.sqrt(settings.prompt_share)
        self._answer_weight = math.sqrt(1 - settings.prompt_share)

    def length(
        self, trajectory: Trajectory, *, version: int, divergence: Divergence | None = None
    ) -> int:
        """Tokens of the answer if these weights write it to the end."""
        if divergence is None:
            return self._first_length(trajectory, version)
        if self.settings.after_mismatch == "same":
            return max(divergence.kept + 1, self._first_length(trajectory, version))
        for number in range(_FRESH_TRIES):
            key = mix(trajectory.attempt, divergence.version, number + 1)
            drawn = self._drawn(trajectory, version, key)
            if drawn > divergence.kept:
                return drawn
        return divergence.kept + 1

    def _first_length(self, trajectory: Trajectory, version: int) -> int:
        if self.settings.replay and trajectory.attempt == 0:
            place = trajectory.prompt.id * self._samples_per_prompt + trajectory.sample_index
            return self._limited(self._observed[place % len(self._observed)], version)
        return self._drawn(trajectory, version, trajectory.attempt)

    def _drawn(self, trajectory: Trajectory, version: int, attempt: int) -> int:
        z = self._answer_weight * normal(trajectory.seed, attempt)
        if self._prompt_weight:
            z += self._prompt_weight * normal(self._seed, _PROMPT_KEY, trajectory.prompt.id)
        return self._limited(self._quantile(z), version)

    def _limited(self, length: float, version: int) -> int:
        if self.settings.drift:
            try:
                length *= (1 + self.settings.drift) ** version
            except OverflowError:
                return self.max_tokens
        return max(1, round(min(self.max_tokens, length)))


def _quantile(settings: LengthSettings, observed: tuple[int, ...]) -> Quantile:
    if observed:
        lengths = sorted(observed)
        last = len(lengths) - 1
        return lambda z: lengths[min(int(_NORMAL.cdf(z) * len(lengths)), last)]
    if settings.components:
        return _Mixture(settings.components)
    log_median, sigma = math.log(settings.median), settings.sigma
    return lambda z: math.exp(min(log_median + sigma * z, _MOST_EXPONENT))


class _Mixture:
    """Several lognormals, tabulated once: the logarithm of the length over `z`."""

    _LIMIT = 6.0
    _POINTS = 1201

    def __init__(self, components: tuple[tuple[float, float, float], ...]) -> None:
        total = sum(weight for weight, _, _ in components)
        self._parts = [(w / total, math.log(m), max(s, 1e-9)) for w, m, s in components]
        step = 2 * self._LIMIT / (self._POINTS - 1)
        self._z = [-self._LIMIT + step * i for i in range(self._POINTS)]
        self._log_length = [self._solve(_NORMAL.cdf(z)) for z in self._z]

    def __call__(self, z: float, /) -> float:
        right = min(max(bisect_right(self._z, z), 1), self._POINTS - 1)
        left = right - 1
        share = (z - self._z[left]) / (self._z[right] - self._z[left])
        share = min(max(share, 0.0), 1.0)
        low, high = self._log_length[left], self._log_length[right]
        return math.exp(min(low + share * (high - low), _MOST_EXPONENT))

    def _solve(self, share: float) -> float:
        low = min(log_median - 8 * sigma for _, log_median, sigma in self._parts)
        high = max(log_median + 8 * sigma for _, log_median, sigma in self._parts)
        for _ in range(60):
            middle = (low + high) / 2
            below = sum(w * _NORMAL.cdf((middle - m) / s) for w, m, s in self._parts)
            low, high = (middle, high) if below < share else (low, middle)
        return (low + high) / 2


_ENOUGH = 20


class LengthObservation(NamedTuple):
    """What a run shows of one sample of an answer, in tokens."""

    entry: int
    exit: int
    is_finished: bool
    is_first: bool = True
    """Whether it is the first sample of its trajectory, not a resampled one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """A distribution of lengths, as a stepwise survival curve."""

    survival: tuple[tuple[int, float], ...]
    """Lengths at which answers end, ascending, each with the share of longer answers. The last
    share is 0."""

    @property
    def mean(self) -> float:
        """The mean length."""
        mean, before = 0.0, 1.0
        for length, longer in self.survival:
            mean += length * (before - longer)
            before = longer
        return mean

    def longer_than(self, length: int) -> float:
        """Share of the answers that are longer than this."""
        place = bisect_right(self.survival, length, key=itemgetter(0))
        return self.survival[place - 1][1] if place else 1.0

    def quantile(self, share: float) -> int:
        """The shortest length that at least this share of the answers, 0 to 1, does not exceed."""
        # Allow for rounding that puts a step just above the share.
        place = bisect_right(self.survival, share - 1e-12, key=lambda step: 1 - step[1])
        return self.survival[min(place, len(self.survival) - 1)][0]

    def sample_lengths(self, count: int) -> tuple[int, ...]:
        """That many lengths, shortest first, evenly spread over the distribution."""
        return tuple(self.quantile((place + 0.5) / count) for place in range(count))


def length_observations(events: Iterable[Event]) -> Iterator[LengthObservation]:
    """One observation for each sample of an answer: its last exit, and whether it was complete.

    An answer that is resumed, or verified again after it was complete, is still one sample; only
    resampling with new noise starts another.
    """
    attempts: dict[Key, int] = {}
    last: dict[Key, LengthObservation] = {}
    for event in events:
        if isinstance(event, Start):
            key = (event.prompt, event.sample)
            if key in last and attempts[key] != event.attempt:
                yield last.pop(key)
            attempts[key] = event.attempt
        elif isinstance(event, Finish | Interrupt):
            key = (event.prompt, event.sample)
            is_finished, is_first = isinstance(event, Finish), attempts[key] == 0
            last[key] = LengthObservation(0, event.tokens, is_finished, is_first)
        elif isinstance(event, Update):
            for trained in event.trained:
                key = (trained.prompt, trained.sample)
                del attempts[key]
                yield last.pop(key)
    yield from last.values()


def written_lengths(observations: Iterable[LengthObservation]) -> Survival:
    """The distribution of complete lengths; unfinished tails end at the longest exit.

    Observations without tokens are ignored. Raises `ValueError` if none is left.
    """
    seen = [one for one in observations if one.exit > one.entry]
    if not seen:
        raise ValueError("lengths are estimated from at least one observation, got none")
    first = _RiskSet(one for one in seen if one.is_first)
    every = _RiskSet(seen)
    steps: list[tuple[int, float]] = []
    share = 1.0
    for length in sorted(every.moves):
        ending = (first if first.seen >= _ENOUGH else every).ending(length)
        if ending:
            share *= 1 - ending
            steps.append((length, share))
        if not share:
            break
        first.pass_by(length)
        every.pass_by(length)
    if share > 0:
        last = max(one.exit for one in seen)
        steps = [*(step for step in steps if step[0] < last), (last, 0.0)]
    return Survival(survival=tuple(steps))


class _RiskSet:
    """Counts, in order of length, the observations at risk and those that end."""

    def __init__(self, observations: Iterable[LengthObservation]) -> None:
        self.moves: Counter[int] = Counter()
        self._ends: Counter[int] = Counter()
        for one in observations:
            self.moves[one.entry] += 1
            self.moves[one.exit] -= 1
            self._ends[one.exit] += one.is_finished
        self.seen = 0

    def ending(self, length: int) -> float:
        """Share of those at risk that end here."""
        return self._ends[length] / self.seen if self.seen else 0.0

    def pass_by(self, length: int) -> None:
        """Add the observations that enter at this length, and remove those that leave."""
        self.seen += self.moves[length]
