"""The diagnosis of a run: symptoms, and remedies with the gain the simulator predicts.

Predictions come from the simulator, with the lengths of the run and costs fitted to it. The
diagnosis includes how far the simulation is from the run itself.
The simulator does not overlap updates with rollouts: an overlapped update costs its waiting time.
Of the options of a proposal, the mildest that gains nearly as much as the best is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sortedrl.config.parsing import nested, replaced
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.core.events import Event, Landed
from sortedrl.core.meter import measure
from sortedrl.errors import ConfigError, DataError
from sortedrl.evaluation.tables import percent
from sortedrl.report.advice.rules import (
    About,
    Changes,
    Findings,
    Proposal,
    mean_sample_size,
    proposals,
)
from sortedrl.report.advice.simulation import (
    FittedRun,
    Forecast,
    IdleSlots,
    ObservedAnswers,
    fitted_run,
    forecast,
    idle,
    observed_answers,
    observed_schedule,
    seconds_spent,
    shows_group,
    simulated,
)
from sortedrl.simulate.costs import Costs
from sortedrl.simulate.fit import fit
from sortedrl.simulate.settings import Simulation

LEAST_GAIN = 1.02
# Where lengths are sampled rather than replayed, smaller gains are within the sampling error.
_LEAST_DRAWN_GAIN = 1.1
_NEARLY_BEST = 0.99
_ORDER: tuple[About, ...] = ("learning", "speed", "extrapolation", "memory", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The findings of a run, and the accuracy of the simulator behind them."""

    reason: str | None = None
    """Why nothing could be predicted; `None` if it could."""
    schedule: Schedule | None = None
    fit_error: float | None = None
    """Mean error of the fitted costs over an interval between two events."""
    measured: Forecast | None = None
    predicted: Forecast | None = None
    """The run's own schedule, simulated up to the end of the log; compare with `measured`."""
    idle: IdleSlots = field(default_factory=IdleSlots)
    advice: tuple[Advice, ...] = ()
    """In order: fixes for learning, then by gain, then advice without a prediction."""
    notes: tuple[str, ...] = ()
    """Changes that were tried and gain too little."""

    @property
    def error(self) -> float | None:
        """Relative error of the simulation in trained tokens per second."""
        if self.measured is None or self.predicted is None:
            return None
        return gain_of(self.measured, self.predicted) - 1

    @property
    def summary(self) -> str:
        """The diagnosis in one sentence."""
        if self.reason is not None:
            return self.reason
        best = next(
            (a for a in self.advice if (a.gain or 0) >= LEAST_GAIN and a.is_beyond_error), None
        )
        if best is not None:
            error = f", with an error of {percent(best.error)}" if self._is_off else ""
            return f"Set {best.remedy}: predicted to train {_times(best.gain or 1)}{error}."
        busy = 1.0 if self.measured is None else 1 - self.measured.bubble
        least = (
            f"more than the prediction error of {percent(self.prediction_error)}"
            if self._is_off
            else "2 % or more"
        )
        return (
            f"Slots were busy for {percent(busy)} of the rollout; no simulated change is "
            f"predicted to gain {least}."
        )

    @property
    def prediction_error(self) -> float:
        """Relative error of predictions for this run: of the speed, or of the costs if larger.

        Smaller gains are not advised.
        """
        return max(abs(self.error or 0.0), self.fit_error or 0.0)

    @property
    def _is_off(self) -> bool:
        """Whether the prediction error exceeds the least gain that is reported."""
        return self.prediction_error > LEAST_GAIN - 1

    @property
    def trust(self) -> str | None:
        """The accuracy of the predictions as text; `None` if there are none."""
        if self.error is None or self.fit_error is None:
            return None
        text = (
            f"With its own settings the simulated run trains {percent(abs(self.error))} "
            f"{'more' if self.error > 0 else 'fewer'} tokens per second than measured, and the "
            f"fitted costs are off by {percent(self.fit_error)} per interval between events."
        )
        return (
            f"{text} Gains below this error of {percent(self.prediction_error)} are not advised."
            if self._is_off
            else text
        )


