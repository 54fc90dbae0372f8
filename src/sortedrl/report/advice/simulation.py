"""Reconstructs a run from its log as a simulation: costs, lengths and prompts.

Idle slot-seconds of the rollout are split into three kinds that add up to all of them:
`tail`: nothing waited, but more prompts were to come (the last long answers of a group);
`ending`: nothing waited after the last prompts of the data were loaded;
`elsewhere`: trajectories waited that the strategy did not start.
Settings that a log does not show keep their defaults, such as tolerance and max_restarts.

If no answer was resampled, the simulation replays the lengths answer by answer, so groups keep
their easy and hard prompts, and lengths may grow as the run learns. If answers were resampled, the
trained ones are shorter than what the policy generates, so lengths are sampled from the estimate of
`simulate.lengths`; the similarity of resampled answers is then chosen so that the simulated run
trains on answers as long as the real one did. A long run is thinned to some of its groups, evenly
spread.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import cast, get_args

from sortedrl.config.schedule import EngineSettings, HarvestUnit, ModeName, Schedule, StrategyName
from sortedrl.core.events import (
    Begin,
    End,
    Event,
    Finish,
    Harvest,
    Interrupt,
    Landed,
    Load,
    Pause,
    Renew,
    Reply,
    Resume,
    Score,
    Start,
    SyncWeights,
    Update,
)
from sortedrl.core.meter import Figures, Meter
from sortedrl.core.randomness import uniform
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.costs import Costs, CostSettings
from sortedrl.simulate.lengths import LengthSettings, Survival, length_observations, written_lengths
from sortedrl.simulate.settings import Simulation
from sortedrl.types import Key

_LEAST_RESUMES = 20

_GROUP_BATCHES = 4


@dataclass(slots=True)
class ObservedAnswers:
    """The answers of a run so far."""

    slots: int = 1
    is_ended: bool = False
    was_redrawn: bool = False
    """Whether any answer was discarded and sampled again with new noise."""
    num_prompts: int = 0
    num_trained: int = 0
    trained_tokens: int = 0
    num_finished: int = 0
    num_truncated: int = 0
    longest: int = 1
    prompts: dict[tuple[int, int], int] = field(default_factory=dict)
    """Tokens of each prompt by group and id, in the order of their first start."""
    lengths: dict[tuple[int, int, int], tuple[int, bool]] = field(default_factory=dict)
    """By group, prompt and sample: the last number of tokens, and whether it was complete."""
    resumes: int = 0
    diverged: int = 0
    """Resumes that lost cached tokens."""
    survived_ages: int = 0
    """Cached tokens that survived a resume, multiplied by the versions they were behind."""

    @property
    def mismatch_rate(self) -> float | None:
        """Probability of rejecting a cached token, per token and version; `None`: too few seen."""
        if self.resumes < _LEAST_RESUMES or not self.survived_ages:
            return None
        return self.diverged / (self.survived_ages + self.diverged)


def observed_answers(events: Iterable[Event]) -> ObservedAnswers:
    """The answers of a log."""
    watch = _AnswerCounter()
    for event in events:
        watch(event)
    return watch.observed


@dataclass(slots=True)
class _Submission:
    """The last time an answer was submitted to the engine."""

    group: int
    version: int
    cached: int = 0
    age: int = 0


class _AnswerCounter:
    def __init__(self) -> None:
        self.observed = ObservedAnswers()
        self._version = 0
        self._submissions: dict[Key, _Submission] = {}

    def __call__(self, event: Event) -> None:
        observed = self.observed
        if isinstance(event, Begin):
            observed.slots = event.slots
        elif isinstance(event, SyncWeights | Resume):
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
                del self._submissions[(trained.prompt, trained.sample)]
        elif isinstance(event, End):
            observed.is_ended = True

    def _start(self, event: Start) -> None:
        key = (event.prompt, event.sample)
        self.observed.prompts.setdefault((event.group, event.prompt), event.prompt_tokens)
        self.observed.was_redrawn |= event.attempt > 0
        before = self._submissions.get(key)
        age = 0 if before is None else self._version - before.version
        self._submissions[key] = _Submission(event.group, self._version, event.cached, age)

    def _stop(self, event: Finish | Interrupt) -> None:
        observed = self.observed
        submission = self._submissions[(event.prompt, event.sample)]
        is_finished = isinstance(event, Finish)
        observed.lengths[(submission.group, event.prompt, event.sample)] = (
            event.tokens,
            is_finished,
        )
        observed.longest = max(observed.longest, event.tokens)
        if isinstance(event, Finish):
            observed.num_finished += 1
            observed.num_truncated += event.reason == "length"
        kept = event.tokens - event.decoded
        if submission.cached and submission.age:
            observed.resumes += 1
            observed.diverged += kept < submission.cached
            observed.survived_ages += kept * submission.age


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleSlots:
    """Idle slot-seconds of the rollout by kind, and slot occupancy."""

    tail: float = 0.0
    ending: float = 0.0
    elsewhere: float = 0.0
    rollout_seconds: float = 0.0
    full_seconds: float = 0.0
    """Seconds of rollout with all slots busy."""
    peak: int = 0
    """Maximum number of answers running at the same time."""

    @property
    def total(self) -> float:
        """All idle slot-seconds of the rollout."""
        return self.tail + self.ending + self.elsewhere

    @property
    def tail_share(self) -> float:
        """Share of the idle slot-seconds that more waiting prompts would have filled."""
        return self.tail / self.total if self.total else 0.0

    @property
    def full_share(self) -> float:
        """Share of the rollout with all slots busy."""
        return self.full_seconds / self.rollout_seconds if self.rollout_seconds else 0.0


def idle(events: Iterable[Event]) -> IdleSlots:
    """The idle slot-seconds of a log."""
    slots, now = 1, None
    running = waiting = peak = 0
    is_rollout, is_ended = True, False
    tail = elsewhere = rollout = full = tail_at_last_load = 0.0
    for event in events:
        passed = event.seconds - now if now is not None and is_rollout else 0.0
        now = event.seconds
        free = slots - min(running, slots)
        rollout += passed
        full += 0.0 if free else passed
        tail += 0.0 if waiting else passed * free
        elsewhere += passed * free if waiting else 0.0
        if isinstance(event, SyncWeights | Load | Start | Harvest):
            is_rollout = not isinstance(event, Harvest)
        if isinstance(event, Begin):
            slots = event.slots
        elif isinstance(event, Load):
            waiting += event.trajectories
            tail_at_last_load = tail
        elif isinstance(event, Start | Finish | Interrupt | Pause):
            waiting += isinstance(event, Interrupt) - isinstance(event, Start)
            running = event.running
            peak = max(peak, running)
        elif isinstance(event, Renew | Reply):
            waiting += 1
        is_ended = isinstance(event, End)
    before_end = tail_at_last_load if is_ended else tail
    return IdleSlots(
        tail=before_end,
        ending=tail - before_end,
        elsewhere=elsewhere,
        rollout_seconds=rollout,
        full_seconds=full,
        peak=peak,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondsSpent:
    """The seconds of a run by activity; they add up to all of them."""

    rollouts: float
    rewards: float
    """Waiting for the rewards of an update."""
    updates: float
    weight_syncs: float
    saving: float
    """Checkpoints and logs: the time from an update to the next event."""
    rest: float


def seconds_spent(events: Iterable[Event], run: Figures) -> SecondsSpent:
    """Split the seconds of a run by activity; `run` has its totals."""
    waiting = updating = syncing = saving = 0.0
    before: Event | None = None
    for event in events:
        took = 0.0
        if isinstance(event, Score | Landed):
            took = event.waited_seconds
        elif isinstance(event, SyncWeights | Update):
            took = event.took_seconds
        waiting += took if isinstance(event, Score) else 0.0
        syncing += took if isinstance(event, SyncWeights) else 0.0
        updating += took if isinstance(event, Update | Landed) else 0.0
        if isinstance(before, Update | Landed) and not isinstance(event, Resume):
            saving += max(0.0, event.seconds - took - before.seconds)
        before = event
    # The time of an update includes the wait for its rewards.
    updating = max(0.0, updating - waiting)
    known = run.rollout_seconds + waiting + updating + syncing + saving
    return SecondsSpent(
        rollouts=run.rollout_seconds,
        rewards=waiting,
        updates=updating,
        weight_syncs=syncing,
        saving=saving,
        rest=max(0.0, run.seconds - known),
    )


def observed_schedule(events: Sequence[Event]) -> Schedule | None:
    """The schedule that wrote these events; `None` if the log is too short.

    If the strategy does not use groups, a group is taken as four update batches.
    """
    begin = next((e for e in events if isinstance(e, Begin)), None)
    loads = [e for e in events if isinstance(e, Load) and e.prompts]
    updates = [e for e in events if isinstance(e, Update) and e.trained]
    if begin is None or not loads or not updates:
        return None
    strategy, mode, lookahead = _named(begin.schedule)
    samples = max(1, loads[0].trajectories // loads[0].prompts)
    # The last update takes the rest of the data, and any update may take more than a batch.
    batch = min(len(update.trained) for update in updates[:-1] or updates)
    prompts = max(load.prompts for load in loads)
    if not shows_group(strategy):
        prompts = max(1, _GROUP_BATCHES * batch // samples)
    over_launch = 1.25
    if strategy in ("tail_batching", "april"):
        over_launch = max(1.0, loads[0].trajectories / batch)
    return Schedule(
        strategy=strategy,
        mode=mode,
        group_prompts=max(prompts, math.ceil(batch / samples)),
        samples_per_prompt=samples,
        update_batch=batch,
        lookahead=lookahead,
        harvest_unit=_unit(updates, samples),
        max_staleness=_max_staleness(events, updates) if mode == "partial" else None,
        over_launch=over_launch,
    )


def shows_group(strategy: StrategyName) -> bool:
    """Whether the loads of a log show the size of a group."""
    return strategy in ("sorted", "minibatch", "posthoc", "ungrouped")


def _named(name: str) -> tuple[StrategyName, ModeName, int]:
    """Parse `Schedule.name` into strategy, mode and lookahead."""
    rules, _, ahead = name.partition(" +")
    strategy, _, mode = rules.partition("/")
    if strategy not in get_args(StrategyName) or mode not in ("", *get_args(ModeName)):
        return "sorted", "partial", 0
    return (
        cast(StrategyName, strategy),
        cast(ModeName, mode or "on_policy"),
        int(ahead) if ahead.isdecimal() else 0,
    )


def _unit(updates: Sequence[Update], samples: int) -> HarvestUnit:
    """`prompt` if no update had some of a prompt's answers without the others."""
    if samples == 1:
        return "trajectory"
    for update in updates:
        answers = Counter(trained.prompt for trained in update.trained)
        if any(count < samples for count in answers.values()):
            return "trajectory"
    return "prompt"


