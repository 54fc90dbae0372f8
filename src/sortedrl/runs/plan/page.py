"""The plan of a run on one page, for people and programs, with advice where a run does not fit.

The advice is the fewest changes that fit, computed: every change is tried on the memory plan itself
and on the settings, so what `train` would refuse is never advised. A number is the largest that
runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import combinations

from sortedrl.config.parsing import nested, replaced, toml_value
from sortedrl.config.schedule import Schedule
from sortedrl.config.train import TrainSettings
from sortedrl.errors import ConfigError
from sortedrl.evaluation.tables import several
from sortedrl.models.shape import Shape
from sortedrl.runs.plan.cards import Card, Demand
from sortedrl.runs.plan.memory import MemoryPlan, planned
from sortedrl.runs.plan.prediction import ConversationPlan, Prediction, SchedulePlan
from sortedrl.simulate.compare import PREDICTION_ERROR

_RANK = 16
_LEAST_TOKENS = 256
_STEP_TOKENS = 64
_SHARES = 100
_MOST_RANKS = 1024

Lever = Callable[[Demand, int], Demand]
"""A demand that needs less, for a device of so many bytes; the same one if it cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Settings with which a run fits."""

    text: str
    demand: Demand

    @property
    def least(self) -> int:
        """The bytes it then takes at the least."""
        return planned(self.demand).least


def advice(
    plan: MemoryPlan, device_bytes: int, *, settings: TrainSettings | None = None
) -> tuple[Change, ...]:
    """The ways to make a run fit with the fewest changes; none where it fits as it is.

    With the settings of the run, only what they can be changed to.
    """
    if plan.can_run(device_bytes):
        return ()
    return (*_fewest(plan, device_bytes, settings), *_smaller_model(plan, device_bytes))


def refuse_too_big(
    plan: MemoryPlan, device_bytes: int, *, settings: TrainSettings | None = None
) -> None:
    """Raise `ConfigError` for a run that does not fit on the device, with changes that fit."""
    if plan.can_run(device_bytes):
        return
    ways = "; or ".join(change.text for change in advice(plan, device_bytes, settings=settings))
    demand = plan.demand
    why = (
        f" (a pass holds the {demand.sequence_tokens:,} tokens of the longest prompt and answer, "
        f"which is never split, so passes.micro_batch_tokens {demand.pass_tokens:,} does not help)"
        if demand.sequence_tokens > demand.pass_tokens
        else ""
    )
    raise ConfigError(
        f"the run must fit into the {size(plan.usable(device_bytes))} that a run can use of the "
        f"device's {size(device_bytes)}, and needs at least {size(plan.least)}{why}; "
        f"what would fit: {ways or 'no smaller run of this kind; take a larger device'}"
    )


def size(num_bytes: int) -> str:
    """Bytes as text."""
    if num_bytes < 1 << 30:
        return f"{num_bytes / (1 << 20):,.1f} MiB"
    return f"{num_bytes / (1 << 30):,.1f} GiB"


def count(parameters: int) -> str:
    """A number of parameters as text."""
    return f"{parameters / 1e9:.1f} G" if parameters >= 10**9 else f"{parameters / 1e6:.1f} M"


def _fewest(
    plan: MemoryPlan, device_bytes: int, settings: TrainSettings | None
) -> Iterator[Change]:
    """All ways with the smallest number of changes that fit."""
    is_found = False
    for number in range(1, len(_LEVERS) + 1):
        for levers in combinations(_LEVERS, number):
            demand = plan.demand
            changes = 0
            for lever in levers:
                pulled = lever(demand, device_bytes)
                changes += pulled != demand
                demand = pulled
            is_new = changes == number and planned(demand).can_run(device_bytes)
            if is_new and _is_accepted(settings, plan.demand, demand):
                is_found = True
                yield Change(text=_text(plan.demand, demand), demand=demand)
        if is_found:
            return


def _checkpointed(demand: Demand, device_bytes: int) -> Demand:
    return replace(demand, gradient_checkpointing=True)


def _more_ranks(demand: Demand, device_bytes: int) -> Demand:
    """Double the GPUs of the trainer until it fits; a single process stays one."""
    more = demand
    while 1 < more.cluster.trainer_devices < _MOST_RANKS and not planned(more).can_run(
        device_bytes
    ):
        cluster = more.cluster
        workers = cluster.num_workers * (2 if cluster.kind == "colocated" else 1)
        wider = replace(cluster, rollout_workers=workers, trainer_ranks=2 * cluster.trainer_ranks)
        more = replace(more, cluster=wider)
    return more


def _packed(demand: Demand, device_bytes: int) -> Demand:
    is_whole = demand.optimiser_state == "fp32"
    return replace(demand, optimiser_state="8bit") if is_whole else demand


def _state_on_host(demand: Demand, device_bytes: int) -> Demand:
    return replace(demand, optimiser_state="offload") if demand.is_gpu else demand


def _short_gradients(demand: Demand, device_bytes: int) -> Demand:
    is_bfloat16 = demand.precision == "bfloat16" and demand.lora_rank is None
    return replace(demand, gradients="weights") if is_bfloat16 else demand


def _adapted(demand: Demand, device_bytes: int) -> Demand:
    return replace(demand, lora_rank=_RANK) if demand.lora_rank is None else demand


def _without_reference(demand: Demand, device_bytes: int) -> Demand:
    # The reference of adapters is free.
    return replace(demand, has_reference=False) if demand.lora_rank is None else demand


def _without_critic(demand: Demand, device_bytes: int) -> Demand:
    return replace(demand, has_critic=False)


def _shorter_passes(demand: Demand, device_bytes: int) -> Demand:
    """No shorter than the longest answer: it would not be cut anyway."""

    def with_tokens(tokens: int) -> Demand:
        return replace(demand, pass_tokens=tokens)

    least = min(demand.sequence_tokens, demand.pass_tokens)
    return _largest(with_tokens, device_bytes, least=least, most=demand.pass_tokens)


def _shorter_answers(demand: Demand, device_bytes: int) -> Demand:
    """Passes that were as short as the longest answer can be shorten with it."""
    is_tight = demand.pass_tokens <= demand.sequence_tokens

    def with_tokens(tokens: int) -> Demand:
        passes = demand.prompt_tokens + tokens if is_tight else demand.pass_tokens
        return replace(demand, max_tokens=tokens, pass_tokens=min(passes, demand.pass_tokens))

    least = min(_LEAST_TOKENS, demand.max_tokens)
    return _largest(with_tokens, device_bytes, least=least, most=demand.max_tokens)


_LEVERS: tuple[Lever, ...] = (
    _checkpointed,
    _packed,
    _state_on_host,
    _short_gradients,
    _adapted,
    _without_reference,
    _without_critic,
    _shorter_passes,
    _shorter_answers,
    _more_ranks,
)
"""In the order in which they are pulled: numbers last, so that they stay as large as they can."""


def _largest(
    with_tokens: Callable[[int], Demand], device_bytes: int, *, least: int, most: int
) -> Demand:
    """The demand with the most tokens that run, in steps; with the least if none do."""
    steps = bisect_left(
        range((most - least) // _STEP_TOKENS + 1),
        True,
        key=lambda n: not planned(with_tokens(least + _STEP_TOKENS * n)).can_run(device_bytes),
    )
    return with_tokens(least + _STEP_TOKENS * max(0, steps - 1))


def _changed_settings(before: Demand, after: Demand) -> dict[str, object]:
    """The changed settings, by their keys."""
    old, new = before.cluster, after.cluster
    pairs: tuple[tuple[str, object, object], ...] = (
        (
            "passes.gradient_checkpointing",
            before.gradient_checkpointing,
            after.gradient_checkpointing,
        ),
        ("optimiser.state", before.optimiser_state, after.optimiser_state),
        ("optimiser.gradients", before.gradients, after.gradients),
        ("lora.rank", before.lora_rank, after.lora_rank),
        ("passes.micro_batch_tokens", before.pass_tokens, after.pass_tokens),
        ("engine.max_tokens", before.max_tokens, after.max_tokens),
        ("cluster.rollout_workers", old.rollout_workers, new.rollout_workers),
        ("cluster.trainer_ranks", old.trainer_ranks, new.trainer_ranks),
    )
    changed = {key: value for key, was, value in pairs if value != was}
    if after.has_reference != before.has_reference:
        changed["algorithm.kl_coef"] = 0.0
    return changed


def _is_accepted(settings: TrainSettings | None, before: Demand, after: Demand) -> bool:
    """Whether `train` would run the settings with these changes."""
    if settings is None:
        return True
    try:
        replaced(settings, nested(_changed_settings(before, after)))
    except ConfigError:
        return False
    return True


def _text(before: Demand, after: Demand) -> str:
    """The changed settings as text."""
    changes = [
        f"{key} = {toml_value(value)}" for key, value in _changed_settings(before, after).items()
    ]
    if after.has_critic != before.has_critic:
        changes.append("an algorithm without a critic (not ppo)")
    return " and ".join(changes)


def _smaller_model(plan: MemoryPlan, device_bytes: int) -> Iterator[Change]:
    """The widest model of the same depth and vocabulary that runs with these settings."""
    shape = plan.demand.shape

    def with_share(share: int) -> Demand:
        return replace(plan.demand, shape=_narrowed(shape, share / _SHARES))

    fitting = bisect_left(
        range(1, _SHARES), True, key=lambda n: not planned(with_share(n)).can_run(device_bytes)
    )
    if fitting:
        demand = with_share(fitting)
        yield Change(
            text=f"a model of about {count(demand.shape.parameters)} parameters in place "
            f"of {count(shape.parameters)}",
            demand=demand,
        )


def _narrowed(shape: Shape, share: float) -> Shape:
    """The shape with every width cut to a share; a layer shrinks by its square."""
    embeddings = shape.vocabulary * shape.hidden + shape.output_parameters
    layers = shape.parameters - embeddings
    return replace(
        shape,
        parameters=int(embeddings * share + layers * share**2),
        hidden=max(1, int(shape.hidden * share)),
        inner=max(1, int(shape.inner * share)),
        head_dim=max(1, int(shape.head_dim * share)),
        linear_width=int(shape.linear_width * share),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The plan of a run."""

    card: Card
    device_bytes: int
    settings: TrainSettings
    memory: MemoryPlan
    prediction: Prediction | None
    """`None` for a run that does not fit."""

    @property
    def fits(self) -> bool:
        """Whether it can run."""
        return self.memory.can_run(self.device_bytes)

    @property
    def schedule(self) -> Schedule:
        """The strategy with its settings."""
        return self.settings.schedule

    @property
    def changes(self) -> tuple[Change, ...]:
        """Changes with which the run fits, if it does not."""
        return advice(self.memory, self.device_bytes, settings=self.settings)


