"""What an evaluation needs, from its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sortedrl.data.chat import Tokenizer
from sortedrl.evaluation.settings import EvaluationSettings

if TYPE_CHECKING:
    from sortedrl.engines.native import NativeEngine


def tokenizer_of(model: str) -> Tokenizer:
    """The tokenizer of a model; the weights stay where they are."""
    from sortedrl.models.loading import load_tokenizer

    tokenizer: Tokenizer = load_tokenizer(model)
    return tokenizer


def evaluation_engine(
    model: str, tokenizer: Tokenizer, settings: EvaluationSettings, *, device: str | None
) -> NativeEngine:
    """The native engine with a model of its own, for the answers of an evaluation."""
    from sortedrl.engines.native import NativeEngine, Sampling
    from sortedrl.models.loading import load_model

    return NativeEngine(
        load_model(model, dtype=None, device=device),
        slots=settings.slots,
        max_tokens=settings.max_tokens,
        sampling=Sampling(temperature=settings.sampling_temperature, top_p=settings.top_p),
        tokenizer=tokenizer,
    )
