"""The settings of the rollout: which engine writes the answers, and how they are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from sortedrl.config import require, require_temperature
from sortedrl.errors import unknown_name

EngineName = Literal["native", "vllm", "sglang", "servers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """How answers are drawn to train on."""

    engine: EngineName = "native"
    """Who writes the answers.
    native: our own engine, on the very weights that are trained.
    vllm, sglang: that engine, in a process of its own beside the trainer.
    servers: running vLLM or SGLang servers, all together as one engine; see urls."""
    urls: tuple[str, ...] = ()
    """Engine servers only: their addresses, such as http://localhost:8000."""
    options: tuple[str, ...] = ()
    """Engines vllm and sglang: further arguments of theirs, written name=value."""
    queue: int = 0
    """Answers beyond the slots that may wait inside the engine, which then fills a free slot
    without asking; they are started earlier than they would be."""
    hand_over: Path | None = None
    """Engine servers only: the folder through which they get new weights, which they must be able
    to read; by default hand_over in the folder of the run."""
    temperature: float = 1.0
    """Logits are divided by it; the update sees the same probabilities."""
    cache_gib: float | None = None
    """Memory of the engine's cache; by default most of the free GPU memory that the update
    leaves, or a quarter of the RAM."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        names = get_args(EngineName)
        require(self.engine in names, unknown_name("engine", self.engine, names))
        require_temperature("rollout.temperature", self.temperature, is_greedy_allowed=False)
        require(
            self.cache_gib is None or self.cache_gib > 0,
            f"rollout.cache_gib must be positive, got {self.cache_gib}",
        )
        require(self.queue >= 0, f"rollout.queue must be at least 0, got {self.queue}")
        self._check_servers()

    def _check_servers(self) -> None:
        has_servers = self.engine == "servers"
        require(
            bool(self.urls) == has_servers,
            f"rollout.urls are the addresses of engine 'servers', got engine {self.engine!r} with "
            f"{list(self.urls)}; set engine to 'servers' and give at least one address",
        )
        require(
            len(set(self.urls)) == len(self.urls),
            f"rollout.urls must name each server once, got {list(self.urls)}",
        )
        for url in self.urls:
            require(
                url.startswith(("http://", "https://")),
                f"rollout.urls must be addresses such as http://localhost:8000, got {url!r}",
            )
        require(
            self.hand_over is None or has_servers,
            f"rollout.hand_over is for engine 'servers', got it with engine {self.engine!r}; "
            "leave it out",
        )
        require(
            not self.options or self.engine in ("vllm", "sglang"),
            f"rollout.options are for engine 'vllm' or 'sglang', got {list(self.options)} with "
            f"engine {self.engine!r}; leave them out",
        )

    @property
    def is_outside(self) -> bool:
        """Whether the engine has a copy of the weights that are trained, and other kernels."""
        return self.engine != "native"
