"""The prediction of a run by the simulator: its rounds, updates, bubble and hours.

The loop is the real one, on a virtual clock with the costs of a card and lengths that are given or
guessed. Only the first groups are simulated; counts and hours grow with the prompts from there.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from sortedrl.config.checks import require
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.core.buffer import open_group
from sortedrl.runs.plan.cards import Card, Demand
from sortedrl.runs.plan.memory import MemoryPlan
from sortedrl.simulate.compare import SimulationResult, simulate
from sortedrl.simulate.conversations import Conversations, ConversationSettings
from sortedrl.simulate.costs import Costs, CostSettings
from sortedrl.simulate.lengths import Lengths, LengthSettings
from sortedrl.simulate.settings import Simulation
from sortedrl.types import Prompt

_MOST_GROUPS, _MOST_GROUPS_OF_SEVERAL = 4, 16
_MOST_TRAJECTORIES = 16384
_GUESSED_SHARE, _SIGMA = 1097 / 8192, 1.0
_SAMPLE = 1024
_FORWARD, _BACKWARD, _BACKWARD_ADAPTERS = 2, 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePlan:
    """The course of a run: counted as far as it was simulated, in proportion beyond."""

    prompts: int
    """Rows times epochs."""
    trajectories: int
    groups: int
    """How often prompts are loaded."""
    rounds: int
    updates: int
    updates_per_epoch: float
    rounds_bound: int | None
    staleness_bound: int | None
    simulated_prompts: int

    @property
    def is_extrapolated(self) -> bool:
        """Whether the run is longer than what was simulated."""
        return self.simulated_prompts < self.prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationPlan:
    """The conversations of a prediction: means over those that were simulated."""

    turns: float
    given_tokens: float
    """Tokens of all replies of a conversation."""
    reply_seconds: float
    """Time of one reply."""
    outside_bubble: float
    """The part of the bubble in which a tool worked for each idle slot."""
    are_guessed: bool
    """Whether anything of this is a guess."""
    fills_context: bool
    """Whether replies were planned shorter, because the context has no room for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The simulator's numbers for a run."""

    schedule: SchedulePlan
    slots: int
    """Answers that run at the same time, as far as the cache has room for them."""
    mean_length: float
    bubble: float
    goodput: float
    """Trained tokens per second of rollout."""
    trained_per_second: float
    """Trained tokens per second of everything."""
    rollout_share: float
    """Share of the time in which answers are written."""
    mean_staleness: float
    hours: float
    sync_bubble: float
    """The same run with strategy sync."""
    sync_goodput: float
    sync_hours: float
    are_lengths_guessed: bool
    conversations: ConversationPlan | None = None
    """`None` for single answers."""


def guessed_lengths(
    max_tokens: int, *, mean: float | None = None, prompt_tokens: int = 256
) -> LengthSettings:
    """A long-tailed guess: lognormal with this mean, or as far below the limit as the paper's."""
    require(mean is None or mean > 0, f"the mean length must be positive, got {mean}")
    median = _GUESSED_SHARE * max_tokens if mean is None else mean / math.exp(_SIGMA**2 / 2)
    return LengthSettings(median=max(1.0, median), sigma=_SIGMA, prompt_tokens=prompt_tokens)