def lines(plan: RunPlan) -> list[str]:
    """The plan for a terminal."""
    text = [*_model_lines(plan), "", *_memory_lines(plan)]
    if not plan.fits:
        text += ["", "It does not fit. Changes that would make it fit:"]
        text += [f"  {change.text}  (needs {size(change.least)})" for change in plan.changes]
        return text
    if plan.prediction is not None:
        text += ["", *_course_lines(plan.schedule, plan.prediction.schedule)]
        text += ["", *_prediction_lines(plan.prediction, plan.memory.demand.slots)]
    return text


def to_json(plan: RunPlan) -> dict[str, object]:
    """The plan as plain values."""
    memory = plan.memory
    return {
        "device": plan.card.text,
        "device_bytes": plan.device_bytes,
        "usable_bytes": memory.usable(plan.device_bytes),
        "demand": asdict(memory.demand),
        "memory": asdict(memory.parts)
        | {
            "total": memory.total,
            "least": memory.least,
            "cache_that_fits": memory.cache_bytes(plan.device_bytes),
            "host": memory.host_bytes,
        },
        "fits": plan.fits,
        "advice": [{"text": change.text, "least": change.least} for change in plan.changes],
        "schedule": asdict(plan.schedule),
        "prediction": None if plan.prediction is None else asdict(plan.prediction),
    }


