"""The plan of a training run, made without loading any weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache

from sortedrl.config.checks import require
from sortedrl.config.data import EnvironmentSettings
from sortedrl.config.train import TrainSettings
from sortedrl.data.rows import Row
from sortedrl.data.stream import tokenized
from sortedrl.errors import ModelError
from sortedrl.models.shape import KNOWN_SHAPES, Shape, shape_of
from sortedrl.runs.plan.cards import CARDS, Card, Demand, Precision, card_named
from sortedrl.runs.plan.memory import MemoryPlan, planned
from sortedrl.runs.plan.page import RunPlan
from sortedrl.runs.plan.prediction import guessed_lengths, predict
from sortedrl.runs.tasks import tokenizer_of
from sortedrl.simulate.conversations import ConversationSettings

_GUESSED_PROMPT_TOKENS = 256
_SAMPLED_PROMPTS = 2048
_GUESSED_TURNS, _GUESSED_SECONDS, _GUESSED_GIVEN = 4.0, 1.0, 100.0
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the user expects of a run; `None` is looked up or guessed."""

    rows: int | None = None
    prompt_tokens: int | None = None
    mean_length: float | None = None
    memory_gib: float | None = None
    """Memory of one card."""
    turns: float | None = None
    """Turns of a conversation."""
    tool_seconds: float | None = None
    """Time of a reply."""
    given_tokens: float | None = None
    """Tokens of a reply."""
    conversations: Path | None = None
    """Observed conversations, in place of these three and of the mean length."""

    def __post_init__(self) -> None:
        counts = {"rows": self.rows, "prompt-tokens": self.prompt_tokens, "turns": self.turns}
        for name, value in counts.items():
            require(value is None or value >= 1, f"--{name} must be at least 1, got {value}")
        for name, time in (
            ("tool-seconds", self.tool_seconds),
            ("given-tokens", self.given_tokens),
        ):
            require(time is None or time >= 0, f"--{name} must be 0 or more, got {time}")
        require(
            self.conversations is None
            or (self.mean_length is None and not self._has_conversations),
            "--conversations is a log of turns, lengths, times and replies; leave out --turns, "
            "--tool-seconds, --given-tokens and --mean-length",
        )
        require(
            self.memory_gib is None or self.memory_gib > 0,
            f"--memory-gib must be positive, got {self.memory_gib}",
        )

    @property
    def _has_conversations(self) -> bool:
        values = (self.turns, self.tool_seconds, self.given_tokens)
        return any(value is not None for value in values)

    def conversation_settings(self, settings: EnvironmentSettings) -> ConversationSettings | None:
        """The conversations of a run, for the simulator; `None` without an environment."""
        if not settings.is_used:
            require(
                not self._has_conversations and self.conversations is None,
                "--turns, --tool-seconds, --given-tokens and --conversations are for runs with an "
                "environment; leave them out, or set environment.name",
            )
            return None
        guess = min(_GUESSED_TURNS, settings.max_turns)
        seconds = min(_GUESSED_SECONDS, settings.reply_seconds)
        return ConversationSettings(
            turns=guess if self.turns is None else self.turns,
            tool_seconds=seconds if self.tool_seconds is None else self.tool_seconds,
            given_tokens=_GUESSED_GIVEN if self.given_tokens is None else self.given_tokens,
            log=self.conversations,
            max_turns=settings.max_turns,
            max_tool_seconds=settings.reply_seconds,
            max_open=settings.max_open,
        )

    @property
    def are_conversations_guessed(self) -> bool:
        """Whether turns, times or replies are guessed where there are any."""
        values = (self.turns, self.tool_seconds, self.given_tokens)
        return self.conversations is None and any(value is None for value in values)


