"""What a slime run may be, and its sizes: slime's arguments in, a schedule out.

Our settings are keys of the YAML file of `--custom-config-path`, which slime makes attributes:
sortedrl_mode, sortedrl_group_prompts, sortedrl_lookahead, sortedrl_max_staleness.
"""

from __future__ import annotations

from typing import Any

from sortedrl.config.checks import require
from sortedrl.config.schedule import Schedule
from sortedrl.errors import ConfigError, unknown_name

_PREFIX = "sortedrl_"
_OWN = ("mode", "group_prompts", "lookahead", "max_staleness")
_UPDATES_PER_GROUP = 4
_REFUSED = {
    "dynamic_sampling_filter_path": "every prompt is trained",
    "rollout_all_samples_process_path": "there is no sample but those that are trained",
    "buffer_filter_path": "the schedule decides what comes next",
    "multimodal_keys": "images are not saved",
}


def schedule_for(args: Any) -> Schedule:  # noqa: ANN401  slime's Namespace
    """The schedule; its sizes follow from slime's arguments."""
    given = {k.removeprefix(_PREFIX): v for k, v in vars(args).items() if k.startswith(_PREFIX)}
    for name in given:
        if name not in _OWN:
            raise ConfigError(unknown_name("setting sortedrl_*", name, _OWN))
    prompts, samples = args.rollout_batch_size, args.n_samples_per_prompt
    given.setdefault("group_prompts", _UPDATES_PER_GROUP * prompts)
    require(
        isinstance(given["group_prompts"], int) and given["group_prompts"] % prompts == 0,
        f"sortedrl_group_prompts must be a multiple of --rollout-batch-size = {prompts}, got "
        f"{given['group_prompts']}; try {_UPDATES_PER_GROUP * prompts}",
    )
    schedule = Schedule(
        **given,
        samples_per_prompt=samples,
        update_batch=prompts * samples,
        harvest_unit="prompt",
        exact=True,
    )
    for name, because in _REFUSED.items():
        require(
            getattr(args, name) is None,
            f"--{name.replace('_', '-')} does not go with SortedRL's rollout function: {because}; "
            "leave it out",
        )
    _refuse_mode(schedule, args)
    return schedule


def _refuse_mode(schedule: Schedule, args: Any) -> None:  # noqa: ANN401
    require(
        schedule.mode != "coupled",
        "mode 'coupled' needs an engine that verifies cached tokens, which SGLang does not; set "
        "sortedrl_mode to redraw, on_policy or partial",
    )
    require(
        not schedule.keeps_stale_tokens or args.use_rollout_logprobs or args.use_tis,
        "mode 'partial' trains on tokens of older weights, which needs the log-probabilities they "
        "were sampled with; set --use-rollout-logprobs or --use-tis",
    )
    require(
        schedule.mode != "redraw" or args.sglang_enable_deterministic_inference,
        "mode 'redraw' needs a seed per answer, which SGLang ignores unless it is deterministic; "
        "set --sglang-enable-deterministic-inference, or sortedrl_mode to on_policy",
    )