def _model_lines(plan: RunPlan) -> list[str]:
    demand = plan.memory.demand
    shape = demand.shape
    trained = (
        "all of them trained"
        if demand.lora_rank is None
        else f"adapters of rank {demand.lora_rank} trained: {count(demand.adapter_parameters)}"
    )
    text = [
        f"model      {shape.name}: {count(shape.parameters)} parameters in {demand.precision}, "
        f"{trained}",
        f"           {shape.layers} layers of width {shape.hidden}, vocabulary "
        f"{shape.vocabulary:,}, context {shape.context:,}",
        _device_line(plan),
    ]
    if demand.cluster.is_used:
        text += _cluster_lines(plan)
    if demand.prompt_tokens + demand.max_tokens > shape.context:
        room = shape.context - demand.prompt_tokens
        text.insert(
            2,
            f"           after the longest prompt ({demand.prompt_tokens:,}) it has room for "
            f"{room:,} tokens, not for {demand.max_tokens:,}",
        )
    return text


def _device_line(plan: RunPlan) -> str:
    devices = plan.memory.demand.cluster.num_devices
    room = f"{size(plan.memory.usable(plan.device_bytes))} of {size(plan.device_bytes)} usable"
    if devices == 1:
        return f"device     {plan.card.text}, {room}"
    return f"devices    {devices} x {plan.card.text}, {room} on each"