def planned_run(
    settings: TrainSettings,
    rows: Sequence[Row],
    *,
    card_name: str | None,
    expected: Expected,
    tell: Callable[[str], None],
) -> RunPlan:
    """The memory and the duration of a run, on the named card or on that of this machine.

    `rows` may be empty where `expected` has their number.
    """
    card, device_bytes = _device(settings, card_name, memory_gib=expected.memory_gib)
    shape, has_config = _shape(settings.model, tell=tell)
    prompts = _prompt_lengths(
        settings, rows, expected=expected, has_tokenizer=has_config, tell=tell
    )
    memory = run_memory(settings, shape, is_gpu=card.is_gpu, prompt_tokens=max(prompts))
    prediction = None
    if memory.can_run(device_bytes):
        algorithm, optimisation = settings.algorithm, settings.optimiser
        in_reward = algorithm.kl_coef > 0 and algorithm.effective_kl_place == "reward"
        mean_prompt = round(sum(prompts) / len(prompts))
        lengths, mean = None, expected.mean_length
        if mean is not None:
            longest = settings.engine.max_tokens
            lengths = guessed_lengths(longest, mean=mean, prompt_tokens=mean_prompt)
        prediction = predict(
            memory,
            settings.schedule,
            card=card,
            device_bytes=device_bytes,
            num_rows=len(rows) if expected.rows is None else expected.rows,
            epochs=settings.epochs,
            max_updates=settings.max_updates,
            batch_epochs=optimisation.epochs,
            has_first_pass=in_reward or optimisation.mini_batches * optimisation.epochs > 1,
            lengths=lengths,
            prompt_tokens=mean_prompt,
            conversations=expected.conversation_settings(settings.environment),
            are_turns_guessed=expected.are_conversations_guessed,
        )
    return RunPlan(
        card=card,
        device_bytes=device_bytes,
        settings=settings,
        memory=memory,
        prediction=prediction,
    )


def run_memory(
    settings: TrainSettings, shape: Shape, *, is_gpu: bool, prompt_tokens: int
) -> MemoryPlan:
    """The memory of a run, from which `train` takes the size of its caches too."""
    cache_gib, engine = settings.rollout.cache_gib, settings.engine
    demand = Demand(
        shape=shape,
        slots=engine.slots,
        max_tokens=engine.max_tokens,
        prompt_tokens=prompt_tokens,
        pass_tokens=_pass_tokens(settings, sequence_tokens=prompt_tokens + engine.max_tokens),
        precision=_precision(settings, is_gpu=is_gpu),
        is_gpu=is_gpu,
        has_reference=settings.algorithm.kl_coef > 0,
        has_critic=settings.algorithm.has_critic,
        has_engine_copy=settings.rollout.engine in ("vllm", "sglang"),
        lora_rank=settings.lora.rank,
        gradient_checkpointing=settings.passes.gradient_checkpointing,
        optimiser_state=settings.optimiser.state,
        gradients=settings.optimiser.gradients,
        cache_bytes=None if cache_gib is None else int(cache_gib * _GIB),
        cluster=settings.cluster,
    )
    return planned(demand)


def _pass_tokens(settings: TrainSettings, *, sequence_tokens: int) -> int:
    """The most tokens of a pass: fewer than a micro-batch where all open groups together are."""
    asked, schedule = settings.passes.micro_batch_tokens, settings.schedule
    is_grouped = schedule.never_interrupts or schedule.strategy == "sorted"
    if not is_grouped or settings.environment.is_used:
        return asked
    answers = (1 + schedule.lookahead) * schedule.group_trajectories
    if settings.algorithm.filters_zero_variance:
        answers += schedule.update_batch  # held back from earlier groups
    return min(asked, answers * sequence_tokens)


def _shape(model: str, *, tell: Callable[[str], None]) -> tuple[Shape, bool]:
    """The shape of the model, and whether it is from the model's own config.

    A known model is not looked up on the hub: the answer is the same, and without a connection
    the error takes a minute.
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
        known = card.memory_bytes or machine_bytes()
        return card, known if memory_gib is None else int(memory_gib * _GIB)
    require(
        memory_gib is None,
        f"--memory-gib is the memory of --card, got {memory_gib} without one; give --card",
    )
    if torch.cuda.is_available() and (settings.device or "cuda").startswith("cuda"):
        device = torch.device(settings.device or "cuda")
        total = int(torch.cuda.get_device_properties(device).total_memory)
        return card_of(torch.cuda.get_device_name(device), total), total
    return card_named("cpu"), machine_bytes()


def card_of(name: str, num_bytes: int) -> Card:
    """The card of a GPU by its name; an unknown one is refused."""
    found = name.lower().replace(" ", "-")
    known = [key for key in CARDS if key in found]
    require(
        bool(known),
        f"the speed of {name} is not known, only that of {', '.join(CARDS)}; plan with the nearest "
        f"one and your own memory: --card {next(iter(CARDS))} --memory-gib "
        f"{num_bytes / _GIB:.0f}",
    )
    return card_named(known[0])


def machine_bytes() -> int:
    """The main memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _precision(settings: TrainSettings, *, is_gpu: bool) -> Precision:
    if settings.precision == "auto":
        return "bfloat16" if is_gpu else "float32"
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
        rows[:_SAMPLED_PROMPTS],
        tokenizer,
        chat=settings.data.chat,
        max_prompt_tokens=settings.max_prompt_tokens,
    )
    return [len(row.tokens) for row in found.rows]
