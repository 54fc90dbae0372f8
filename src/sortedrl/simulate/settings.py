"""The settings of a simulated run, and named presets to start from.

Schedule and engine settings are the real ones. A pool is several engines with speeds, failures and
weight sync; by default there is one engine that never fails and needs no network.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

from sortedrl.config.checks import (
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    at_least,
    check_values,
    require,
    within,
)
from sortedrl.config.parsing import changed_values, read_toml, settings_over, toml_text
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.core.randomness import normal, uniform
from sortedrl.errors import ConfigError, DataError, unknown_name
from sortedrl.simulate.conversations import ConversationSettings
from sortedrl.simulate.costs import CostSettings
from sortedrl.simulate.lengths import LengthSettings, is_event_log
from sortedrl.simulate.observed import is_log, read_observed

Broadcast = Literal["tree", "at_once", "one_by_one"]

_SPREAD_KEY = 0x737072656164
_SLOW_KEY = 0x736C6F77
_FAILURE_KEY = 0x6661696C
_MOST_SIGMA = 10.0
_MOST_FAILURES = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """The engines that share the slots of a simulated run.

    The hardware preset describes one of them: 64 engines are 64 such machines. Slots are those
    of all engines together, and all machines share the tokens of an update evenly.
    """

    engines: PositiveInt = 1
    """Engines that share the slots, each a machine as the hardware preset describes it."""
    straggler_sigma: Annotated[float, within(0, _MOST_SIGMA)] = 0.0
    """Spread of the engines' speeds: each takes exp(straggler_sigma * |z|) times as long, z
    standard normal, so none is faster than the preset."""
    slow_share: Fraction = 0.0
    """Share of slow engines, 0 to 1, rounded to whole engines."""
    slow_factor: Annotated[float, at_least(1, "2 is half the speed")] = 2.0
    """Slowdown of a slow engine: 2 is half the speed."""
    failures_per_hour: Annotated[
        float,
        within(0, _MOST_FAILURES, advice="engines that fail more often finish no answers"),
    ] = 0.0
    """Failures per engine and hour of uptime, at random times; at most 60."""
    restart_seconds: NonNegativeFloat = 120.0
    """Seconds until a failed engine is back with the current weights."""
    failures_lose_tokens: bool = False
    """Whether the tokens of a failed engine are lost; otherwise they were streamed, and other
    engines continue from them."""
    broadcast: Broadcast = "tree"
    """How new weights are broadcast.
    tree: engines that have them forward them; log2(engines) transfers in sequence.
    at_once: all engines receive them in parallel, in the time of one transfer.
    one_by_one: the trainer sends them to one engine after another."""
    weights_gigabytes: NonNegativeFloat = 0.0
    """Size of the weights sent over the network; 0 for no network."""
    network_gigabytes_per_second: PositiveFloat = 50.0
    """Bandwidth of the network, for one sender and one receiver."""
    network_latency_seconds: NonNegativeFloat = 0.0
    """Seconds before the first byte of a transfer arrives."""

    def __post_init__(self) -> None:
        check_values(self, "pool.")

    def shares(self, slots: int) -> list[int]:
        """The slots of each engine; the first ones have one more where they do not divide.

        >>> PoolSettings(engines=3).shares(8)
        [3, 3, 2]
        """
        each, more = divmod(slots, self.engines)
        return [each + (number < more) for number in range(self.engines)]

    def slowdowns(self, seed: int) -> list[float]:
        """How many times as long as the preset each engine takes.

        >>> sorted(PoolSettings(engines=50, slow_share=0.04).slowdowns(0))[-3:]
        [1.0, 2.0, 2.0]
        """
        numbers = range(self.engines)
        order = sorted(numbers, key=lambda number: uniform(seed, _SLOW_KEY, number))
        slow = set(order[: round(self.slow_share * self.engines)])
        return [
            math.exp(self.straggler_sigma * abs(normal(seed, _SPREAD_KEY, number)))
            * (self.slow_factor if number in slow else 1.0)
            for number in numbers
        ]

    def seconds_to_failure(self, seed: int, *, engine: int, failures: int) -> float:
        """Seconds of uptime after this many failures; only valid if engines fail at all."""
        drawn = uniform(seed, _FAILURE_KEY, engine, failures)
        return -math.log(drawn) * 3600 / self.failures_per_hour

    @property
    def network_seconds(self) -> float:
        """Seconds to broadcast new weights to all engines.

        >>> pool = PoolSettings(engines=1024, weights_gigabytes=16, network_latency_seconds=0.01)
        >>> f"{pool.network_seconds:.2f} s for eleven transfers"
        '3.63 s for eleven transfers'
        """
        transfer = self.weights_gigabytes / self.network_gigabytes_per_second
        # The number of holders doubles with every transfer; the trainer is the first.
        hops = {"tree": self.engines.bit_length(), "at_once": 1, "one_by_one": self.engines}
        return hops[self.broadcast] * (self.network_latency_seconds + transfer)


_MOST_ANSWERS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A simulated run."""

    groups: PositiveInt = 10
    """Number of prompt groups in the run."""
    prompts: PositiveInt | None = None
    """Prompts of the whole run, instead of `groups`; the last group may be smaller."""
    seed: int = 0
    """Seed of all lengths; the same seed gives the same run."""
    schedule: Schedule = field(default_factory=Schedule)
    engine: EngineSettings = field(default_factory=EngineSettings)
    lengths: LengthSettings = field(default_factory=LengthSettings)
    costs: CostSettings = field(default_factory=CostSettings)
    pool: PoolSettings = field(default_factory=PoolSettings)
    conversations: ConversationSettings = field(default_factory=ConversationSettings)

    def __post_init__(self) -> None:
        check_values(self)
        require(
            self.pool.engines <= self.engine.slots,
            f"pool.engines must be at most engine.slots ({self.engine.slots}), so that each has a "
            f"slot, got {self.pool.engines}; lower engines or raise slots",
        )
        require(
            not self.conversations.is_used or self.pool == PoolSettings(),
            "conversations are simulated on one engine; leave the pool settings out",
        )
        answers = self.num_prompts * self.schedule.samples_per_prompt
        require(
            answers <= _MOST_ANSWERS,
            f"a simulated run may have {_MOST_ANSWERS:,} answers at most, got {answers:,}; lower "
            "groups, prompts or schedule.group_prompts",
        )

    @property
    def max_open(self) -> int | None:
        """Maximum number of concurrent conversations; by default enough to keep the slots full.

        A conversation generates only part of the time, so there must be more of them than slots, by
        (writing + outside) / writing; twice that leaves room for long tool calls.
        """
        conversations = self.conversations
        if conversations.max_open is not None or conversations.is_lock_step:
            return conversations.max_open
        costs, slots, lengths = self.costs.costs(), self.engine.slots, self.lengths
        mean = lengths.median * math.exp(min(lengths.sigma**2 / 2, 50.0))
        writing = mean * (costs.step_seconds + slots * costs.sequence_seconds)
        return math.ceil(slots * (1 + 2 * conversations.mean_tool_seconds / writing))

    @property
    def num_prompts(self) -> int:
        """Prompts of the whole run."""
        if self.prompts is not None:
            return self.prompts
        return self.groups * self.schedule.group_prompts