def diagnose(
    events: Sequence[Event],
    *,
    schedule: Schedule | None = None,
    engine: EngineSettings | None = None,
    rows: Sequence[Mapping[str, object]] = (),
    seed: int = 0,
) -> Diagnosis:
    """Read a log and try changes; missing settings are derived from the log.

    `rows` are the metrics of the run, one for each update. If the log is too short, the diagnosis
    has a reason and no advice.
    """
    try:
        fitted = fit(events, name="the log")
        known = schedule or observed_schedule(events)
    except (ConfigError, DataError) as error:
        return Diagnosis(reason=f"No prediction yet: {error}.")
    observed = observed_answers(events)
    if known is None or not observed.num_trained:
        return Diagnosis(reason="No prediction yet: no answer was trained on so far.")
    costs = _in_turn(fitted.costs, events)
    simulated_run = fitted_run(
        events, observed, schedule=known, engine=engine, costs=costs, seed=seed
    )
    run = measure(events).run
    ledger = run.ledger
    spent = seconds_spent(events, run)
    # The simulator does not save, so saving time is not counted in the comparison.
    seconds = run.seconds - spent.saving
    measured = forecast(replace(run, seconds=seconds), trajectories=run.trajectories)
    forecaster = Forecaster(
        simulated_run,
        trajectories=run.trajectories,
        measured=measured,
        fit_error=fitted.relative_error,
    )
    found = Findings(
        schedule=known,
        engine=simulated_run.simulation.engine,
        measured=measured,
        discarded_per_trained=ledger.discarded / max(1, ledger.trained),
        idle=idle(events),
        num_prompts=observed.num_prompts,
        is_group_known=schedule is not None or shows_group(known.strategy),
        truncated_share=observed.num_truncated / max(1, observed.num_finished),
        update_seconds=spent.updates / run.updates,
        update_share=(spent.updates + spent.weight_syncs) / seconds if seconds else 0.0,
        saving_share=spent.saving / run.seconds if run.seconds else 0.0,
        sample_size=mean_sample_size(rows),
        is_mismatch_measured=simulated_run.is_mismatch_measured,
        step_share=_step_share(fitted.costs, observed),
    )
    advice, notes = forecaster.advise(list(proposals(found)))
    return Diagnosis(
        schedule=known,
        fit_error=fitted.relative_error,
        measured=found.measured,
        predicted=forecaster.compared,
        idle=found.idle,
        advice=advice,
        notes=notes,
    )


def _in_turn(costs: Costs, events: Sequence[Event]) -> Costs:
    """The costs of updates as waiting time, if updates overlapped the rollout."""
    waited = [event.waited_seconds for event in events if isinstance(event, Landed)]
    if not waited:
        return costs
    return replace(costs, update_seconds=sum(waited) / len(waited), update_token_seconds=0.0)


def _step_share(costs: Costs, observed: ObservedAnswers) -> float:
    """Share of a full decode step that does not depend on the number of running answers."""
    lengths = [tokens for tokens, _ in observed.lengths.values()]
    # Length-biased sampling: long answers occupy slots longer, and are half done on average.
    written = sum(n * n for n in lengths) / max(1, 2 * sum(lengths))
    resident = written + sum(observed.prompts.values()) / len(observed.prompts)
    answer = costs.sequence_seconds + resident * costs.cached_token_seconds
    return costs.step_seconds / (costs.step_seconds + observed.slots * answer)


