"""Every setting of supervised fine-tuning, the warm start before RL."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sortedrl.config.algorithm import Optimisation
from sortedrl.config.checks import PositiveInt, check_device, check_values, require
from sortedrl.config.train import DataSettings, Lora, PassSettings, PrecisionChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedSettings:
    """Supervised fine-tuning on given answers."""

    model: str = "tiny"
    """A hub name, a folder, a GGUF file, or tiny: a small model with random weights."""
    task: str = "knights_knaves:people=3-5,count=4096,style=compact"
    """Rows with a column `response`, the answer to imitate: a task, a file or a hub name."""
    out: Path = Path("runs/sft")
    """The folder for the trained model and its losses."""
    seed: int = 0
    """Fixes the order of the rows."""
    epochs: PositiveInt = 1
    """Passes over the data."""
    max_steps: PositiveInt | None = None
    """Stop after this many steps."""
    batch_tokens: PositiveInt = 16384
    """Tokens of one optimiser step, prompts included, at least."""
    folder: Path | None = None
    """Folder with data set files; by default $SORTEDRL_DATA, and then the hub."""
    device: str | None = None
    """cuda, cpu, ...; by default the GPU if there is one."""
    threads: PositiveInt | None = None
    """CPU threads; by default all cores. Tiny models are fastest with 1."""
    precision: PrecisionChoice = "auto"
    """Precision of the weights; auto is bfloat16 on a GPU, float32 on a CPU."""
    optimiser: Optimisation = field(
        default_factory=lambda: Optimisation(
            learning_rate=1e-5, schedule="cosine", warmup_steps=10, beta2=0.98
        )
    )
    passes: PassSettings = field(default_factory=PassSettings)
    lora: Lora = field(default_factory=Lora)
    data: DataSettings = field(default_factory=DataSettings)

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        check_values(self)
        check_device(self.device)
        require(
            self.optimiser.mini_batches == self.optimiser.epochs == 1,
            "optimiser.mini_batches and optimiser.epochs are for reinforcement learning, got "
            f"{self.optimiser.mini_batches} and {self.optimiser.epochs}; set batch_tokens and "
            "epochs",
        )
