"""Fit the cost constants to the events of a real run, to simulate the user's own machine.

Between two events the set of running answers is constant: the engine makes `k` steps with `r`
running and initially `c` cached tokens, which take

    k * step + k*r * sequence + (k*c + r*k*(k-1)/2) * cached_token + prefilled * prefill_token

This is linear in the four unknowns, and a run has one such equation per finished answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import mul

from sortedrl.core.events import (
    Event,
    Finish,
    Harvest,
    Interrupt,
    Landed,
    Start,
    SyncWeights,
    Update,
)
from sortedrl.errors import DataError
from sortedrl.simulate.costs import Costs
from sortedrl.types import Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Fitted costs and their error."""

    costs: Costs
    intervals: int
    relative_error: float
    """Mean absolute error of an interval's seconds, over the mean interval."""


def fit(events: Iterable[Event], *, name: str = "events") -> Fit:
    """Fit the constants; `name` is the name of the log in errors."""
    known = list(events)
    watch = _EquationBuilder(
        _kept(known), is_overlapped=any(isinstance(event, Landed) for event in known)
    )
    for event in known:
        watch(event)
    if len(watch.rows) < 8 or not watch.updates:
        raise DataError(
            name,
            f"{len(watch.rows)} intervals and {len(watch.updates)} updates are too few to fit "
            "eight constants; give a run of at least a few rounds",
        )
    step, sequence, cached_token, prefill = _least_squares(watch.rows, watch.seconds)
    update, update_token = _least_squares(
        [(1.0, tokens) for tokens, _ in watch.updates], [seconds for _, seconds in watch.updates]
    )
    solution = (step, sequence, cached_token, prefill)
    errors = [
        abs(seconds - sum(a * x for a, x in zip(row, solution, strict=True)))
        for row, seconds in zip(watch.rows, watch.seconds, strict=True)
    ]
    return Fit(
        costs=Costs(
            step_seconds=step,
            sequence_seconds=sequence,
            cached_token_seconds=cached_token,
            prefill_token_seconds=prefill,
            interrupt_seconds=_mean(watch.interrupts),
            weight_sync_seconds=_mean(watch.weight_syncs),
            update_seconds=update,
            update_token_seconds=update_token,
        ),
        intervals=len(watch.rows),
        relative_error=sum(errors) / max(sum(watch.seconds), 1e-12),
    )


class _EquationBuilder:
    """Turns events into equations."""

    def __init__(self, kept: Iterator[int], *, is_overlapped: bool) -> None:
        self._kept = kept
        self._is_overlapped = is_overlapped
        self._given_tokens = 0.0
        self.rows: list[tuple[float, ...]] = []
        self.seconds: list[float] = []
        self.updates: list[tuple[float, float]] = []
        self.weight_syncs: list[float] = []
        self.interrupts: list[float] = []
        # All running answers grow at the same rate, so each is stored minus the common growth.
        self._cached: dict[Key, int] = {}
        self._grown = 0
        self._total_cached = 0
        self._since = 0.0
        self._decoded = 0
        self._prefilled = 0
        self._harvested: float | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Start):
            self._since = event.seconds
            tokens = event.prompt_tokens + next(self._kept)
            self._cached[(event.prompt, event.sample)] = tokens - self._grown
            self._total_cached += tokens
        elif isinstance(event, Finish | Harvest):
            self._interval(event)
        elif isinstance(event, Update):
            self._given_tokens = float(sum(trained.tokens for trained in event.trained))
            if not self._is_overlapped:
                self.updates.append((self._given_tokens, event.took_seconds))
        elif isinstance(event, Landed):
            self.updates.append((self._given_tokens, event.took_seconds))
        elif isinstance(event, SyncWeights):
            self.weight_syncs.append(event.took_seconds)
        if isinstance(event, Finish | Interrupt):
            self._cached.pop((event.prompt, event.sample))
            if not self._cached:
                self._total_cached = 0
        self._count_interrupt(event)

    def _interval(self, event: Finish | Harvest) -> None:
        running = len(self._cached)
        decoded = event.engine_decoded - self._decoded
        prefilled = event.engine_prefilled - self._prefilled
        seconds = event.seconds - self._since
        if seconds > 0 and running and decoded:
            steps = decoded / running
            grown = steps * self._total_cached + decoded * (steps - 1) / 2
            self.rows.append((steps, float(decoded), grown, float(prefilled)))
            self.seconds.append(seconds)
            self._grown += round(steps)
            self._total_cached += decoded
        if isinstance(event, Finish):
            self._total_cached -= self._cached[(event.prompt, event.sample)] + self._grown
        self._decoded, self._prefilled = event.engine_decoded, event.engine_prefilled
        self._since = event.seconds

    def _count_interrupt(self, event: Event) -> None:
        if isinstance(event, Harvest):
            self._harvested = event.seconds
        elif self._harvested is not None:
            if isinstance(event, Interrupt):
                self.interrupts.append(event.seconds - self._harvested)
            self._harvested = None


def _kept(events: Sequence[Event]) -> Iterator[int]:
    """For each start, the cached tokens that the engine kept, known once the answer stops."""
    kept: list[int] = []
    places: dict[Key, int] = {}
    for event in events:
        if isinstance(event, Start):
            places[(event.prompt, event.sample)] = len(kept)
            kept.append(event.cached)
        elif isinstance(event, Finish | Interrupt):
            kept[places.pop((event.prompt, event.sample))] = event.tokens - event.decoded
    return iter(kept)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Non-negative least squares.

    A coefficient that comes out negative is a cost that the run does not show: it is set to zero
    and the others are fitted again.
    """
    columns = list(range(len(rows[0])))
    scale = [max((abs(row[c]) for row in rows), default=0.0) or 1.0 for c in columns]
    scaled = [[row[c] / scale[c] for row in rows] for c in columns]
    products = [[sum(map(mul, left, right)) for right in scaled] for left in scaled]
    targets = [sum(map(mul, column, values)) for column in scaled]
    used = [c for c in columns if products[c][c]]
    while used:
        solution = _solve(
            [[products[i][j] for j in used] for i in used], [targets[i] for i in used]
        )
        worst = min(range(len(used)), key=lambda i: solution[i])
        if solution[worst] >= 0:
            found = dict(zip(used, solution, strict=True))
            return [found.get(c, 0.0) / scale[c] for c in columns]
        del used[worst]
    return [0.0 for _ in columns]


def _solve(matrix: list[list[float]], target: list[float]) -> list[float]:
    """Gaussian elimination, in place; a tiny ridge keeps the system solvable."""
    size = len(matrix)
    for i in range(size):
        matrix[i][i] *= 1 + 1e-12
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(matrix[k][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        target[i], target[pivot] = target[pivot], target[i]
        for k in range(i + 1, size):
            factor = matrix[k][i] / matrix[i][i] if matrix[i][i] else 0.0
            matrix[k] = [a - factor * b for a, b in zip(matrix[k], matrix[i], strict=True)]
            target[k] -= factor * target[i]
    solution = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(matrix[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (target[i] - rest) / matrix[i][i] if matrix[i][i] else 0.0
    return solution