def _max_staleness(events: Sequence[Event], updates: Sequence[Update]) -> int | None:
    """The staleness of the oldest trained tokens, if older ones were dropped."""
    if not any(isinstance(event, Start) and event.dropped for event in events):
        return None
    return max(trained.staleness_max for update in updates for trained in update.trained)


_MOST_TRAJECTORIES = 4096
_LEAST_GROUPS = 4
_HALVINGS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The measured or predicted numbers of a run."""

    bubble: float
    goodput: float
    """Trained tokens per second of rollout."""
    trained_per_second: float
    """Trained tokens per second of the whole run."""
    seconds: float
    """Time to train as many answers as the run did."""
    mean_length: float
    mean_staleness: float
    max_staleness: int
    discarded_share: float
    """Tokens discarded over tokens decoded."""
    rollout_share: float
    """Share of the time spent in rollouts."""
    updates: float
    """Updates for as many answers as the run trained on."""


def forecast(figures: Figures, *, trajectories: int) -> Forecast:
    """Scale seconds and updates of the figures to this many trajectories."""
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
    """Run a simulation, by default to its end, or until `stop_after` trajectories are trained.

    Seconds and updates are scaled to `trajectories`.
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
    """The simulation that reproduces a run."""

    simulation: Simulation
    compared_trajectories: int | None
    """Trained trajectories after which the simulation is where the log ends; `None`: at its own
    end."""
    is_mismatch_measured: bool
    """Whether the loss of cached tokens in coupled mode is measured from this run."""


