"""The plan of a run on one page: lines for people, a dictionary for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sortedrl.config.schedule import Schedule
from sortedrl.config.train import TrainSettings
from sortedrl.runs.plan.advice import Change, advice, count, size
from sortedrl.runs.plan.cards import Card
from sortedrl.runs.plan.memory import MemoryPlan
from sortedrl.runs.plan.prediction import ConversationPlan, Prediction, SchedulePlan
from sortedrl.simulate.compare import PREDICTION_ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Everything that can be known before a run."""

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
        """What would fit, where it cannot."""
        return advice(self.memory, self.device_bytes, settings=self.settings)


def lines(plan: RunPlan) -> list[str]:
    """The plan for a terminal."""
    text = [*_model_lines(plan), "", *_memory_lines(plan)]
    if not plan.fits:
        text += ["", "It does not fit. What would:"]
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
    workers = _number(cluster.num_workers, "rollout worker")
    ranks = _number(cluster.trainer_ranks, "trainer rank")
    if not cluster.trainer_ranks:
        ranks = "the trainer in the controller's process"
    if not demand.is_gpu:
        return [f"cluster    {workers} and {ranks}, planned as all on this machine"]
    on = _number(cluster.tensor_parallel, "GPU") + (" each" if cluster.num_workers > 1 else "")
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
        pass_text += ", layers computed twice"
    rows = [
        ("weights", parts.weights, _weights_text(plan)),
        ("masters", parts.masters, "fp32 copies of the weights"),
        ("moments", parts.moments, _MOMENTS_TEXT[demand.optimiser_state]),
        ("gradients", parts.gradients, _gradients_text(plan)),
        ("reference", parts.reference, "the model the run began with"),
        ("critic", parts.critic, "a second model, trained too"),
        ("engine", parts.engine, "the engine's own weights"),
        ("gathered", parts.gathered, "layers at work, brought together"),
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
        rows.append(("generation", memory.rollout_bytes, "what the trainer holds meanwhile too"))
    elif demand.is_separated:
        least = size(parts.generation + demand.least_cache_bytes)
        engine = f"engine, rollout and cache; at least {least}, with the smallest cache"
        rows.append(("trainer GPU", parts.trainer, "all but engine, rollout and cache"))
        rows.append(("engine GPU", parts.generation + parts.cache, engine))
    else:
        least = size(memory.least)
        rows.append(("all", memory.total, f"at least {least}, with the smallest cache"))
    if demand.optimiser_state == "offload":
        rows.append(("main memory", memory.host_bytes, "masters and moments, pinned"))
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
    return f"every prompt is trained within {_number(bound, 'round')} of its group's loading"


def _stale_text(bound: int | None) -> str:
    if bound is None:
        return "none on how old a token is when it is trained on"
    if bound == 0:
        return "no token is stale"
    return f"no token is more than {_number(bound, 'version')} old"


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _prediction_lines(prediction: Prediction, slots: int) -> list[str]:
    lengths = "a guess" if prediction.are_lengths_guessed else "as given"
    text = [
        f"predicted  {_time(prediction.hours)} (sync: {_time(prediction.sync_hours)}); "
        f"bubble {prediction.bubble:.1%} (sync: {prediction.sync_bubble:.1%})",
        f"           goodput {prediction.goodput:,.0f} trained tokens/s of rollout, "
        f"{prediction.trained_per_second:,.0f} with updates; rollout takes "
        f"{prediction.rollout_share:.0%} of the time",
    ]
    if abs(prediction.hours / prediction.sync_hours - 1) < PREDICTION_ERROR:
        text.append(
            "           the difference to sync is within the error of such predictions "
            f"({PREDICTION_ERROR:.0%})"
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
        f"           slots that were idle while a tool worked: {talk.outside_bubble:.1%}",
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
