"""What a TRL run may be, and its sizes: TRL's arguments in, a schedule and sampling out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from trl import GRPOConfig

from sortedrl.config.checks import require
from sortedrl.config.schedule import Schedule
from sortedrl.engines.sampling import Sampling
from sortedrl.errors import unknown_name

_UPDATES_PER_GROUP = 4
_DERIVED = ("samples_per_prompt", "update_batch", "harvest_unit", "exact")
_INSTEAD_OF_COLOCATE = (
    "start a server and set vllm_mode='server', or leave use_vllm out: the native engine generates "
    "on the GPU that trains, with the weights that are trained"
)


def schedule_for(
    given: Schedule | Mapping[str, object] | None, args: GRPOConfig, *, world: int = 1
) -> Schedule:
    """The schedule of one rank; its sizes follow from TRL's arguments. Refuses what cannot work."""
    _refuse_arguments(args)
    require(
        given is None or isinstance(given, Schedule | Mapping),
        f"schedule must be a Schedule or a mapping of its fields, such as {{'mode': 'partial'}}, "
        f"got {given!r}",
    )
    answers, samples = args.generation_batch_size // world, args.num_generations
    require(
        answers % samples == 0,
        f"each of the {world} processes needs whole prompts: per_device_train_batch_size x "
        f"gradient_accumulation_steps must be a multiple of num_generations = {samples}, got "
        f"{answers}; raise one of them, or lower num_generations",
    )
    values: dict[str, Any] = asdict(given) if isinstance(given, Schedule) else dict(given or {})
    if not isinstance(given, Schedule):
        _refuse_fields(values)
    together = world * answers // samples
    group = values.pop("group_prompts", _UPDATES_PER_GROUP * together)
    require(
        isinstance(group, int) and group > 0 and group % together == 0,
        f"schedule.group_prompts must be a multiple of the {together} prompts of one generation "
        f"batch, got {group}; try {_UPDATES_PER_GROUP * together}",
    )
    derived = {
        "group_prompts": group // world,
        "samples_per_prompt": samples,
        "update_batch": answers,
        "harvest_unit": "prompt",
        "exact": True,
    }
    schedule = Schedule(**{**values, **derived})
    _refuse_combination(schedule, args)
    return schedule


def _refuse_fields(values: Mapping[str, object]) -> None:
    names = [field.name for field in fields(Schedule)]
    for name in values:
        require(name in names, unknown_name("field of schedule", name, names))
        require(
            name not in _DERIVED,
            f"schedule.{name} follows from the GRPOConfig (num_generations and the generation "
            "batch size); leave it out",
        )


def _refuse_arguments(args: GRPOConfig) -> None:
    require(
        args.steps_per_generation == args.gradient_accumulation_steps,
        "SortedGRPOTrainer makes one optimiser step on each generation batch, so "
        "steps_per_generation must equal gradient_accumulation_steps, got "
        f"{args.steps_per_generation} and {args.gradient_accumulation_steps}; leave "
        "steps_per_generation and generation_batch_size out, and set how many prompts are rolled "
        "out together with schedule={'group_prompts': ...}",
    )
    require(
        not (args.use_vllm and args.vllm_mode == "colocate"),
        f"vLLM inside the trainer's process cannot stream its tokens; {_INSTEAD_OF_COLOCATE}",
    )
    require(
        args.temperature > 0,
        f"temperature must be above 0, because TRL divides logits by it, got {args.temperature}; "
        "for greedy answers set top_k to 1",
    )
    for name, plain in (
        ("use_transformers_continuous_batching", (False,)),
        ("repetition_penalty", (1.0,)),
        ("generation_kwargs", (None, {})),
        ("cache_implementation", (None,)),
        ("vllm_structured_outputs_regex", (None,)),
    ):
        value = vars(args)[name]
        require(
            value in plain,
            f"{name} must be {plain[0]!r}, got {value!r}: SortedRL's engines sample with "
            "temperature, top_k, top_p and min_p alone; leave it out",
        )


def _refuse_combination(schedule: Schedule, args: GRPOConfig) -> None:
    is_stale = schedule.staleness_bound != 0
    require(
        args.num_iterations == 1 or not is_stale,
        f"num_iterations must be 1 where tokens of older weights are trained on, got "
        f"{args.num_iterations} with schedule {schedule.name!r}; set mode 'coupled', 'redraw' or "
        "'on_policy', or num_iterations to 1",
    )
    require(
        not (is_stale and sampling_of(args, stop_tokens=()).is_filtered),
        "top_k, top_p and min_p must be off where tokens of older weights are trained on, because "
        "TRL computes log-probabilities without these filters; leave them out, or set mode "
        f"'coupled', 'redraw' or 'on_policy'; got schedule {schedule.name!r}",
    )
    needs_native = schedule.mode in ("coupled", "redraw") and not schedule.never_interrupts
    require(
        not (args.use_vllm and needs_native),
        f"mode {schedule.mode!r} needs the native engine, which draws each answer from a seed of "
        "its own; leave use_vllm out, or set mode 'partial' or 'on_policy'",
    )


def sampling_of(args: GRPOConfig, *, stop_tokens: Sequence[int]) -> Sampling:
    """TRL's sampling arguments as the engines take them."""
    return Sampling(
        temperature=args.temperature,
        top_k=args.top_k or None,
        top_p=args.top_p,
        min_p=args.min_p or 0.0,
        stop_tokens=frozenset(stop_tokens),
        max_tokens=args.max_completion_length,
    )