def _cluster_lines(plan: RunPlan) -> list[str]:
    demand, cluster = plan.memory.demand, plan.memory.demand.cluster
    workers = several(cluster.num_workers, "rollout worker")
    ranks = several(cluster.trainer_ranks, "trainer rank")
    if not cluster.trainer_ranks:
        ranks = "the trainer in the controller's process"
    if not demand.is_gpu:
        return [f"cluster    {workers} and {ranks}, planned as all on this machine"]
    on = several(cluster.tensor_parallel, "GPU") + (" each" if cluster.num_workers > 1 else "")
    shared = (
        f"{ranks} on others; below is what one GPU of each kind holds"
        if demand.is_separated
        else f"{ranks} on the same GPUs, in turns; below is what one of them holds"
    )
    return [f"cluster    {workers} on {on}, {shared}"]


def _memory_lines(plan: RunPlan) -> list[str]:
    memory, demand = plan.memory, plan.memory.demand
    parts = memory.parts
    tokens = max(demand.pass_tokens, demand.sequence_tokens)
    pass_text = f"one pass of {tokens:,} tokens"
    if demand.gradient_checkpointing:
        pass_text += ", with gradient checkpointing"
    rows = [
        ("weights", parts.weights, _weights_text(plan)),
        ("masters", parts.masters, "fp32 copies of the weights"),
        ("moments", parts.moments, _MOMENTS_TEXT[demand.optimiser_state]),
        ("gradients", parts.gradients, _gradients_text(plan)),
        ("reference", parts.reference, "the model the run began with"),
        ("critic", parts.critic, "a second model, trained too"),
        ("engine", parts.engine, "the engine's own weights"),
        ("gathered", parts.gathered, "layers in use, gathered"),
        ("activations", parts.activations, pass_text),
        ("logits", parts.logits, "a chunk at a time"),
        ("rollout", parts.rollout, "an engine's pass beyond what an update takes"),
    ]
    rows = [row for row in rows if row[1]]
    rows.append(("cache", parts.cache, _cache_text(plan)))
    if demand.takes_turns:
        least = size(memory.least)
        update = f"an update, while the engine sleeps; with the smallest cache at least {least}"
        rows.append(("update", memory.update_bytes, update))
        rows.append(("generation", memory.rollout_bytes, "with the models of the trainer"))
    elif demand.is_separated:
        least = size(parts.generation + demand.least_cache_bytes)
        engine = f"engine, rollout and cache; at least {least}, with the smallest cache"
        rows.append(("trainer GPU", parts.trainer, "all but engine, rollout and cache"))
        rows.append(("engine GPU", parts.generation + parts.cache, engine))
    else:
        least = size(memory.least)
        rows.append(("all", memory.total, f"at least {least}, with the smallest cache"))
    if memory.host_bytes:
        when = "" if demand.optimiser_state == "offload" else ", while engines generate"
        rows.append(("main memory", memory.host_bytes, f"masters and moments, pinned{when}"))
    return [f"{name:<11} {size(num_bytes):>11}  {note}" for name, num_bytes, note in rows]


_MOMENTS_TEXT = {
    "fp32": "of AdamW, fp32",
    "8bit": "of AdamW, 8 bits",
    "offload": "of AdamW: pieces of what main memory holds",
}


def _gradients_text(plan: RunPlan) -> str:
    demand = plan.memory.demand
    is_short = demand.gradients == "weights" and demand.lora_rank is None
    return demand.precision if is_short else "fp32"


