"""What a verl run may be, and its sizes: verl's configuration in, a schedule out."""

from __future__ import annotations

from typing import Any

from sortedrl.config.checks import require
from sortedrl.config.schedule import Schedule
from sortedrl.integrations import schedule_of_batches

MODE_NAME = "sortedrl"
"""The trainer mode, and the agent loop that draws every answer from a seed of its own."""
SEED_NAMES = {"vllm": "seed", "sglang": "sampling_seed"}
"""What the engines call the seed of a request."""
_SINGLE_TURN = ("single_turn_agent", MODE_NAME)


def schedule_for(config: Any) -> Schedule:  # noqa: ANN401  verl's DictConfig
    """The schedule of `trainer.v1.sortedrl`; its sizes follow from verl's own settings."""
    schedule = schedule_of_batches(
        dict(config.trainer.v1.get(MODE_NAME) or {}),
        prompts=config.data.train_batch_size,
        samples=config.actor_rollout_ref.rollout.n,
        prefix=f"trainer.v1.{MODE_NAME}.",
        batch_name="data.train_batch_size",
    )
    _refuse_setup(config)
    if schedule.keeps_stale_tokens:
        _refuse_uncorrected(config)
    else:
        _refuse_on_policy(schedule, config)
    return schedule


def _refuse_setup(config: Any) -> None:  # noqa: ANN401
    sampler = config.trainer.v1.sampler
    require(
        not sampler.custom_sampler.path,
        f"trainer mode {MODE_NAME} has a sampler of its own, got custom_sampler.path "
        f"{sampler.custom_sampler.path!r}; leave it out",
    )
    manager = config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class")
    require(
        manager is None,
        f"trainer mode {MODE_NAME} watches the workers of verl's own agent loop manager, got "
        f"agent_loop_manager_class {manager!r}; leave it out",
    )
    filters = config.algorithm.get("filter_groups") or {}
    require(
        not filters.get("enable"),
        f"trainer mode {MODE_NAME} trains every prompt, got algorithm.filter_groups.enable; turn "
        "it off, or use trainer mode colocate_async",
    )


def _refuse_uncorrected(config: Any) -> None:  # noqa: ANN401
    correction = config.algorithm.get("rollout_correction") or {}
    is_corrected = bool(correction.get("bypass_mode") or correction.get("rollout_is"))
    require(
        bool(config.actor_rollout_ref.rollout.calculate_log_probs) and is_corrected,
        "mode 'partial' trains on tokens of older weights, which needs their log-probabilities; "
        "set actor_rollout_ref.rollout.calculate_log_probs=True and "
        "algorithm.rollout_correction.bypass_mode=True (or rollout_is=token)",
    )


def _refuse_on_policy(schedule: Schedule, config: Any) -> None:  # noqa: ANN401
    mode, rollout = schedule.mode, config.actor_rollout_ref.rollout
    require(
        mode != "coupled",
        "mode 'coupled' needs an engine that verifies cached tokens, which verl has not; set "
        "'redraw', 'on_policy' or 'partial'",
    )
    agent_loop = rollout.agent.default_agent_loop
    require(
        agent_loop in _SINGLE_TURN,
        f"mode {mode!r} generates an interrupted answer again from its prompt, so it needs a "
        f"single turn, got agent loop {agent_loop!r}; set mode 'partial'",
    )
    if mode != "redraw":
        return
    require(
        agent_loop == MODE_NAME,
        "mode 'redraw' needs a seed per answer, got agent loop "
        f"{agent_loop!r}; set actor_rollout_ref.rollout.agent.default_agent_loop={MODE_NAME}",
    )
    require(
        rollout.name in SEED_NAMES,
        f"mode 'redraw' needs an engine that takes a seed per answer, got {rollout.name!r}; set "
        "actor_rollout_ref.rollout.name to vllm or sglang, or mode 'on_policy'",
    )
    engine = rollout.engine_kwargs.get("sglang") or {}
    require(
        rollout.name != "sglang" or bool(engine.get("enable_deterministic_inference")),
        "SGLang ignores the seed of an answer unless it is deterministic; set "
        "+actor_rollout_ref.rollout.engine_kwargs.sglang.enable_deterministic_inference=True",
    )