def fitted_run(
    events: Sequence[Event],
    observed: ObservedAnswers,
    *,
    schedule: Schedule,
    engine: EngineSettings | None,
    costs: Costs,
    seed: int,
) -> FittedRun:
    """The run that wrote these events, as a simulation."""
    survival = written_lengths(length_observations(events))
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
    """Fit the share of the prompt in an answer's length, by bisection.

    Resampled answers resemble the ones they replace: the more similar they are, the longer are
    the answers that are trained on.
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
    """The prompts to simulate, as positions in the order of the run.

    A run in progress gets a few more groups, or there would be nothing to look ahead to.
    """
    size, count = schedule.group_prompts, observed.num_prompts
    if not observed.is_ended:
        count = max(count, _LEAST_GROUPS * size)
    groups, most = -(-count // size), max(2, _MOST_TRAJECTORIES // schedule.group_trajectories)
    if groups <= most:
        return list(range(count))
    # Without the last group, which may be smaller but would count as much as the others.
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
    """One length for each answer; those missing from the log are sampled."""
    if observed.was_redrawn:
        yield from survival.sample_lengths(len(places) * schedule.samples_per_prompt)
        return
    prompts = list(observed.prompts)
    for place in places:
        # Prompts that the run has not started yet repeat earlier ones.
        group, prompt = prompts[place % len(prompts)]
        for sample in range(schedule.samples_per_prompt):
            tokens, is_finished = observed.lengths.get((group, prompt, sample), (0, False))
            if not is_finished:
                longer = survival.longer_than(tokens) * uniform(seed, group, prompt, sample)
                tokens = max(tokens, survival.quantile(1 - longer))
            yield max(1, tokens)
