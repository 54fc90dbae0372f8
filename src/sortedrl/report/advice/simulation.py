"""A real run as a simulation: its fitted costs, its own lengths, its prompts.

Where no answer was redrawn, the lengths are replayed answer by answer, so groups keep their
easy and hard prompts and lengths may grow as the run learns. Where answers were redrawn, what was
trained on is shorter than what the policy writes, so lengths are drawn from the estimate of
`survival` instead, and how alike redraws of a prompt are is chosen so that the simulated run
trains on answers as long as the real one did. A long run is thinned to some of its groups, evenly
spread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.core.events import Event, Update
from sortedrl.core.meter import Meter
from sortedrl.core.metrics import Figures
from sortedrl.core.randomness import uniform
from sortedrl.report.advice.observed import ObservedAnswers
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.costs import Costs, CostSettings
from sortedrl.simulate.lengths import LengthSettings
from sortedrl.simulate.settings import Simulation
from sortedrl.simulate.survival import Survival, stretches, written_lengths

_MOST_TRAJECTORIES = 4096
_LEAST_GROUPS = 4
_HALVINGS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a run was like, or would be like."""

    bubble: float
    goodput: float
    """Trained tokens per second of rollout."""
    trained_per_second: float
    """Trained tokens per second of everything."""
    seconds: float
    """To train as many answers as the run did; of a run, the seconds it took."""
    mean_length: float
    mean_staleness: float
    max_staleness: int
    discarded_share: float
    """Tokens discarded over tokens decoded."""
    rollout_share: float
    """Share of the seconds in which answers are written."""
    updates: float
    """For as many answers as the run trained on."""


def forecast(figures: Figures, *, trajectories: int) -> Forecast:
    """These figures, with seconds and updates in proportion to so many answers."""
    scale = trajectories / figures.trajectories if figures.trajectories else 1.0
    ledger = figures.ledger
    return Forecast(
        bubble=figures.bubble,
        goodput=figures.goodput,
        trained_per_second=figures.trained_per_second,
        seconds=figures.seconds * scale,
        mean_length=figures.mean_length,
        mean_staleness=figures.mean_staleness,
        max_staleness=figures.staleness_max,
        discarded_share=ledger.discarded / ledger.decoded if ledger.decoded else 0.0,
        rollout_share=figures.rollout_seconds / figures.seconds if figures.seconds else 0.0,
        updates=figures.updates * scale,
    )


def simulated(
    simulation: Simulation, *, trajectories: int, stop_after: int | None = None
) -> Forecast:
    """What a simulation gives, by default at its end, or once `stop_after` are trained.

    Seconds and updates are in proportion to `trajectories`.
    """
    if stop_after is None:
        return forecast(simulate(simulation).metrics.run, trajectories=trajectories)
    meter = Meter()
    reached: Figures | None = None

    def record(event: Event) -> None:
        nonlocal reached
        if reached is None:
            meter(event)
            if isinstance(event, Update) and meter.run.trajectories >= stop_after:
                reached = meter.run

    simulate(simulation, record=record)
    return forecast(reached or meter.run, trajectories=trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedRun:
    """The simulation of a run."""

    simulation: Simulation
    compared_trajectories: int | None
    """After so many trained trajectories the simulation is where the log ends; `None`: at its own
    end."""
    is_mismatch_measured: bool
    """Whether the loss of cached tokens in coupled mode comes from this run."""


def fitted_run(
    events: Sequence[Event],
    observed: ObservedAnswers,
    *,
    schedule: Schedule,
    engine: EngineSettings | None,
    costs: Costs,
    seed: int,
) -> FittedRun:
    """The run that wrote these events, on a virtual clock."""
    survival = written_lengths(stretches(events))
    places = _places(observed, schedule)
    lengths = LengthSettings(
        values=tuple(_values(observed, places, survival, schedule=schedule, seed=seed)),
        replay=not observed.was_redrawn,
        prompt_tokens=round(sum(observed.prompts.values()) / len(observed.prompts)),
    )
    rate = None if schedule.mode != "coupled" else observed.mismatch_rate
    if rate is not None:
        lengths = replace(lengths, mismatch_rate=rate)
    max_tokens = observed.longest if engine is None else engine.max_tokens
    fitted = FittedRun(
        simulation=Simulation(
            prompts=len(places),
            seed=seed,
            schedule=schedule,
            engine=EngineSettings(slots=observed.slots, max_tokens=max_tokens),
            lengths=lengths,
            costs=CostSettings(hardware="ticks", **asdict(costs)),
        ),
        compared_trajectories=_compared(observed, places),
        is_mismatch_measured=rate is not None,
    )
    return _with_likeness(fitted, observed) if observed.was_redrawn else fitted


def _with_likeness(fitted: FittedRun, observed: ObservedAnswers) -> FittedRun:
    """The fitted run with the share of the prompt in an answer's length, found by halving.

    Redraws that resemble the answer they replace are as long again: the more alike they are, the
    longer are the answers that end up in training.
    """
    mean = observed.trained_tokens / observed.num_trained
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        lengths = replace(fitted.simulation.lengths, prompt_share=share)
        fitted = replace(fitted, simulation=replace(fitted.simulation, lengths=lengths))
        reached = simulated(
            fitted.simulation,
            trajectories=observed.num_trained,
            stop_after=fitted.compared_trajectories,
        )
        low, high = (low, share) if reached.mean_length > mean else (share, high)
    lengths = replace(fitted.simulation.lengths, prompt_share=(low + high) / 2)
    return replace(fitted, simulation=replace(fitted.simulation, lengths=lengths))


def _places(observed: ObservedAnswers, schedule: Schedule) -> list[int]:
    """The prompts to simulate, as places in the order of the run.

    A run that goes on is given a few groups more, or there would be nothing to look ahead to.
    """
    size, count = schedule.group_prompts, observed.num_prompts
    if not observed.is_ended:
        count = max(count, _LEAST_GROUPS * size)
    groups, most = -(-count // size), max(2, _MOST_TRAJECTORIES // schedule.group_trajectories)
    if groups <= most:
        return list(range(count))
    # The last group may be smaller than the others and would count as often.
    whole = count // size
    chosen = [int((number + 0.5) * whole / most) for number in range(most)]
    return [group * size + place for group in chosen for place in range(size)]


def _compared(observed: ObservedAnswers, places: Sequence[int]) -> int | None:
    if observed.is_ended:
        return None
    return round(observed.num_trained * min(1.0, len(places) / observed.num_prompts))


def _values(
    observed: ObservedAnswers,
    places: Sequence[int],
    survival: Survival,
    *,
    schedule: Schedule,
    seed: int,
) -> Iterator[int]:
    """One length for each answer; those that the log does not hold are drawn."""
    if observed.was_redrawn:
        yield from survival.sample_lengths(len(places) * schedule.samples_per_prompt)
        return
    prompts = list(observed.prompts)
    for place in places:
        # Beyond what the run has started, its prompts come again.
        group, prompt = prompts[place % len(prompts)]
        for sample in range(schedule.samples_per_prompt):
            tokens, is_finished = observed.lengths.get((group, prompt, sample), (0, False))
            if not is_finished:
                longer = survival.longer_than(tokens) * uniform(seed, group, prompt, sample)
                tokens = max(tokens, survival.quantile(1 - longer))
            yield max(1, tokens)