def paper() -> Simulation:
    """The paper's efficiency study: 10 groups of 512 answers, at most 8,192 tokens, 128 slots."""
    return Simulation()


def long_thoughts() -> Simulation:
    """Long chains of thought: answers up to 32,768 tokens of a 32B model on eight H100."""
    return Simulation(
        groups=4,
        schedule=Schedule(group_prompts=64, samples_per_prompt=8, harvest_unit="prompt"),
        engine=EngineSettings(slots=256, max_tokens=32768),
        lengths=LengthSettings(median=4000, sigma=1.1, prompt_share=0.5),
        costs=CostSettings(hardware="h100x8-qwen-2.5-32b"),
    )


def picture() -> Simulation:
    """A small run for pictures: 4 groups of 32 answers on 8 slots, one second per step."""
    return Simulation(
        groups=4,
        schedule=Schedule(group_prompts=32, update_batch=8),
        engine=EngineSettings(slots=8, max_tokens=256),
        lengths=LengthSettings(median=34, prompt_tokens=0),
        costs=CostSettings(hardware="ticks", update_seconds=12.0),
    )


def six() -> Simulation:
    """Six prompts on four slots, explained step by step in docs/explanation/how-it-works.md."""
    return Simulation(
        groups=1,
        schedule=Schedule(group_prompts=6, update_batch=3),
        engine=EngineSettings(slots=4, max_tokens=16),
        lengths=LengthSettings(
            values=(2, 7, 3, 5, 4, 9),
            replay=True,
            prompt_tokens=0,
            mismatch_rate=0.25,
        ),
        costs=CostSettings(hardware="ticks", update_seconds=1.0),
    )


def trl_grpo() -> Simulation:
    """TRL's GRPOTrainer: steps of 64 prompts with 8 answers of up to 4,096 tokens, 256 at a time.

    Every step waits for its longest answer (strategy sync). The other strategies have groups of
    four such steps.
    """
    return Simulation(
        groups=2,
        schedule=Schedule(
            strategy="sync",
            mode="on_policy",
            group_prompts=256,
            samples_per_prompt=8,
            update_batch=512,
            harvest_unit="prompt",
        ),
        engine=EngineSettings(slots=256, max_tokens=4096),
        lengths=LengthSettings(median=700, prompt_share=0.5),
    )


