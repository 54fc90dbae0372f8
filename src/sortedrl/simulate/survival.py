"""Lengths of uninterrupted answers, estimated from a run with interruptions (Kaplan-Meier).

A stretch is what a run shows of one answer's length: it was already longer than `entry` tokens
when first seen, and it ended at `exit` tokens or was last seen there unfinished. The share of
answers longer than `t` is a product over the lengths at which answers ended,

    S(t) = product over ends e <= t of (1 - ended at e / seen at e)

where a stretch is seen at every length above its entry up to its exit. So an interrupted answer
counts as far as it was seen: neither dropped (which favours short answers) nor taken as complete.

A prompt with long answers is redrawn more often than others, and its redraws are long too. So ends
are counted among first draws as long as enough of these are seen, and among all draws beyond.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from sortedrl.core.events import Event, Finish, Interrupt, Start, Update
from sortedrl.types import Key

_ENOUGH = 20


class Stretch(NamedTuple):
    """What a run shows of one draw of an answer, in tokens."""

    entry: int
    exit: int
    is_finished: bool
    is_first: bool = True
    """Whether it is the first draw of its trajectory, not one after a draw thrown away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """A distribution of lengths, as the steps of its survival curve."""

    survival: tuple[tuple[int, float], ...]
    """Lengths at which answers end, rising, each with the share of answers longer than it.
    The last share is 0."""

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
        # A step that rounding puts a hair above the share must still be met by it.
        place = bisect_right(self.survival, share - 1e-12, key=lambda step: 1 - step[1])
        return self.survival[min(place, len(self.survival) - 1)][0]

    def sample_lengths(self, count: int) -> tuple[int, ...]:
        """That many lengths, shortest first, evenly spread over the distribution."""
        return tuple(self.quantile((place + 0.5) / count) for place in range(count))


def stretches(events: Iterable[Event]) -> Iterator[Stretch]:
    """One stretch for each draw of an answer: its last exit, and whether it was complete then.

    An answer that is resumed, or verified again after it was complete, is still one draw;
    only one that is drawn again from new noise is another.
    """
    attempts: dict[Key, int] = {}
    last: dict[Key, Stretch] = {}
    for event in events:
        if isinstance(event, Start):
            key = (event.prompt, event.sample)
            if key in last and attempts[key] != event.attempt:
                yield last.pop(key)
            attempts[key] = event.attempt
        elif isinstance(event, Finish | Interrupt):
            key = (event.prompt, event.sample)
            is_finished, is_first = isinstance(event, Finish), attempts[key] == 0
            last[key] = Stretch(0, event.tokens, is_finished, is_first)
        elif isinstance(event, Update):
            for trained in event.trained:
                key = (trained.prompt, trained.sample)
                del attempts[key]
                yield last.pop(key)
    yield from last.values()


def written_lengths(stretches: Iterable[Stretch]) -> Survival:
    """The distribution of complete lengths; the tail that never ended ends at the longest exit.

    Stretches without tokens are ignored. Raises `ValueError` if no stretch is left.
    """
    seen = [stretch for stretch in stretches if stretch.exit > stretch.entry]
    if not seen:
        raise ValueError("lengths are estimated from at least one stretch of tokens, got none")
    first = _Watched(stretch for stretch in seen if stretch.is_first)
    every = _Watched(seen)
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
        last = max(stretch.exit for stretch in seen)
        steps = [*(step for step in steps if step[0] < last), (last, 0.0)]
    return Survival(survival=tuple(steps))


class _Watched:
    """Counts, in order of length, of the stretches that are seen and that end."""

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        self.moves: Counter[int] = Counter()
        self._ends: Counter[int] = Counter()
        for stretch in stretches:
            self.moves[stretch.entry] += 1
            self.moves[stretch.exit] -= 1
            self._ends[stretch.exit] += stretch.is_finished
        self.seen = 0

    def ending(self, length: int) -> float:
        """Share of those seen that end here."""
        return self._ends[length] / self.seen if self.seen else 0.0

    def pass_by(self, length: int) -> None:
        """Add the stretches that enter at this length, and remove those that leave."""
        self.seen += self.moves[length]
