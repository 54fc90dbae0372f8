"""The tiny model of the self-test, as it is before an update and after it.

Both have opinions. At the usual first weights all tokens are alike, and an engine that writes with
the wrong weights, or tells log-probabilities of the wrong temperature, would hardly show.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from sortedrl.models.quiet import without_bars
from sortedrl.models.tiny import tiny_model, tiny_settings, tiny_tokenizer

# Heads of 32 numbers: vLLM's attention on a CPU has no smaller ones.
SPEC = "tiny:hidden=64,heads=2,layers=2"
_OPINION = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The model under two versions of its weights."""

    before: PreTrainedModel
    after: PreTrainedModel

    @property
    def vocabulary(self) -> int:
        """Token ids lie below."""
        vocabulary: int = self.before.config.vocab_size
        return vocabulary


def made_pair(*, device: torch.device, dtype: torch.dtype) -> Pair:
    """The two models, where and in the precision that engines have by default."""
    return Pair(
        before=_made(0, device=device, dtype=dtype), after=_made(1, device=device, dtype=dtype)
    )


def write_model(model: PreTrainedModel, folder: Path) -> None:
    """Write a model and its tokenizer as a folder that every engine reads."""
    with without_bars():
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)


def _made(seed: int, *, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    model = tiny_model(tiny_settings(SPEC))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 1.0 if parameter.dim() == 1 else 0.0
            parameter.normal_(mean, _OPINION, generator=generator)
    torch.nn.Module.to(model, device, dtype)
    return model
