"""What would fit where a run does not: the fewest changes that do, computed.

Every change is tried on the memory plan itself. A number is the largest that runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from sortedrl.errors import ConfigError
from sortedrl.models.shape import Shape
from sortedrl.runs.plan.cards import Demand
from sortedrl.runs.plan.memory import MemoryPlan, planned

_RANK = 16
_LEAST_TOKENS = 256
_STEP_TOKENS = 64
_SHARES = 100
_MOST_DEVICES = 1024

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


def advice(plan: MemoryPlan, device_bytes: int) -> tuple[Change, ...]:
    """The ways to make a run fit with the fewest changes; none where it fits as it is."""
    if plan.can_run(device_bytes):
        return ()
    return (*_fewest(plan, device_bytes), *_smaller_model(plan, device_bytes))


def refuse_too_big(plan: MemoryPlan, device_bytes: int) -> None:
    """Raise `ConfigError` for a run that the device has no room for, saying what would fit."""
    if plan.can_run(device_bytes):
        return
    ways = "; or ".join(change.text for change in advice(plan, device_bytes))
    raise ConfigError(
        f"the run must fit into the {size(plan.usable(device_bytes))} that a run can use of the "
        f"device's {size(device_bytes)}, and needs at least {size(plan.least)}; "
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


def _fewest(plan: MemoryPlan, device_bytes: int) -> Iterator[Change]:
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
            if changes == number and planned(demand).can_run(device_bytes):
                is_found = True
                yield Change(text=_text(plan.demand, demand), demand=demand)
        if is_found:
            return


def _checkpointed(demand: Demand, device_bytes: int) -> Demand:
    return replace(demand, gradient_checkpointing=True)


def _offloaded(demand: Demand, device_bytes: int) -> Demand:
    layout = demand.layout
    return replace(demand, layout=replace(layout, offload=layout.devices > 1))


def _more_devices(demand: Demand, device_bytes: int) -> Demand:
    """Twice as many, as often as it takes; one device stays one, which is another kind of run."""
    more = demand
    while 1 < more.layout.devices < _MOST_DEVICES and not planned(more).can_run(device_bytes):
        more = replace(more, layout=replace(more.layout, devices=2 * more.layout.devices))
    return more


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
    _offloaded,
    _adapted,
    _without_reference,
    _without_critic,
    _shorter_passes,
    _shorter_answers,
    _more_devices,
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


def _text(before: Demand, after: Demand) -> str:
    """What was changed, as settings."""
    changes = []
    if after.gradient_checkpointing != before.gradient_checkpointing:
        changes.append("passes.gradient_checkpointing = true")
    if after.layout.offload != before.layout.offload:
        changes.append("layout.offload = true")
    if after.lora_rank != before.lora_rank:
        changes.append(f"lora.rank = {after.lora_rank}")
    if after.has_reference != before.has_reference:
        changes.append("algorithm.kl_coef = 0 (no reference model)")
    if after.has_critic != before.has_critic:
        changes.append("an algorithm without a critic (not ppo)")
    if after.pass_tokens != before.pass_tokens:
        changes.append(f"passes.micro_batch_tokens = {after.pass_tokens}")
    if after.max_tokens != before.max_tokens:
        changes.append(f"engine.max_tokens = {after.max_tokens}")
    if after.layout.devices != before.layout.devices:
        changes.append(f"layout.devices = {after.layout.devices}")
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
