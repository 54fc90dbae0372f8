"""What a log shows of its answers: their lengths, prompts and resumes, in one pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sortedrl.events import (
    Begin,
    End,
    Event,
    Finish,
    HandOver,
    Interrupt,
    Load,
    Resume,
    Start,
    Update,
)
from sortedrl.types import Key

_LEAST_RESUMES = 20


@dataclass(slots=True)
class ObservedAnswers:
    """The answers of a run so far."""

    slots: int = 1
    is_ended: bool = False
    was_redrawn: bool = False
    """Whether an answer was thrown away and drawn again from new noise."""
    num_prompts: int = 0
    num_trained: int = 0
    trained_tokens: int = 0
    num_finished: int = 0
    num_truncated: int = 0
    longest: int = 1
    prompts: dict[tuple[int, int], int] = field(default_factory=dict)
    """Tokens of each prompt by group and id, in the order in which they were first started."""
    lengths: dict[tuple[int, int, int], tuple[int, bool]] = field(default_factory=dict)
    """By group, prompt and sample: the tokens an answer last had, and whether it was complete."""
    resumes: int = 0
    parted: int = 0
    """Resumes that lost cached tokens."""
    survived_ages: int = 0
    """Cached tokens that survived a resume, each as often as it was versions old."""

    @property
    def mismatch_rate(self) -> float | None:
        """Chance that a cached token is not kept, per token and version; `None`: too few seen."""
        if self.resumes < _LEAST_RESUMES or not self.survived_ages:
            return None
        return self.parted / (self.survived_ages + self.parted)


def observed_answers(events: Iterable[Event]) -> ObservedAnswers:
    """The answers of a log."""
    watch = _Watch()
    for event in events:
        watch(event)
    return watch.observed


@dataclass(slots=True)
class _Stay:
    """The last time an answer went to the engine."""

    group: int
    version: int
    cached: int = 0
    age: int = 0


class _Watch:
    """Folds events into what is observed."""

    def __init__(self) -> None:
        self.observed = ObservedAnswers()
        self._version = 0
        self._stays: dict[Key, _Stay] = {}

    def __call__(self, event: Event) -> None:
        observed = self.observed
        if isinstance(event, Begin):
            observed.slots = event.slots
        elif isinstance(event, HandOver | Resume):
            self._version = event.version
        elif isinstance(event, Load):
            observed.num_prompts += event.prompts
        elif isinstance(event, Start):
            self._start(event)
        elif isinstance(event, Finish | Interrupt):
            self._stop(event)
        elif isinstance(event, Update):
            observed.num_trained += len(event.trained)
            for trained in event.trained:
                observed.trained_tokens += trained.tokens
                del self._stays[(trained.prompt, trained.sample)]
        elif isinstance(event, End):
            observed.is_ended = True

    def _start(self, event: Start) -> None:
        key = (event.prompt, event.sample)
        self.observed.prompts.setdefault((event.group, event.prompt), event.prompt_tokens)
        self.observed.was_redrawn |= event.attempt > 0
        before = self._stays.get(key)
        age = 0 if before is None else self._version - before.version
        self._stays[key] = _Stay(event.group, self._version, event.cached, age)

    def _stop(self, event: Finish | Interrupt) -> None:
        observed = self.observed
        stay = self._stays[(event.prompt, event.sample)]
        is_finished = isinstance(event, Finish)
        observed.lengths[(stay.group, event.prompt, event.sample)] = (event.tokens, is_finished)
        observed.longest = max(observed.longest, event.tokens)
        if isinstance(event, Finish):
            observed.num_finished += 1
            observed.num_truncated += event.reason == "length"
        kept = event.tokens - event.decoded
        if stay.cached and stay.age:
            observed.resumes += 1
            observed.parted += kept < stay.cached
            observed.survived_ages += kept * stay.age
