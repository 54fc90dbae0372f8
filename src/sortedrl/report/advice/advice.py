"""Remedies tried on the simulation of a run: those that gain become advice.

Of the options of a proposal the mildest is taken that gains nearly as much as the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sortedrl.config import EngineSettings, Schedule
from sortedrl.errors import ConfigError
from sortedrl.report.advice.forecast import Forecast, simulated
from sortedrl.report.advice.rules import About, Changes, Proposal
from sortedrl.report.advice.world import World
from sortedrl.simulate.settings import Simulation

LEAST_GAIN = 1.02
# Where lengths are drawn and not replayed, smaller gains are within the spread of the draws.
_LEAST_DRAWN_GAIN = 1.1
_NEARLY_BEST = 0.99
_ORDER: tuple[About, ...] = ("learning", "speed", "extrapolation", "memory", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One remedy: what shows that it is needed, what to change, what that gains and costs."""

    symptom: str
    remedy: str
    changes: Changes
    cost: str
    about: About
    before: Forecast | None = None
    """The run as it is, simulated; `None` where the remedy is not predicted."""
    after: Forecast | None = None
    """The run with the changes, simulated."""

    @property
    def gain(self) -> float | None:
        """Trained tokens per second of everything, after over before; `None`: not predicted."""
        if self.before is None or self.after is None:
            return None
        return gain_of(self.before, self.after)


class Trial:
    """Tries proposals on the simulation of a run; each setting is simulated once."""

    def __init__(self, world: World, *, trajectories: int) -> None:
        """Simulate the run as it is; forecasts speak of so many trained trajectories."""
        self._simulation = world.simulation
        self._least_gain = LEAST_GAIN if world.simulation.lengths.replay else _LEAST_DRAWN_GAIN
        self._trajectories = trajectories
        self._known: dict[tuple[Schedule, EngineSettings], Forecast] = {}
        self.before = self.compared = self._simulated(world.simulation)
        if world.compared_trajectories is not None:
            self.compared = simulated(
                world.simulation,
                trajectories=trajectories,
                stop_after=world.compared_trajectories,
            )

    def judged(self, tried: Sequence[Proposal]) -> tuple[tuple[Advice, ...], tuple[str, ...]]:
        """The proposals that help as advice, best first, and notes on those that do not."""
        advice: list[Advice] = []
        notes: list[str] = []
        for proposal in tried:
            if proposal.remedy is not None:
                advice.append(_unpredicted(proposal, proposal.remedy))
                continue
            chosen = self._best(proposal)
            if chosen is None:
                continue
            if self._is_worth_it(chosen):
                advice.append(chosen)
            else:
                gain = 100 * ((chosen.gain or 1) - 1)
                notes.append(f"Tried {chosen.remedy}: {gain:+.1f} % predicted, not advised.")
        unique = {entry.remedy: entry for entry in reversed(advice)}
        ranked = sorted(unique.values(), key=lambda a: (_ORDER.index(a.about), -(a.gain or 0)))
        return tuple(ranked), tuple(dict.fromkeys(notes))

    def _best(self, proposal: Proposal) -> Advice | None:
        """The mildest option that gains nearly as much as the best."""
        options = [
            advice for changes in proposal.options if (advice := self._try(proposal, changes))
        ]
        best = max((advice.gain or 0 for advice in options), default=0.0)
        return next((a for a in options if (a.gain or 0) >= _NEARLY_BEST * best), None)

    def _try(self, proposal: Proposal, changes: Changes) -> Advice | None:
        """The proposal with what these changes give; `None` where they do not fit the rest."""
        try:
            simulation = changed(self._simulation, changes)
        except ConfigError:
            return None
        key = (simulation.schedule, simulation.engine)
        if key not in self._known:
            self._known[key] = self._simulated(simulation)
        after = self._known[key]
        return Advice(
            symptom=proposal.symptom,
            remedy=_written(changes),
            changes=changes,
            cost=" ".join((proposal.cost, *_price(self.before, after))),
            about=proposal.about,
            before=self.before,
            after=after,
        )

    def _is_worth_it(self, advice: Advice) -> bool:
        gain = advice.gain or 0
        if advice.about == "memory":
            return gain > 2 - LEAST_GAIN
        return advice.about == "learning" or gain >= self._least_gain

    def _simulated(self, simulation: Simulation) -> Forecast:
        return simulated(simulation, trajectories=self._trajectories)


def changed(simulation: Simulation, changes: Changes) -> Simulation:
    """The simulation with dotted settings of schedule and engine in place of its own."""
    parts: dict[str, dict[str, Any]] = {"schedule": {}, "engine": {}}
    for name, value in changes.items():
        section, _, setting = name.partition(".")
        parts[section][setting] = value
    return replace(
        simulation,
        schedule=replace(simulation.schedule, **parts["schedule"]),
        engine=replace(simulation.engine, **parts["engine"]),
    )


def _unpredicted(proposal: Proposal, remedy: str) -> Advice:
    return Advice(
        symptom=proposal.symptom,
        remedy=remedy,
        changes={},
        cost=proposal.cost,
        about=proposal.about,
    )


def _written(changes: Changes) -> str:
    """The changes as lines of a config."""
    parts = []
    for name, value in changes.items():
        text = f'"{value}"' if isinstance(value, str) else str(value)
        parts.append(f"without {name}" if value is None else f"{name} = {text}")
    return ", ".join(parts)


def _price(before: Forecast, after: Forecast) -> list[str]:
    """What changes besides the speed, in words."""
    words = []
    if max(before.mean_staleness, after.mean_staleness) >= 0.05:
        words.append(
            f"Tokens are {after.mean_staleness:.1f} versions old on average and at most "
            f"{after.max_staleness} (now {before.mean_staleness:.1f} and {before.max_staleness})."
        )
    if abs(after.mean_length / before.mean_length - 1) >= 0.03:
        words.append(
            f"Answers trained on have {after.mean_length:,.0f} tokens on average "
            f"(now {before.mean_length:,.0f})."
        )
    if abs(after.updates / before.updates - 1) >= 0.1:
        words.append(
            f"{after.updates:,.0f} updates for the same answers (now {before.updates:,.0f})."
        )
    return words


def gain_of(before: Forecast, after: Forecast) -> float:
    """Trained tokens per second of everything, after over before."""
    if not before.trained_per_second:
        return 1.0
    return after.trained_per_second / before.trained_per_second