def verl_colocate_async() -> Simulation:
    """Verl with colocated engines: 256 prompts with 8 answers a step, trained in mini-batches.

    The engines generate a whole step of up to 8,192 tokens, then the trainer goes through it in
    four random mini-batches (strategy minibatch), with a 32B model on eight H100.
    """
    return Simulation(
        groups=4,
        schedule=Schedule(
            strategy="minibatch",
            mode="on_policy",
            group_prompts=256,
            samples_per_prompt=8,
            update_batch=512,
            harvest_unit="prompt",
        ),
        engine=EngineSettings(slots=512, max_tokens=8192),
        lengths=LengthSettings(median=1500, prompt_share=0.5),
        costs=CostSettings(hardware="h100x8-qwen-2.5-32b"),
    )


def slime_partial() -> Simulation:
    """Slime with partial rollouts: more answers are started than needed, the rest continue later.

    128 prompts with 8 answers a step, 1.5 times as many started, stopped when the step is complete
    and continued under the new weights (strategy april, mode partial), 32B on eight H100.
    """
    return Simulation(
        groups=4,
        schedule=Schedule(
            strategy="april",
            mode="partial",
            over_launch=1.5,
            group_prompts=256,
            samples_per_prompt=8,
            update_batch=1024,
            harvest_unit="prompt",
        ),
        engine=EngineSettings(slots=512, max_tokens=8192),
        lengths=LengthSettings(median=1500, prompt_share=0.5),
        costs=CostSettings(hardware="h100x8-qwen-2.5-32b"),
    )


def agents() -> Simulation:
    """Agents with tools: about 7 turns of 180 tokens, tools of 2 s; an 8B model on eight H100."""
    return Simulation(
        groups=4,
        schedule=Schedule(group_prompts=256, update_batch=64),
        engine=EngineSettings(slots=64, max_tokens=8192),
        lengths=LengthSettings(median=120, sigma=0.9, prompt_tokens=1000),
        costs=CostSettings(hardware="h100x8-llama-3.1-8b"),
        conversations=ConversationSettings(turns=6.5, tool_seconds=1.2),
    )


PRESETS = {
    "paper": paper,
    "long-thoughts": long_thoughts,
    "picture": picture,
    "six": six,
    "trl-grpo": trl_grpo,
    "verl-colocate-async": verl_colocate_async,
    "slime-partial": slime_partial,
    "agents": agents,
}


def simulation_from(source: str) -> Simulation:
    """The settings of a preset, a TOML file, or a log of lengths."""
    if source in PRESETS:
        return PRESETS[source]()
    path = Path(source)
    if is_log(path):
        return observed_simulation(path)
    if path.suffix != ".toml":
        raise ConfigError(
            unknown_name("preset", source, PRESETS)
            + "; or give the path of a .toml file, or of a log with lengths (.jsonl, .parquet)"
        )
    table = read_toml(path)
    preset = table.pop("preset", "paper")
    if not isinstance(preset, str) or preset not in PRESETS:
        raise DataError(path, unknown_name("preset", str(preset), PRESETS))
    return settings_over(PRESETS[preset](), table, path=path)


def simulation_to_toml(simulation: Simulation) -> str:
    """Write the settings as TOML; `simulation_from` reads them back unchanged."""
    default = asdict(PRESETS["paper"]())
    return toml_text({"preset": "paper", **changed_values(asdict(simulation), default)})


_STEPS_PER_GROUP = 4
_OBSERVED_GROUPS = 4


def observed_simulation(path: Path) -> Simulation:
    """Settings from a log of answers: lengths, concurrency and siblings.

    An update has the answers of one step of the log, and a group four such steps. Costs are those
    of the preset `paper`: speeds compare, seconds do not.
    """
    if is_event_log(path):
        raise DataError(
            path,
            "is a SortedRL run, which has more than lengths; write its settings to a file first: "
            f"sortedrl fit {quote(str(path))} > mine.toml",
        )
    found = read_observed(path)
    step = found.answers_per_step
    samples = found.samples_per_prompt if step % found.samples_per_prompt == 0 else 1
    return Simulation(
        groups=_OBSERVED_GROUPS,
        schedule=Schedule(
            group_prompts=_STEPS_PER_GROUP * step // samples,
            samples_per_prompt=samples,
            harvest_unit="prompt" if samples > 1 else "trajectory",
            update_batch=step,
        ),
        engine=EngineSettings(slots=step, max_tokens=max(found.lengths)),
        lengths=LengthSettings(values=found.lengths, prompt_share=found.prompt_share),
    )
