"""Settings of engine.py: presets, and flags that override them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tyro

PeerName = Literal["native", "generate", "generate_batch", "vllm", "vllm-compile", "vllm-invariant"]
PresetName = Literal[
    "cpu",
    "h200-small",
    "h200-tail",
    "h200-qwen",
    "h200-8b",
    "h200-8b-64",
    "h200-8b-256",
    "h200-32b",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to compare."""

    preset: PresetName = "cpu"
    """The preset that the other flags override."""
    model: str = "llama-5m"
    """A Hugging Face folder, or a shape with random weights: llama-5m, llama-88m, smollm2-135m,
    qwen2.5-1.5b, llama-8b, qwen2.5-32b."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and cache."""
    device: str = "cpu"
    """cpu or cuda."""
    slots: int = 32
    """Maximum number of concurrent answers."""
    prompt_tokens: str = "8-48"
    """Length of the prompts: a number, or a range to draw from."""
    workload: str = "long-tail"
    """Length of the answers: fixed:512, uniform:16-256, or long-tail (lognormal)."""
    requests: int | None = 128
    """Number of answers; by default as many as slots."""
    mean: int = 96
    """long-tail: mean length."""
    max: int = 512
    """long-tail: maximum length."""
    seed: int = 0
    """Seed of weights, prompts, lengths and sampling."""
    peers: tuple[PeerName, ...] = ("native", "generate", "generate_batch", "vllm")
    """The engines. vllm has full decode graphs on a GPU, vllm-compile its own defaults,
    vllm-invariant its batch-invariant mode, always in its own process."""
    repeats: int = 3
    """Timed runs of each engine."""
    threads: int | None = 1
    """Threads of torch; by default its own choice."""
    vllm_python: Path | None = None
    """An interpreter with vLLM, if this one has none."""
    json: Path | None = None
    """Write everything to this file."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if min(self.slots, self.repeats) < 1:
            raise ValueError(
                f"slots and repeats must be at least 1, got {self.slots} and {self.repeats}"
            )

    @property
    def with_vllm(self) -> bool:
        """Whether vLLM is among the peers."""
        return any(name.startswith("vllm") for name in self.peers)


_H200 = Settings(
    preset="h200-small",
    model="smollm2-135m",
    dtype="bfloat16",
    device="cuda",
    slots=256,
    prompt_tokens="64",
    workload="fixed:512",
    requests=None,
    mean=891,
    max=4096,
    peers=("native", "vllm", "vllm-compile"),
    threads=None,
)

_8B = replace(
    _H200,
    preset="h200-8b",
    model="llama-8b",
    slots=128,
    workload="fixed:1024",
    peers=("native", "vllm", "vllm-compile", "vllm-invariant"),
)

PRESETS: dict[PresetName, Settings] = {
    "cpu": Settings(),
    "h200-small": _H200,
    "h200-tail": replace(_H200, preset="h200-tail", workload="long-tail", requests=512),
    "h200-qwen": replace(_H200, preset="h200-qwen", model="qwen2.5-1.5b", workload="fixed:2048"),
    "h200-8b": _8B,
    "h200-8b-64": replace(_8B, preset="h200-8b-64", slots=64),
    "h200-8b-256": replace(_8B, preset="h200-8b-256", slots=256, workload="fixed:512"),
    # Two copies of the weights do not fit on one card.
    "h200-32b": replace(
        _8B,
        preset="h200-32b",
        model="qwen2.5-32b",
        slots=64,
        workload="fixed:256",
        peers=("native",),
    ),
}


def parse(arguments: Sequence[str], *, description: str | None) -> Settings:
    """Parse the preset, with the other flags over it."""

    @dataclass(frozen=True)
    class Named:
        preset: PresetName = "cpu"

    words = [word for word in arguments if word not in ("-h", "--help")]
    named, _ = tyro.cli(Named, args=words, return_unknown_args=True)
    return tyro.cli(
        Settings, args=arguments, default=PRESETS[named.preset], description=description
    )
