"""What took time in a run beside writing: rounds, groups, updates, hand-overs and rewards.

Spans lie between the run's first and last event. What had no end when the log ends, ends there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from sortedrl.events import (
    Event,
    Finish,
    HandOver,
    Harvest,
    Interrupt,
    Landed,
    Load,
    Resume,
    Score,
    Scored,
    Start,
    Update,
)
from sortedrl.report.record import Run
from sortedrl.types import Key

SpanKind = Literal["rounds", "groups", "updates", "hand_overs", "waits", "rewards", "slots"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of time, what it is called, and what is told of it."""

    kind: SpanKind
    start: float
    end: float
    name: str
    told: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class Spans:
    """The spans of a run, as far as it came."""

    rounds: list[Span] = field(default_factory=list)
    groups: list[Span] = field(default_factory=list)
    updates: list[Span] = field(default_factory=list)
    hand_overs: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    """Rewards that the update had to wait for."""
    workers: dict[int, list[Span]] = field(default_factory=dict)
    """Rewards under way, by the number of the worker."""
    resumes: list[Resume] = field(default_factory=list)
    running: set[Key] = field(default_factory=set)
    """Answers that were being written when the log ends."""

    def tracks(self) -> dict[str, dict[str, list[Span]]]:
        """The spans by process and thread, as a trace shows them."""
        rewards = {f"worker {number}": self.workers[number] for number in sorted(self.workers)}
        if self.waits:
            rewards = {"waiting": self.waits} | rewards
        return {
            "rounds": {"rollout": self.rounds},
            "groups": {"group": self.groups},
            "trainer": {"updates": self.updates, "hand-over": self.hand_overs},
            "rewards": rewards,
        }


def spans(run: Run) -> Spans:
    """The spans of a run."""
    finder = _Finder(run)
    for event in run.record.events:
        finder.take(event)
    return finder.found()


class _Finder:
    """Follows a run and notes what takes how long."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._spans = Spans()
        self._rollout_since: float | None = run.lanes.start
        self._round: int | None = None
        self._place = -1
        self._loads: dict[int, Load] = {}
        self._has_landings = any(isinstance(event, Landed) for event in run.record.events)
        self._begun = 0.0
        self._flight: Update | None = None

    def take(self, event: Event) -> None:
        """Take in the next event."""
        if isinstance(event, HandOver | Load | Start | Harvest):
            self._enter(event)
        if isinstance(event, Start):
            self._spans.running.add((event.prompt, event.sample))
        elif isinstance(event, Finish | Interrupt):
            self._spans.running.discard((event.prompt, event.sample))
        elif isinstance(event, Load):
            self._loads[event.group] = event
        elif isinstance(event, Harvest):
            self._end_rollout(event.seconds)
        elif isinstance(event, HandOver):
            self._hand_over(event)
        elif isinstance(event, Resume):
            self._spans.resumes.append(event)
        else:
            self._train(event)

    def found(self) -> Spans:
        """The spans; what is open ends with the log."""
        end = self._run.lanes.end
        self._end_rollout(end)
        self._land(end)
        for group in list(self._loads):
            self._close(group, end, is_closed=False)
        return self._spans

    def _enter(self, event: HandOver | Load | Start | Harvest) -> None:
        """The numbers of rounds are in the order in which rounds are first named."""
        if event.round != self._round:
            self._round = event.round
            self._place += 1
        if self._rollout_since is None and not isinstance(event, Harvest):
            self._rollout_since = event.seconds

    def _end_rollout(self, end: float) -> None:
        if self._rollout_since is None or self._round is None:
            return
        figures = self._run.metrics.rounds[self._place]
        told = {
            "round": self._round,
            "bubble": round(figures.bubble, 6),
            "answers": figures.trajectories,
        }
        name = f"rollout {self._round}"
        self._spans.rounds.append(
            Span(kind="rounds", start=self._rollout_since, end=end, name=name, told=told)
        )
        self._rollout_since = None

    def _hand_over(self, event: HandOver) -> None:
        start = event.seconds - event.took_seconds
        self._begun = event.seconds
        told = {"version": event.version, "round": event.round}
        name = f"hand-over of version {event.version}"
        self._spans.hand_overs.append(
            Span(kind="hand_overs", start=start, end=event.seconds, name=name, told=told)
        )

    def _train(self, event: Event) -> None:
        if isinstance(event, Score):
            self._score(event)
        elif isinstance(event, Update):
            self._update(event)
        elif isinstance(event, Landed):
            # The clock is read again for the event, a moment after the update was done.
            self._land(min(self._begun + event.took_seconds, event.seconds))

    def _update(self, event: Update) -> None:
        if self._has_landings:
            # It begins once the engine has its weights: after a hand-over, if there is one.
            self._flight, self._begun = event, event.seconds
        else:
            self._add_update(event, event.seconds - event.took_seconds, end=event.seconds)
        for group in event.closed:
            self._close(group, event.seconds, is_closed=True)

    def _land(self, end: float) -> None:
        if self._flight is not None:
            self._add_update(self._flight, self._begun, end=end)
            self._flight = None

    def _add_update(self, event: Update, start: float, *, end: float) -> None:
        told = {
            "version": event.version,
            "round": event.round,
            "answers": len(event.trained),
            "tokens": sum(trained.tokens for trained in event.trained),
            "closed_groups": list(event.closed),
        }
        name = f"update of version {event.version}"
        self._spans.updates.append(Span(kind="updates", start=start, end=end, name=name, told=told))

    def _close(self, group: int, end: float, *, is_closed: bool) -> None:
        load = self._loads.pop(group)
        told = {
            "group": group,
            "prompts": load.prompts,
            "answers": load.trajectories,
            "is_closed": is_closed,
        }
        self._spans.groups.append(
            Span(kind="groups", start=load.seconds, end=end, name=f"group {group}", told=told)
        )

    def _score(self, event: Score) -> None:
        start = event.seconds - event.waited_seconds
        told = {"round": event.round, "answers": len(event.scored)}
        self._spans.waits.append(
            Span(
                kind="waits", start=start, end=event.seconds, name="waiting for rewards", told=told
            )
        )
        batches: dict[tuple[int, float], list[Span]] = {}
        for scored in event.scored:
            if scored.worker is not None and scored.start is not None:
                batch = batches.setdefault((scored.worker, scored.start), [])
                batch.append(self._reward(scored, scored.start, until=event.seconds))
        for (worker, _), batch in batches.items():
            lane = self._spans.workers.setdefault(worker, [])
            lane += _in_turn(batch, until=event.seconds)

    def _reward(self, scored: Scored, start: float, *, until: float) -> Span:
        """One reward, inside the run even where clocks disagree a little."""
        start = min(max(start, self._run.lanes.start), until)
        told: dict[str, object] = {"prompt": scored.prompt, "sample": scored.sample}
        if scored.reward is not None:
            told["reward"] = scored.reward
        return Span(
            kind="rewards",
            start=start,
            end=min(start + (scored.took_seconds or 0.0), until),
            name=f"prompt {scored.prompt}.{scored.sample}",
            told=told,
        )


def _in_turn(batch: Sequence[Span], *, until: float) -> list[Span]:
    """Answers that a worker got together: one after the other, if there was time for that."""
    total = sum(span.end - span.start for span in batch)
    if batch[0].start + total > until:
        return list(batch)
    placed: list[Span] = []
    now = batch[0].start
    for span in batch:
        end = now + span.end - span.start
        placed.append(replace(span, start=now, end=end))
        now = end
    return placed
