"""What would fit where a run does not: the fewest changes that do, computed.

Every change is tried on the memory plan itself, and on the settings: what `train` would refuse is
never advised. A number is the largest that runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from sortedrl.config.toml import replaced, toml_value
from sortedrl.config.train import TrainSettings
from sortedrl.errors import ConfigError
from sortedrl.models.shape import Shape
from sortedrl.runs.plan.cards import Demand
from sortedrl.runs.plan.memory import MemoryPlan, planned

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
    """Raise `ConfigError` for a run that the device has no room for, saying what would fit."""
    if plan.can_run(device_bytes):
        return
    ways = "; or ".join(change.text for change in advice(plan, device_bytes, settings=settings))
    demand = plan.demand
    why = (
        f" (a pass holds the {demand.sequence_tokens:,} tokens of the longest prompt and answer, "
        f"which is never cut, whatever passes.micro_batch_tokens {demand.pass_tokens:,} says)"
        if demand.sequence_tokens > demand.pass_tokens
        else ""
    )
    raise ConfigError(
        f"the run must fit into the {size(plan.usable(device_bytes))} that a run can use of the "
        f"device's {size(device_bytes)}, and needs at least {size(plan.least)}{why}; "
        f"what would fit: {ways or 'no smaller run of this kind; take a larger device'}"
    )


def size(num_bytes: int) -> str:
    """Bytes for people."""
    if num_bytes < 1 << 30:
        return f"{num_bytes / (1 << 20):,.1f} MiB"
    return f"{num_bytes / (1 << 30):,.1f} GiB"


def count(parameters: int) -> str:
    """Parameters for people."""
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
    """Twice as many GPUs for the trainer, as often as it takes; a single process stays one."""
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
    """What was changed, by the keys of the settings."""
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
    values: dict[str, dict[str, object]] = {}
    for key, value in _changed_settings(before, after).items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = value
    try:
        replaced(settings, values)
    except ConfigError:
        return False
    return True


def _text(before: Demand, after: Demand) -> str:
    """What was changed, as settings."""
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