def _times(gain: float) -> str:
    if gain >= 2:
        return f"{gain:.1f} times as many tokens per second"
    return f"{100 * (gain - 1):.0f} % more tokens per second"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One remedy: its symptom, the change, its gain and its cost."""

    symptom: str
    remedy: str
    changes: Changes = field(default_factory=dict)
    cost: str
    about: About
    before: Forecast | None = None
    """The run as it is, simulated; `None` if there is no prediction."""
    after: Forecast | None = None
    """The run with the change, simulated."""
    error: float = 0.0
    """Relative error of the simulation, measured on the run as it is."""

    @property
    def is_beyond_error(self) -> bool:
        """Whether the predicted change in speed exceeds the prediction error."""
        return self.gain is not None and abs(self.gain - 1) > self.error

    @property
    def gain(self) -> float | None:
        """Speedup in trained tokens per second of the whole run; `None`: not predicted."""
        if self.before is None or self.after is None:
            return None
        return gain_of(self.before, self.after)


class Forecaster:
    """Tries proposals in the simulation of a run; each setting is simulated once."""

    def __init__(
        self,
        simulated_run: FittedRun,
        *,
        trajectories: int,
        measured: Forecast,
        fit_error: float,
    ) -> None:
        """Simulate the run as it is, and compare it with what was measured.

        Forecasts are for `trajectories` trained ones; `fit_error` is that of the fitted costs.
        """
        self._simulation = simulated_run.simulation
        self._least_gain = (
            LEAST_GAIN if simulated_run.simulation.lengths.replay else _LEAST_DRAWN_GAIN
        )
        self._trajectories = trajectories
        self._known: dict[tuple[Schedule, EngineSettings], Forecast] = {}
        self.before = self.compared = self._simulated(simulated_run.simulation)
        if simulated_run.compared_trajectories is not None:
            self.compared = simulated(
                simulated_run.simulation,
                trajectories=trajectories,
                stop_after=simulated_run.compared_trajectories,
            )
        self.error = max(abs(gain_of(measured, self.compared) - 1), fit_error)

    def advise(self, tried: Sequence[Proposal]) -> tuple[tuple[Advice, ...], tuple[str, ...]]:
        """Advice for the proposals that help, best first, and notes on the others."""
        advice: list[Advice] = []
        notes: list[str] = []
        for proposal in tried:
            if proposal.remedy is not None:
                advice.append(
                    Advice(
                        symptom=proposal.symptom,
                        remedy=proposal.remedy,
                        cost=proposal.cost,
                        about=proposal.about,
                    )
                )
                continue
            chosen = self._best(proposal)
            if chosen is None:
                continue
            if self._is_worth_it(chosen):
                advice.append(chosen)
            else:
                notes.append(self._note(chosen))
        unique = {entry.remedy: entry for entry in reversed(advice)}
        ranked = sorted(unique.values(), key=lambda a: (_ORDER.index(a.about), -(a.gain or 0)))
        return tuple(ranked), tuple(dict.fromkeys(notes))

    def _note(self, advice: Advice) -> str:
        gain = 100 * ((advice.gain or 1) - 1)
        is_uncertain = not advice.is_beyond_error and self.error >= LEAST_GAIN - 1
        why = f", within the prediction error of {percent(self.error)}" if is_uncertain else ""
        return f"Tried {advice.remedy}: {gain:+.1f} % predicted{why}, not advised."

    def _best(self, proposal: Proposal) -> Advice | None:
        """The mildest option that gains nearly as much as the best."""
        options = [
            advice for changes in proposal.options if (advice := self._try(proposal, changes))
        ]
        best = max((advice.gain or 0 for advice in options), default=0.0)
        return next((a for a in options if (a.gain or 0) >= _NEARLY_BEST * best), None)

    def _try(self, proposal: Proposal, changes: Changes) -> Advice | None:
        """Advice for one set of changes; `None` if they conflict with other settings."""
        try:
            simulation = replaced(self._simulation, nested(changes))
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
            error=self.error,
        )

    def _is_worth_it(self, advice: Advice) -> bool:
        gain = advice.gain or 0
        if advice.about == "memory":
            return gain > 2 - LEAST_GAIN
        is_gain = gain >= self._least_gain and advice.is_beyond_error
        return advice.about == "learning" or is_gain

    def _simulated(self, simulation: Simulation) -> Forecast:
        return simulated(simulation, trajectories=self._trajectories)


def _written(changes: Changes) -> str:
    """The changes as lines of a config file."""
    parts = []
    for name, value in changes.items():
        text = f'"{value}"' if isinstance(value, str) else str(value)
        parts.append(f"without {name}" if value is None else f"{name} = {text}")
    return ", ".join(parts)


def _price(before: Forecast, after: Forecast) -> list[str]:
    """Side effects of the change, as sentences."""
    sentences = []
    if max(before.mean_staleness, after.mean_staleness) >= 0.05:
        sentences.append(
            f"Tokens are {after.mean_staleness:.1f} versions old on average and at most "
            f"{after.max_staleness} (now {before.mean_staleness:.1f} and {before.max_staleness})."
        )
    if abs(after.mean_length / before.mean_length - 1) >= 0.03:
        sentences.append(
            f"Answers trained on have {after.mean_length:,.0f} tokens on average "
            f"(now {before.mean_length:,.0f})."
        )
    if abs(after.updates / before.updates - 1) >= 0.1:
        sentences.append(
            f"{after.updates:,.0f} updates for the same answers (now {before.updates:,.0f})."
        )
    return sentences


def gain_of(before: Forecast, after: Forecast) -> float:
    """Speedup in trained tokens per second of the whole run."""
    if not before.trained_per_second:
        return 1.0
    return after.trained_per_second / before.trained_per_second