def _weights_text(plan: RunPlan) -> str:
    if plan.memory.demand.cluster.num_ranks > plan.memory.demand.ranks_per_device:
        return "one rank's share, as of everything the trainer holds"
    return "of the trainer" if plan.memory.parts.engine else "shared by rollout and update"


def _cache_text(plan: RunPlan) -> str:
    memory, demand = plan.memory, plan.memory.demand
    fits = memory.cache_bytes(plan.device_bytes)
    slots = demand.engines_per_device * demand.engine_slots
    text = f"{slots} slots of up to {demand.sequence_tokens:,} tokens"
    if not plan.fits:
        return f"{text}; one takes {size(demand.least_cache_bytes)}"
    if fits < memory.parts.cache:
        longest = fits // demand.sequence_cache_bytes
        text += f"; {size(fits)} fit: {longest} slots at their longest, more while they are short"
    return text


def _course_lines(schedule: Schedule, course: SchedulePlan) -> list[str]:
    about = "about " if course.is_extrapolated else ""
    answers = "answer" if schedule.samples_per_prompt == 1 else "answers"
    return [
        f"schedule   {schedule.name}: {course.prompts:,} prompts with "
        f"{schedule.samples_per_prompt} {answers} each",
        f"           {about}{course.groups:,} groups, {course.rounds:,} rounds, "
        f"{course.updates:,} updates; {course.updates_per_epoch:,.0f} updates per epoch",
        f"bounds     {_rounds_text(course.rounds_bound)}; {_stale_text(course.staleness_bound)}",
    ]


def _rounds_text(bound: int | None) -> str:
    if bound is None:
        return "none on how long a prompt waits for its update"
    return f"every prompt is trained within {several(bound, 'round')} of its group's loading"


def _stale_text(bound: int | None) -> str:
    if bound is None:
        return "none on how old a token is when it is trained on"
    if bound == 0:
        return "no token is stale"
    return f"no token is more than {several(bound, 'version')} old"


def _prediction_lines(prediction: Prediction, slots: int) -> list[str]:
    lengths = "a guess" if prediction.are_lengths_guessed else "as given"
    text = [
        f"predicted  {_time(prediction.hours)} (sync: {_time(prediction.sync_hours)}); "
        f"bubble {100 * prediction.bubble:.1f} % (sync: {100 * prediction.sync_bubble:.1f} %)",
        f"           goodput {prediction.goodput:,.0f} trained tokens/s of rollout, "
        f"{prediction.trained_per_second:,.0f} with updates; rollout takes "
        f"{100 * prediction.rollout_share:.0f} % of the time",
    ]
    if abs(prediction.hours / prediction.sync_hours - 1) < PREDICTION_ERROR:
        text.append(
            "           the difference to sync is within the error of such predictions "
            f"({100 * PREDICTION_ERROR:.0f} %)"
        )
    if prediction.slots < slots:
        text.append(
            f"           the cache has room for about {prediction.slots} answers at a time, "
            f"not for {slots}"
        )
    if prediction.conversations is not None:
        text += _conversation_lines(prediction.conversations)
    text.append(
        f"lengths    {prediction.mean_length:,.0f} tokens on average, long-tailed: {lengths}"
        + ("; measure some, and see sortedrl fit" if prediction.are_lengths_guessed else "")
    )
    return text


def _conversation_lines(talk: ConversationPlan) -> list[str]:
    source = (
        "partly guessed; give --turns, --tool-seconds and --given-tokens, or --conversations"
        if talk.are_guessed
        else "as given"
    )
    text = [
        f"turns      {talk.turns:.1f} on average, replies take {talk.reply_seconds:.2g} s and "
        f"bring {talk.given_tokens:,.0f} tokens in all: {source}",
        f"           slots that were idle while a tool worked: {100 * talk.outside_bubble:.1f} %",
    ]
    if talk.fills_context:
        text.append(
            "           the model's context has no room for such replies: they are planned "
            "shorter, and conversations would end early"
        )
    return text


def _time(hours: float) -> str:
    if hours >= 1:
        return f"{hours:,.1f} hours"
    return f"{hours * 60:.0f} minutes" if hours >= 1 / 30 else f"{hours * 3600:.0f} seconds"