def predict(
    memory: MemoryPlan,
    schedule: Schedule,
    *,
    card: Card,
    device_bytes: int,
    num_rows: int,
    epochs: int = 1,
    max_updates: int | None = None,
    batch_epochs: int = 1,
    has_first_pass: bool = False,
    lengths: LengthSettings | None = None,
    prompt_tokens: int | None = None,
    conversations: ConversationSettings | None = None,
    are_turns_guessed: bool = False,
) -> Prediction:
    """The numbers of a run on a card; lengths that are not given are guessed.

    `prompt_tokens` is the mean for the guess, by default the longest. With `conversations`, lengths
    are the tokens that the policy writes in a whole one.

    `batch_epochs` is how often an update goes through its batch, and `has_first_pass` whether it
    computes the log-probabilities of the whole batch before it learns: for several steps, or for a
    divergence in the reward.
    """
    demand = memory.demand
    room = min(demand.max_tokens, demand.shape.context - demand.prompt_tokens)
    known = lengths or guessed_lengths(room, prompt_tokens=prompt_tokens or demand.prompt_tokens)
    drawn = _drawn_lengths(known, demand)
    talk = None
    fills_context = False
    if conversations is not None:
        known = _per_turn(known, conversations)
        fitting = _fitting(conversations, known, demand)
        # A guess is adjusted to fit; given lengths are not, and the plan says so.
        fills_context = fitting != conversations and not are_turns_guessed
        conversations = fitting
        talk = _drawn_conversations(known, conversations, demand)
        drawn = [one.written for one in talk]
    mean = sum(drawn) / len(drawn)
    given = 0.0 if talk is None else sum(one.given for one in talk) / len(talk)
    # A long answer is met more often in a slot than it is drawn, on average half written.
    resident = known.prompt_tokens + given / 2 + sum(n * n for n in drawn) / (2 * sum(drawn))
    slots = max(1, min(demand.slots, int(memory.cache_tokens(device_bytes) / resident)))
    costs = _costs(
        demand,
        card=card,
        work=_work(demand, batch_epochs=batch_epochs, has_first_pass=has_first_pass),
        # An update goes through the prompts as well, and the simulator counts answers only.
        longer=1 + (known.prompt_tokens + given) / mean,
    )
    simulation = _simulation(
        schedule,
        prompts=num_rows * epochs,
        engine=EngineSettings(slots=slots, max_tokens=room),
        lengths=known,
        costs=CostSettings(hardware="ticks", **asdict(costs)),
        most_groups=_MOST_GROUPS_OF_SEVERAL if demand.cluster.is_used else _MOST_GROUPS,
    )
    if conversations is not None:
        simulation = replace(simulation, conversations=conversations)
    outcome = simulate(simulation)
    sync = simulate(replace(simulation, schedule=_as_sync(schedule)))
    course, sync_course = (
        _course(one, num_rows=num_rows, epochs=epochs, max_updates=max_updates)
        for one in (outcome, sync)
    )
    run = outcome.metrics.run
    return Prediction(
        schedule=course,
        slots=slots,
        mean_length=mean,
        bubble=run.bubble,
        goodput=run.goodput,
        trained_per_second=run.trained_per_second,
        rollout_share=run.rollout_seconds / run.seconds,
        mean_staleness=run.mean_staleness,
        hours=_hours(outcome, course),
        sync_bubble=sync.metrics.run.bubble,
        sync_goodput=sync.metrics.run.goodput,
        sync_hours=_hours(sync, sync_course),
        are_lengths_guessed=lengths is None
        and (conversations is None or conversations.log is None),
        conversations=None
        if talk is None
        else ConversationPlan(
            turns=sum(one.turns for one in talk) / len(talk),
            given_tokens=given,
            reply_seconds=sum(one.seconds for one in talk)
            / max(1, sum(one.turns - 1 for one in talk)),
            outside_bubble=run.outside_bubble,
            are_guessed=are_turns_guessed,
            fills_context=fills_context,
        ),
    )


@dataclass(frozen=True, slots=True)
class _Conversation:
    """A conversation as the simulator draws it, without a limit of the context."""

    turns: int
    written: int
    given: int
    seconds: float


def _per_turn(lengths: LengthSettings, conversations: ConversationSettings) -> LengthSettings:
    """Lengths of whole conversations as those of turns."""
    if conversations.log is not None:
        return lengths
    turns = min(conversations.turns, conversations.max_turns or conversations.turns)
    return replace(lengths, median=max(1.0, lengths.median / turns))


def _fitting(
    conversations: ConversationSettings, lengths: LengthSettings, demand: Demand
) -> ConversationSettings:
    """The conversations with replies that leave room in the context for what is written."""
    written = min(demand.max_tokens, conversations.turns * lengths.median)
    room = max(1.0, demand.shape.context - demand.prompt_tokens - written)
    most = room / max(1.0, conversations.turns)
    return replace(conversations, given_tokens=min(conversations.given_tokens, most))


def _drawn_conversations(
    lengths: LengthSettings, settings: ConversationSettings, demand: Demand
) -> list[_Conversation]:
    plain = Lengths(lengths, seed=0, max_tokens=demand.max_tokens, samples_per_prompt=1)
    source = Conversations(settings, lengths=plain)
    prompts = [Prompt(id=number) for number in range(_SAMPLE)]
    found = []
    for fresh in open_group(prompts, group=0, samples_per_prompt=1, seed=0):
        now, seconds = fresh, 0.0
        while True:
            written = source.length(now, version=0)
            fill = written - now.num_tokens
            now = now.extended(range(fill), [0.0] * fill, version=0)
            is_over = now.num_turns >= source.num_turns(fresh) or written >= demand.max_tokens
            if is_over:
                break
            seconds += source.seconds_outside(now)
            now = replace(now, given=range(source.num_given(now)))
        found.append(_Conversation(now.num_turns, now.num_tokens, now.num_given, seconds))
    return found


