"""The cost model of the simulator: seconds per step, token and update on some hardware.

A decode step of `r` running sequences with `c` cached tokens between them takes

    step_seconds + sequence_seconds * r + cached_token_seconds * c

The presets derive these constants from the arithmetic of a memory-bound decoder: every step reads
all weights once and all cached keys and values once. Prefill and update are bound by compute:
2 and 6 floating-point operations per parameter and token.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from sortedrl.config.checks import NonNegativeFloat, check_values, require
from sortedrl.errors import unknown_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The constants of one machine running one model."""

    step_seconds: NonNegativeFloat
    """Fixed cost of a decode step: reading the weights, launching the kernels."""
    sequence_seconds: NonNegativeFloat = 0.0
    """Added to a step for each running sequence: sampling, bookkeeping."""
    cached_token_seconds: NonNegativeFloat = 0.0
    """Added to a step for each cached token: reading its keys and values."""
    prefill_token_seconds: NonNegativeFloat = 0.0
    """Prefill of one token, of a prompt or of a resumed answer."""
    interrupt_seconds: NonNegativeFloat = 0.0
    """Stopping the engine and collecting unfinished work."""
    weight_sync_seconds: NonNegativeFloat = 0.0
    """Weight sync: transferring new weights to the engine."""
    update_seconds: NonNegativeFloat = 0.0
    """Fixed cost of an update."""
    update_token_seconds: NonNegativeFloat = 0.0
    """Added to an update for each answer token."""

    def __post_init__(self) -> None:
        check_values(self, "costs.")
        require(
            self.step_seconds + self.sequence_seconds > 0,
            "a decode step must take time: give costs.step_seconds or costs.sequence_seconds "
            "a positive value, got 0 for both",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A model on hardware, by data-sheet numbers; `costs` derives the cost constants.

    `devices` share the work evenly; each `tensor_parallel` of them hold one copy of the weights.
    Assumed for all: 50 ms per interrupt, 0.1 s plus the weights at 50 GB/s per weight sync, 0.5 s
    fixed cost per update.
    """

    parameters: float
    cache_bytes_per_token: int
    bandwidth: float
    flops: float
    overhead_seconds: float
    sequence_seconds: float
    devices: int = 1
    tensor_parallel: int = 1
    weight_bytes_per_parameter: int = 2

    def costs(self) -> Costs:
        """The constants derived from these numbers."""
        weight_bytes = self.parameters * self.weight_bytes_per_parameter / self.tensor_parallel
        compute = self.flops * self.devices
        return Costs(
            step_seconds=weight_bytes / self.bandwidth + self.overhead_seconds,
            sequence_seconds=self.sequence_seconds / (self.devices / self.tensor_parallel),
            cached_token_seconds=self.cache_bytes_per_token / (self.bandwidth * self.devices),
            prefill_token_seconds=2 * self.parameters / compute,
            interrupt_seconds=0.05,
            weight_sync_seconds=0.1 + weight_bytes * self.tensor_parallel / 50e9,
            update_seconds=0.5,
            update_token_seconds=6 * self.parameters / compute,
        )


def h100x8_llama_3_1_8b() -> Costs:
    """LLaMA-3.1-8B on eight H100, one replica each (arithmetic, not measured).

    - weights: 8.03 G parameters x 2 bytes = 16.1 GB; at 3.35 TB/s 4.8 ms, + 3 ms launches
    - cache: 32 layers x 8 heads x 128 x 2 (keys, values) x 2 bytes = 131,072 bytes per token;
      over eight cards 4.9 ns per cached token
    - compute: 500 TFLOP/s of 989 per card; prefill 4.0 us, update 12 us per token

    >>> costs = h100x8_llama_3_1_8b()
    >>> f"{costs.step_seconds * 1e3:.1f} ms {costs.cached_token_seconds * 1e9:.1f} ns"
    '7.8 ms 4.9 ns'
    >>> f"{costs.prefill_token_seconds * 1e6:.1f} us {costs.update_token_seconds * 1e6:.0f} us"
    '4.0 us 12 us'
    """
    return Machine(
        parameters=8.03e9,
        cache_bytes_per_token=32 * 8 * 128 * 2 * 2,
        bandwidth=3.35e12,
        flops=500e12,
        overhead_seconds=3e-3,
        sequence_seconds=15e-6,
        devices=8,
    ).costs()


def h100x8_qwen_2_5_32b() -> Costs:
    """Qwen-2.5-32B on eight H100, tensor-parallel over all of them (arithmetic, not measured).

    - weights: 32.8 G parameters x 2 bytes / 8 cards = 8.2 GB; at 3.35 TB/s 2.4 ms,
      + 3 ms launches + 64 layers x 2 all-reduces x 20 us = 2.6 ms
    - cache: 64 layers x 8 heads x 128 x 2 x 2 bytes = 262,144 bytes per token;
      over eight cards 9.8 ns per cached token
    - compute: 500 TFLOP/s of 989 per card; prefill 16.4 us, update 49 us per token

    >>> costs = h100x8_qwen_2_5_32b()
    >>> f"{costs.step_seconds * 1e3:.1f} ms {costs.cached_token_seconds * 1e9:.1f} ns"
    '8.0 ms 9.8 ns'
    >>> f"{costs.prefill_token_seconds * 1e6:.1f} us {costs.update_token_seconds * 1e6:.0f} us"
    '16.4 us 49 us'
    """
    return Machine(
        parameters=32.8e9,
        cache_bytes_per_token=64 * 8 * 128 * 2 * 2,
        bandwidth=3.35e12,
        flops=500e12,
        overhead_seconds=3e-3 + 64 * 2 * 20e-6,
        sequence_seconds=15e-6,
        devices=8,
        tensor_parallel=8,
    ).costs()


def h200_qwen_2_5_1_5b() -> Costs:
    """Qwen-2.5-1.5B on one H200 (arithmetic, with the overhead of a measured engine).

    - weights: 1.54 G parameters x 2 bytes = 3.1 GB; at 4.23 TB/s (measured copy) 0.73 ms,
      + 2 ms launches + 12 us per sequence, chosen so that 256 slots with 1,088 tokens of
      context each give 33,300 tokens/s, near the 33,100 that vLLM 0.26 reached there
    - cache: 28 layers x 2 heads x 128 x 2 x 2 bytes = 28,672 bytes; 6.8 ns per cached token
    - compute: 500 TFLOP/s of 989; prefill 6.2 us, update 18 us per token

    >>> costs = h200_qwen_2_5_1_5b()
    >>> f"{costs.step_seconds * 1e3:.2f} ms {costs.cached_token_seconds * 1e9:.1f} ns"
    '2.73 ms 6.8 ns'
    >>> f"{costs.prefill_token_seconds * 1e6:.1f} us {costs.update_token_seconds * 1e6:.0f} us"
    '6.2 us 18 us'
    >>> step = costs.step_seconds + 256 * (
    ...     costs.sequence_seconds + 1088 * costs.cached_token_seconds
    ... )
    >>> f"{256 / step:,.0f} tokens/s"
    '33,298 tokens/s'
    """
    return Machine(
        parameters=1.54e9,
        cache_bytes_per_token=28 * 2 * 128 * 2 * 2,
        bandwidth=4.23e12,
        flops=500e12,
        overhead_seconds=2e-3,
        sequence_seconds=12e-6,
    ).costs()


def h200_smollm2_135m() -> Costs:
    """SmolLM2-135M in bf16 on one H200 with the native engine (fitted to a measured run).

    `sortedrl fit` on the events of sorted/partial with lookahead 2 in the efficiency table of
    docs/results.md: 128 slots, contexts of up to 8,400 tokens, real updates. The fit explains
    an interval to 8 %.

    - a step: 1.8 ms, however few the sequences: 30 layers at 60 us of small kernels
    - 5.1 ns per cached token: its 23,040 bytes at 4.5 TB/s
    - prefill 3.2 us and update 9.9 us per token

    >>> costs = h200_smollm2_135m()
    >>> step = costs.step_seconds + 128 * (
    ...     costs.sequence_seconds + 1000 * costs.cached_token_seconds
    ... )
    >>> f"{128 / step:,.0f} tokens/s with 128 sequences of 1,000 tokens each"
    '51,089 tokens/s with 128 sequences of 1,000 tokens each'
    """
    return Costs(
        step_seconds=1.804e-3,
        sequence_seconds=0.38e-6,
        cached_token_seconds=5.1e-9,
        prefill_token_seconds=3.25e-6,
        interrupt_seconds=0.028,
        weight_sync_seconds=0.0065,
        update_seconds=0.40,
        update_token_seconds=9.9e-6,
    )


def laptop_88m() -> Costs:
    """An 88 M model in fp32 on two CPU cores (arithmetic; bound by compute, not by memory).

    - weights: 88 M parameters x 4 bytes = 0.35 GB; at 20 GB/s 18 ms, + 5 ms Python
    - each sequence: 2 x 88 M operations at 20 GFLOP/s = 8.8 ms
    - cache: 12 layers x 12 heads x 64 x 2 x 4 bytes = 73,728 bytes; 3.7 us per cached token
    - prefill and update at 60 GFLOP/s: 2.9 ms and 8.8 ms per token

    >>> costs = laptop_88m()
    >>> f"{costs.step_seconds * 1e3:.0f} ms {costs.cached_token_seconds * 1e6:.1f} us"
    '23 ms 3.7 us'
    >>> f"{costs.prefill_token_seconds * 1e3:.1f} ms {costs.update_token_seconds * 1e3:.1f} ms"
    '2.9 ms 8.8 ms'
    """
    return Machine(
        parameters=88e6,
        weight_bytes_per_parameter=4,
        cache_bytes_per_token=12 * 12 * 64 * 2 * 4,
        bandwidth=20e9,
        flops=60e9,
        overhead_seconds=5e-3,
        sequence_seconds=8.8e-3,
    ).costs()


def ticks() -> Costs:
    """Every decode step takes one second and everything else takes none: for examples and tests.

    >>> ticks().step_seconds
    1.0
    """
    return Costs(step_seconds=1.0)


HARDWARE = {
    "h100x8-llama-3.1-8b": h100x8_llama_3_1_8b,
    "h100x8-qwen-2.5-32b": h100x8_qwen_2_5_32b,
    "h200-qwen-2.5-1.5b": h200_qwen_2_5_1_5b,
    "h200-smollm2-135m": h200_smollm2_135m,
    "laptop-88m": laptop_88m,
    "ticks": ticks,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSettings:
    """Costs: a hardware preset, and constants that override it."""

    hardware: str = "h100x8-llama-3.1-8b"
    """Hardware preset; `sortedrl presets` lists them with their arithmetic."""
    step_seconds: float | None = None
    """Fixed seconds of a decode step."""
    sequence_seconds: float | None = None
    """Seconds added to a step for each running sequence."""
    cached_token_seconds: float | None = None
    """Seconds added to a step for each cached token."""
    prefill_token_seconds: float | None = None
    """Seconds of prefill for each token."""
    interrupt_seconds: float | None = None
    """Seconds to stop the engine and collect unfinished work."""
    weight_sync_seconds: float | None = None
    """Seconds of a weight sync."""
    update_seconds: float | None = None
    """Fixed seconds of an update."""
    update_token_seconds: float | None = None
    """Seconds added to an update for each answer token."""

    def __post_init__(self) -> None:
        require(self.hardware in HARDWARE, unknown_name("hardware", self.hardware, HARDWARE))
        self.costs()

    def costs(self) -> Costs:
        """The constants of the preset, with the overrides applied."""
        given = asdict(self)
        preset = HARDWARE[given.pop("hardware")]()
        return replace(preset, **{name: n for name, n in given.items() if n is not None})
