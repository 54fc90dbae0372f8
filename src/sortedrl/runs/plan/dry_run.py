"""The plan of a training run, made without loading any weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache

from sortedrl.config.checks import require
from sortedrl.config.train import TrainSettings
from sortedrl.data.rows import Row
from sortedrl.data.stream import tokenized
from sortedrl.errors import ModelError
from sortedrl.models.shape import KNOWN_SHAPES, Shape, shape_of
from sortedrl.runs.plan.cards import CARDS, Card, Precision, card_named
from sortedrl.runs.plan.memory import MemoryPlan, memory_plan
from sortedrl.runs.plan.page import RunPlan
from sortedrl.runs.plan.prediction import Prediction, guessed_lengths, predict
from sortedrl.runs.tasks import tokenizer_of

_GUESSED_PROMPT_TOKENS = 256
_PROMPTS_LOOKED_AT = 2048
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a user knows of a run that cannot be looked up here; `None` is looked up or guessed."""

    rows: int | None = None
    prompt_tokens: int | None = None
    mean_length: float | None = None
    memory_gib: float | None = None
    """Memory of one card."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        for name, value in (("rows", self.rows), ("prompt-tokens", self.prompt_tokens)):
            require(value is None or value >= 1, f"--{name} must be at least 1, got {value}")
        require(
            self.memory_gib is None or self.memory_gib > 0,
            f"--memory-gib must be positive, got {self.memory_gib}",
        )


def planned_run(
    settings: TrainSettings,
    rows: Sequence[Row],
    *,
    card_name: str | None,
    expected: Expected,
    tell: Callable[[str], None],
) -> RunPlan:
    """What the run needs and how long it takes, on a card by name or on the one that is here.

    `rows` may be empty where `expected` has their number.
    """
    card, device_bytes = _device(settings, card_name, memory_gib=expected.memory_gib)
    shape, has_config = _shape(settings.model, tell=tell)
    prompts = _prompt_lengths(
        settings, rows, expected=expected, has_tokenizer=has_config, tell=tell
    )
    memory = _memory(settings, shape, card=card, prompt_tokens=max(prompts))
    prediction = None
    if memory.can_run(device_bytes):
        prediction = _prediction(
            settings,
            memory,
            card=card,
            device_bytes=device_bytes,
            num_rows=len(rows) if expected.rows is None else expected.rows,
            mean_prompt=round(sum(prompts) / len(prompts)),
            mean_length=expected.mean_length,
        )
    return RunPlan(
        card=card,
        device_bytes=device_bytes,
        settings=settings,
        memory=memory,
        prediction=prediction,
    )


def _memory(settings: TrainSettings, shape: Shape, *, card: Card, prompt_tokens: int) -> MemoryPlan:
    cache_gib, engine = settings.rollout.cache_gib, settings.engine
    return memory_plan(
        shape,
        slots=engine.slots,
        max_tokens=engine.max_tokens,
        prompt_tokens=prompt_tokens,
        pass_tokens=settings.passes.micro_batch_tokens,
        precision=_precision(settings, card),
        is_gpu=card.is_gpu,
        has_reference=settings.algorithm.kl_coef > 0,
        has_critic=settings.algorithm.has_critic,
        has_engine_copy=settings.rollout.engine in ("vllm", "sglang"),
        lora_rank=settings.lora.rank,
        gradient_checkpointing=settings.passes.gradient_checkpointing,
        cache_bytes=None if cache_gib is None else int(cache_gib * _GIB),
        cluster=settings.cluster,
    )


def _prediction(
    settings: TrainSettings,
    memory: MemoryPlan,
    *,
    card: Card,
    device_bytes: int,
    num_rows: int,
    mean_prompt: int,
    mean_length: float | None,
) -> Prediction:
    algorithm, optimisation = settings.algorithm, settings.optimiser
    in_reward = algorithm.kl_coef > 0 and algorithm.effective_kl_place == "reward"
    lengths = None
    if mean_length is not None:
        lengths = guessed_lengths(
            settings.engine.max_tokens, mean=mean_length, prompt_tokens=mean_prompt
        )
    return predict(
        memory,
        settings.schedule,
        card=card,
        device_bytes=device_bytes,
        num_rows=num_rows,
        epochs=settings.epochs,
        max_updates=settings.max_updates,
        batch_epochs=optimisation.epochs,
        has_first_pass=in_reward or optimisation.mini_batches * optimisation.epochs > 1,
        lengths=lengths,
        prompt_tokens=mean_prompt,
    )


def _shape(model: str, *, tell: Callable[[str], None]) -> tuple[Shape, bool]:
    """The shape of the model, and whether it is from the model's own config.

    The hub is not asked about a model that is known here: out of reach it takes a minute to say
    so, and its answer is the same.
    """
    if model not in KNOWN_SHAPES or Path(model).exists():
        return shape_of(model), True
    config = try_to_load_from_cache(model, "config.json")
    if isinstance(config, str):
        return replace(shape_of(Path(config).parent), name=model), True
    tell(
        f"{model} is not on this machine; its sizes are taken from a list of public models, "
        "not from its config"
    )
    return KNOWN_SHAPES[model], False


def _device(
    settings: TrainSettings, name: str | None, *, memory_gib: float | None
) -> tuple[Card, int]:
    """The card to plan for, and its memory."""
    if name is None and settings.cluster.is_used and not settings.cluster.gpus_per_worker:
        name = "cpu"
    if name is not None:
        card = card_named(name)
        known = card.memory_bytes or _machine_bytes()
        return card, known if memory_gib is None else int(memory_gib * _GIB)
    require(
        memory_gib is None,
        f"--memory-gib is the memory of --card, got {memory_gib} without one; give --card",
    )
    if torch.cuda.is_available() and (settings.device or "cuda").startswith("cuda"):
        device = torch.device(settings.device or "cuda")
        total = int(torch.cuda.get_device_properties(device).total_memory)
        return card_of(torch.cuda.get_device_name(device), total), total
    return card_named("cpu"), _machine_bytes()


def card_of(name: str, num_bytes: int) -> Card:
    """The card that a GPU of this name is; one whose speed is not known is refused."""
    found = name.lower().replace(" ", "-")
    known = [key for key in CARDS if key in found]
    require(
        bool(known),
        f"the speed of {name} is not known, only that of {', '.join(CARDS)}; plan with the nearest "
        f"one and your own memory: --card {next(iter(CARDS))} --memory-gib "
        f"{num_bytes / _GIB:.0f}",
    )
    return card_named(known[0])


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _precision(settings: TrainSettings, card: Card) -> Precision:
    if settings.precision == "auto":
        return "bfloat16" if card.is_gpu else "float32"
    return settings.precision


def _prompt_lengths(
    settings: TrainSettings,
    rows: Sequence[Row],
    *,
    expected: Expected,
    has_tokenizer: bool,
    tell: Callable[[str], None],
) -> list[int]:
    """The lengths of some prompts: counted, as expected, or one guess."""
    if expected.prompt_tokens is not None:
        return [expected.prompt_tokens]
    guess = (
        f"prompts are taken to have {_GUESSED_PROMPT_TOKENS} tokens; give their length with "
        "--prompt-tokens"
    )
    if not rows or not has_tokenizer:
        tell(guess)
        return [_GUESSED_PROMPT_TOKENS]
    try:
        tokenizer = tokenizer_of(settings.model)
    except ModelError as error:
        tell(f"{error}; {guess}")
        return [_GUESSED_PROMPT_TOKENS]
    found = tokenized(
        rows[:_PROMPTS_LOOKED_AT],
        tokenizer,
        chat=settings.data.chat,
        max_prompt_tokens=settings.max_prompt_tokens,
    )
    return [len(row.tokens) for row in found.rows]