def _costs(demand: Demand, *, card: Card, work: int, longer: float) -> Costs:
    """The costs of the simulation; `longer` are the tokens of an update per answer token."""
    shape, size, cluster = demand.shape, demand.number_bytes, demand.cluster
    costs = card.costs(
        shape, number_bytes=size, cluster=cluster, optimiser_state=demand.optimiser_state
    )
    scale = work / (_FORWARD + _BACKWARD) * longer
    computing = costs.update_token_seconds * scale
    if cluster.num_ranks == 1:
        return replace(costs, update_token_seconds=computing)
    models = 2 if demand.has_critic else 1
    passes = card.pass_seconds(
        shape, number_bytes=size, cluster=cluster, trained=demand.trained_parameters
    )
    if demand.has_critic:
        passes += card.pass_seconds(shape, number_bytes=size, cluster=cluster)
    moving = passes * longer / (cluster.trainer_devices * demand.pass_tokens)
    return replace(
        costs,
        update_seconds=models * costs.update_seconds,
        update_token_seconds=max(computing, moving),
    )


def _hours(outcome: SimulationResult, course: SchedulePlan) -> float:
    run = outcome.metrics.run
    return run.seconds / run.trajectories * course.trajectories / 3600


def _simulation(
    schedule: Schedule,
    *,
    prompts: int,
    engine: EngineSettings,
    lengths: LengthSettings,
    costs: CostSettings,
    most_groups: int,
) -> Simulation:
    """The first groups of a run; at least one, and no more than can be simulated in seconds.

    What is loaded together is simulated as a whole: a smaller last load would be counted as often
    as the others.
    """
    require(prompts >= 1, f"a run must have at least 1 prompt, got {prompts}")
    groups = min(most_groups, max(1, _MOST_TRAJECTORIES // schedule.group_trajectories))
    load = schedule.group_prompts
    if schedule.strategy == "sync":
        load = -(-schedule.update_batch // schedule.samples_per_prompt)
    whole = groups * schedule.group_prompts
    return Simulation(
        prompts=min(prompts, whole - whole % load),
        schedule=schedule,
        engine=engine,
        lengths=lengths,
        costs=costs,
    )


def _course(
    outcome: SimulationResult, *, num_rows: int, epochs: int, max_updates: int | None
) -> SchedulePlan:
    simulation, metrics = outcome.simulation, outcome.metrics
    schedule, prompts = simulation.schedule, num_rows * epochs

    def extrapolated(simulated: int, prompts: int) -> int:
        return -(-simulated * prompts // simulation.num_prompts)

    updates = extrapolated(metrics.run.updates, prompts)
    until = prompts if max_updates is None else min(prompts, -(-prompts * max_updates // updates))
    return SchedulePlan(
        prompts=until,
        trajectories=until * schedule.samples_per_prompt,
        groups=extrapolated(len(metrics.groups), until),
        rounds=extrapolated(len(metrics.rounds), until),
        updates=updates if max_updates is None else min(updates, max_updates),
        updates_per_epoch=updates / epochs,
        rounds_bound=schedule.rounds_bound,
        staleness_bound=schedule.staleness_bound,
        simulated_prompts=simulation.num_prompts,
    )


def _as_sync(schedule: Schedule) -> Schedule:
    return replace(
        schedule,
        strategy="sync",
        mode="on_policy",
        tolerance=None,
        max_staleness=None,
        lookahead=0,
    )


def _drawn_lengths(settings: LengthSettings, demand: Demand) -> list[int]:
    lengths = Lengths(settings, seed=0, max_tokens=demand.max_tokens, samples_per_prompt=1)
    prompts = [Prompt(id=number) for number in range(_SAMPLE)]
    fresh = open_group(prompts, group=0, samples_per_prompt=1, seed=0)
    return [lengths.length(trajectory, version=0) for trajectory in fresh]


def _work(demand: Demand, *, batch_epochs: int, has_first_pass: bool) -> int:
    """Operations of an update per parameter and token."""
    again = _FORWARD if demand.gradient_checkpointing else 0
    backward = _BACKWARD if demand.lora_rank is None else _BACKWARD_ADAPTERS
    work = batch_epochs * (_FORWARD + again + backward)
    work += _FORWARD * (has_first_pass + demand.has_reference)
    if demand.has_critic:
        work += _FORWARD + batch_epochs * (_FORWARD + again + _BACKWARD)
    return work
