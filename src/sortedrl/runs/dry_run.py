"""The plan of a training run, made without loading any weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

from sortedrl.build.evaluation import tokenizer_of
from sortedrl.data.row import Row
from sortedrl.data.stream import tokenized
from sortedrl.errors import ModelError
from sortedrl.models.shape import shape_of
from sortedrl.plan.cards import CARDS, Card, card_named
from sortedrl.plan.memory import Precision, memory_plan
from sortedrl.plan.page import RunPlan
from sortedrl.plan.prediction import guessed_lengths, predict
from sortedrl.training.settings import TrainSettings

_GUESSED_PROMPT_TOKENS = 256
_PROMPTS_LOOKED_AT = 2048
_GIB = 1 << 30


def planned_run(
    settings: TrainSettings,
    rows: Sequence[Row],
    *,
    card_name: str | None,
    mean_length: float | None,
    tell: Callable[[str], None],
) -> RunPlan:
    """What the run needs and how long it takes, on a card by name or on the one that is here."""
    card, device_bytes = _device(settings, card_name)
    prompts = _prompt_lengths(settings, rows, tell=tell)
    cache_gib, engine = settings.rollout.cache_gib, settings.engine
    algorithm, optimisation = settings.algorithm, settings.optimiser
    memory = memory_plan(
        shape_of(settings.model),
        slots=engine.slots,
        max_tokens=engine.max_tokens,
        prompt_tokens=max(prompts),
        pass_tokens=settings.passes.tokens,
        precision=_precision(settings, card),
        is_gpu=card.is_gpu,
        has_reference=algorithm.kl > 0,
        has_critic=algorithm.has_critic,
        has_engine_copy=settings.rollout.engine in ("vllm", "sglang"),
        lora_rank=settings.lora.rank,
        gradient_checkpointing=settings.passes.gradient_checkpointing,
        cache_bytes=None if cache_gib is None else int(cache_gib * _GIB),
    )
    prediction = None
    if memory.can_run(device_bytes):
        in_reward = algorithm.kl > 0 and algorithm.used_kl_place == "reward"
        mean_prompt, lengths = round(sum(prompts) / len(prompts)), None
        if mean_length is not None:
            lengths = guessed_lengths(
                engine.max_tokens, mean=mean_length, prompt_tokens=mean_prompt
            )
        prediction = predict(
            memory,
            settings.schedule,
            card=card,
            device_bytes=device_bytes,
            num_rows=len(rows),
            epochs=settings.epochs,
            max_updates=settings.max_updates,
            batch_epochs=optimisation.epochs,
            has_first_pass=in_reward or optimisation.steps * optimisation.epochs > 1,
            lengths=lengths,
            prompt_tokens=mean_prompt,
        )
    return RunPlan(
        card=card,
        device_bytes=device_bytes,
        schedule=settings.schedule,
        memory=memory,
        prediction=prediction,
    )


def _device(settings: TrainSettings, name: str | None) -> tuple[Card, int]:
    """The card to plan for, and its memory."""
    if name is not None:
        card = card_named(name)
        return card, card.memory_bytes or _machine_bytes()
    if torch.cuda.is_available() and (settings.device or "cuda").startswith("cuda"):
        found = torch.cuda.get_device_name(settings.device).lower().replace(" ", "-")
        known = [key for key in CARDS if key in found]
        total = torch.cuda.get_device_properties(torch.device(settings.device or "cuda"))
        return card_named(known[0] if known else "a100"), int(total.total_memory)
    return card_named("cpu"), _machine_bytes()


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _precision(settings: TrainSettings, card: Card) -> Precision:
    if settings.precision == "auto":
        return "bfloat16" if card.is_gpu else "float32"
    return settings.precision


def _prompt_lengths(
    settings: TrainSettings, rows: Sequence[Row], *, tell: Callable[[str], None]
) -> list[int]:
    try:
        tokenizer = tokenizer_of(settings.model)
    except ModelError as error:
        tell(f"{error}; prompts are taken to have {_GUESSED_PROMPT_TOKENS} tokens")
        return [_GUESSED_PROMPT_TOKENS]
    found = tokenized(
        rows[:_PROMPTS_LOOKED_AT],
        tokenizer,
        chat=settings.data.chat,
        max_prompt_tokens=settings.max_prompt_tokens,
    )
    return [len(row.tokens) for row in found.rows]
