"""The settings of the layout: how many GPUs a run has, and how they share the work.

They are shared by engines and trainer, which take turns. The trainer's weights, masters, moments
and gradients are spread evenly over all of them; every `tensor_parallel` of them hold one engine
with a copy of the weights, and `engine.slots` are the slots of all engines together.
"""

from __future__ import annotations

from dataclasses import dataclass

from sortedrl.config import require


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The GPUs of a run to be planned (--dry-run); a cluster runs on more than one."""

    devices: int = 1
    """GPUs, shared by engines and trainer in turns; the trainer is spread over all of them."""
    tensor_parallel: int = 1
    """GPUs that hold one engine between them; there are devices / tensor_parallel engines."""
    offload: bool = False
    """Keep what the trainer holds in the memory of the host, and bring a layer at a time to the
    GPUs: room for models that do not fit, for slower updates."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name, value in (("devices", self.devices), ("tensor_parallel", self.tensor_parallel)):
            require(value >= 1, f"layout.{name} must be at least 1, got {value}")
        require(
            self.devices % self.tensor_parallel == 0,
            f"layout.tensor_parallel must divide layout.devices ({self.devices}), so that every "
            f"engine has its own GPUs, got {self.tensor_parallel}",
        )
        require(
            not self.offload or self.devices > 1,
            "layout.offload needs layout.devices of at least 2, got 1; one GPU has no trainer that "
            "is spread out",
        )

    @property
    def engines(self) -> int:
        """Engines, each with a copy of the weights."""
        return self.devices // self.tensor_parallel

    def refuse_several(self) -> None:
        """Raise `ConfigError` for a layout that one process cannot run."""
        require(
            self.devices == 1,
            f"one process trains on one GPU, got layout.devices {self.devices}; plan the "
            "run with --dry-run, or place it with [cluster] in place of [layout]",
        )
