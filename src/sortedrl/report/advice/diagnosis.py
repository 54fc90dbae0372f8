"""The diagnosis of a run: symptoms in words, and remedies with the gain the simulator predicts.

Every prediction is made by the simulator with costs fitted to this very run and its own lengths.
How far it is from the run itself is part of the diagnosis.
The simulator takes turns. Of updates that ran beside the rollout it knows what was waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sortedrl.config import EngineSettings, Schedule
from sortedrl.errors import ConfigError, DataError
from sortedrl.events import Event, Landed, Update
from sortedrl.meter import measure
from sortedrl.report.advice.advice import LEAST_GAIN, Advice, Trial, gain_of
from sortedrl.report.advice.findings import Findings, mean_sample_size
from sortedrl.report.advice.forecast import Forecast, forecast
from sortedrl.report.advice.idle import Idle, idle
from sortedrl.report.advice.observed import ObservedAnswers, observed_answers
from sortedrl.report.advice.rules import proposals
from sortedrl.report.advice.schedule import observed_schedule, shows_group
from sortedrl.report.advice.world import observed_world
from sortedrl.simulate.costs import Costs
from sortedrl.simulate.fit import fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What the numbers of a run say, and how far the simulator that says so can be trusted."""

    reason: str | None = None
    """Why nothing could be predicted; `None` where it could."""
    schedule: Schedule | None = None
    fit_error: float | None = None
    """Mean error of the fitted costs over an interval between two events."""
    measured: Forecast | None = None
    predicted: Forecast | None = None
    """The run's own schedule, simulated as far as the log goes: to be held against `measured`."""
    idle: Idle = field(default_factory=Idle)
    advice: tuple[Advice, ...] = ()
    """Best first: what the learning needs, then by gain, then what is not predicted."""
    notes: tuple[str, ...] = ()
    """What was tried and gains too little."""

    @property
    def error(self) -> float | None:
        """How far the simulation is from the run, in trained tokens per second; 0 is exact."""
        if self.measured is None or self.predicted is None:
            return None
        return gain_of(self.measured, self.predicted) - 1

    @property
    def summary(self) -> str:
        """The diagnosis in one sentence."""
        if self.reason is not None:
            return self.reason
        best = next((entry for entry in self.advice if (entry.gain or 0) >= LEAST_GAIN), None)
        if best is not None:
            return f"Set {best.remedy}: predicted to train {_times(best.gain or 1)}."
        busy = 1.0 if self.measured is None else 1 - self.measured.bubble
        return (
            f"The slots were busy in {100 * busy:.0f} % of the rollout; nothing here makes the "
            "run faster by 2 %."
        )

    @property
    def trust(self) -> str | None:
        """How far to believe the predictions, in words; `None` where there are none."""
        if self.error is None or self.fit_error is None:
            return None
        doubt = max(abs(self.error), self.fit_error)
        words = (
            f"Simulated as it was, the run trains {100 * abs(self.error):.1f} % "
            f"{'more' if self.error > 0 else 'fewer'} tokens per second than measured, and the "
            f"fitted costs miss the seconds between two events by {100 * self.fit_error:.1f} %."
        )
        return (
            f"{words} Smaller gains than {100 * doubt:.0f} % are a guess."
            if doubt > 0.05
            else words
        )


def diagnose(
    events: Sequence[Event],
    *,
    schedule: Schedule | None = None,
    engine: EngineSettings | None = None,
    rows: Sequence[Mapping[str, object]] = (),
    seed: int = 0,
) -> Diagnosis:
    """Read a log and try what might help; settings that are not given are read off the log.

    `rows` are the run's metrics, one for each update. A log that is too short gives a diagnosis
    with a reason and no advice.
    """
    try:
        fitted = fit(events, name="the log")
        known = schedule or observed_schedule(events)
    except (ConfigError, DataError) as error:
        return Diagnosis(reason=f"Nothing can be predicted yet: {error}.")
    observed = observed_answers(events)
    if known is None or not observed.num_trained:
        return Diagnosis(reason="Nothing can be predicted yet: no answer was trained on.")
    costs = _in_turn(fitted.costs, events)
    world = observed_world(events, observed, schedule=known, engine=engine, costs=costs, seed=seed)
    run = measure(events).run
    trial = Trial(world, trajectories=run.trajectories)
    ledger = run.ledger
    took = [event.took_seconds for event in events if isinstance(event, Update)]
    waited = [event.waited_seconds for event in events if isinstance(event, Landed)]
    found = Findings(
        schedule=known,
        engine=world.simulation.engine,
        measured=forecast(run, trajectories=run.trajectories),
        discarded_per_trained=ledger.discarded / max(1, ledger.trained),
        idle=idle(events),
        num_prompts=observed.num_prompts,
        is_group_known=schedule is not None or shows_group(known.strategy),
        truncated_share=observed.num_truncated / max(1, observed.num_finished),
        update_seconds=(sum(took) + sum(waited)) / len(took),
        sample_size=mean_sample_size(rows),
        is_mismatch_measured=world.is_mismatch_measured,
        step_share=_step_share(fitted.costs, observed),
    )
    advice, notes = trial.judged(list(proposals(found)))
    return Diagnosis(
        schedule=known,
        fit_error=fitted.relative_error,
        measured=found.measured,
        predicted=trial.compared,
        idle=found.idle,
        advice=advice,
        notes=notes,
    )


def _in_turn(costs: Costs, events: Sequence[Event]) -> Costs:
    """The costs with what was waited for an update, where updates ran beside the rollout."""
    waited = [event.waited_seconds for event in events if isinstance(event, Landed)]
    if not waited:
        return costs
    return replace(costs, update_seconds=sum(waited) / len(waited), update_token_seconds=0.0)


def _step_share(costs: Costs, observed: ObservedAnswers) -> float:
    """Share of a decode step of full slots that does not grow with the answers in it."""
    lengths = [tokens for tokens, _ in observed.lengths.values()]
    # A long answer is met more often in a slot than a short one, on average half written.
    written = sum(n * n for n in lengths) / max(1, 2 * sum(lengths))
    resident = written + sum(observed.prompts.values()) / len(observed.prompts)
    answer = costs.sequence_seconds + resident * costs.cached_token_seconds
    return costs.step_seconds / (costs.step_seconds + observed.slots * answer)


def _times(gain: float) -> str:
    if gain >= 2:
        return f"{gain:.1f} times as many tokens per second"
    return f"{100 * (gain - 1):.0f} % more tokens per second"
