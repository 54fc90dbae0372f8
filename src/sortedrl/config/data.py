"""The sections `[data]`, `[rewards]`, `[environment]` and `[evaluation]`.

They set the prompts, how answers are scored, and the evaluation on held-out prompts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Literal

from sortedrl.config.checks import (
    PositiveFloat,
    PositiveInt,
    above,
    check_values,
    is_utf8,
    require,
    require_temperature,
    within,
)
from sortedrl.types import LARGEST_REWARD

ChatUse = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Which columns of a row are used, and how a prompt is formatted."""

    prompt_field: str = "prompt"
    """The column with the question: text, or a list of chat messages."""
    answer_field: str | None = None
    """The column with the gold answer, passed to the reward as `answer`. By default the column
    `answer`, if there is one. Every other column is passed to the reward under its own name."""
    system: str | None = None
    """System message of every prompt."""
    chat: ChatUse = "auto"
    """auto: apply the tokenizer's chat template, if it has one; text becomes a user message.
    on: the same, but a tokenizer without a template is an error. off: the plain text."""

    def __post_init__(self) -> None:
        require(
            self.system is None or is_utf8(self.system),
            f"system must be UTF-8 text, got {self.system!a:.80}",
        )


OnFailure = Literal["score", "skip", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSettings:
    """The pool of processes that run a reward function."""

    workers: PositiveInt | None = None
    """Worker processes; by default half of the cores, at least 2 and at most 8."""
    time_limit_seconds: PositiveFloat = 10.0
    """Timeout of one call; a call that takes longer is killed, with its worker."""
    memory_gib: Annotated[float, above(0, "None sets no limit")] | None = 4.0
    """Memory limit of a worker and its child processes, shared memory included, beyond what
    loading the function took (on Linux)."""
    on_failure: OnFailure = "score"
    """What happens to an answer whose call hit a limit, or killed its worker twice.
    score: it gets failure_reward. skip: it gets no reward and is not trained on.
    stop: the run stops. Failures are always counted, logged and reported."""
    failure_reward: Annotated[float, within(-LARGEST_REWARD, LARGEST_REWARD)] | None = None
    """The reward of such an answer; by default the lowest reward that the function declares (as
    built-in tasks do), but at most 0."""
    batch: PositiveInt = 32
    """Batched functions: largest batch. A batch shares one timeout; if it fails, its answers are
    retried one by one."""
    concurrency: PositiveInt = 16
    """Async functions: maximum concurrent calls in one worker."""

    def __post_init__(self) -> None:
        check_values(self, "rewards.")

    @property
    def num_workers(self) -> int:
        """Worker processes to start."""
        return self.workers or _default_workers()


OnTimeout = Literal["tell", "end", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings:
    """Conversations with an environment; by default there is none."""

    name: str | None = None
    """A built-in environment (calculator, python, questions), or my_module:Class or
    my_file.py:Class."""
    arguments: tuple[str, ...] = ()
    """Keyword arguments of the environment, written name=value."""
    reward: Literal["environment", "function"] = "environment"
    """environment: the reward that the environment gives. function: the reward function, which
    gets the text of the whole conversation."""
    max_turns: PositiveInt = 16
    """Turns of the policy after which a conversation is cut off."""
    max_open: PositiveInt | None = None
    """Maximum number of concurrent conversations; by default unlimited."""
    processes: PositiveInt | None = None
    """Worker processes that run environments; by default half of the cores, at least 2 and at most
    8."""
    reply_seconds: PositiveFloat = 10.0
    """Timeout of one reply; an environment that takes longer is killed, with its worker."""
    process_gib: Annotated[float, above(0, "None sets no limit")] | None = 4.0
    """Memory limit of a worker and its child processes, beyond what loading took (on Linux)."""
    on_timeout: OnTimeout = "tell"
    """What happens to a conversation whose environment hit a limit or killed its worker twice.
    tell: the policy gets an error message and continues.
    end: the conversation ends, with the reward so far. skip: it is not trained on."""

    def __post_init__(self) -> None:
        check_values(self, "environment.")
        require(
            self.name is not None or not self.arguments,
            f"environment.arguments are for an environment, got {list(self.arguments)} without "
            "environment.name",
        )

    @property
    def is_used(self) -> bool:
        """Whether an environment is set."""
        return self.name is not None

    @property
    def gives_rewards(self) -> bool:
        """Whether an environment is set and its reward is used."""
        return self.is_used and self.reward == "environment"

    @property
    def described(self) -> dict[str, object]:
        """The settings that a conversation depends on; empty without an environment."""
        if not self.is_used:
            return {}
        return {
            "environment": self.name,
            "environment_arguments": list(self.arguments),
            "environment_reward": self.reward,
            "max_turns": self.max_turns,
            "reply_seconds": self.reply_seconds,
            "on_timeout": self.on_timeout,
        }

    @property
    def num_workers(self) -> int:
        """Worker processes to start."""
        return self.processes or _default_workers()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """How answers are generated for an evaluation."""

    samples: PositiveInt = 1
    """Answers per prompt: k of mean@k, and the largest k of pass@k."""
    temperature: float | None = None
    """By default 0 (greedy) for one answer per prompt, and 0.6 for several."""
    top_p: Annotated[float, within(0, 1, ends="(]")] = 1.0
    """Nucleus sampling: the most likely tokens that together have this probability."""
    max_tokens: PositiveInt = 1024
    """Tokens after which an answer is cut off."""
    slots: PositiveInt = 32
    """Answers generated at the same time."""
    seed: int = 0
    """The same seed gives the same answers, regardless of what else is evaluated."""
    limit: PositiveInt | None = None
    """Only the first rows of every task."""

    def __post_init__(self) -> None:
        check_values(self)
        require(
            self.samples == 1 or self.temperature != 0,
            f"{self.samples} answers per prompt at temperature 0 would be identical; "
            "leave the temperature out, or ask for one answer",
        )
        require_temperature("temperature", self.sampling_temperature)

    @property
    def sampling_temperature(self) -> float:
        """The resolved temperature."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.samples == 1 else 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodicEvaluation:
    """Held-out evaluation during training, and a score to stop at."""

    tasks: tuple[str, ...] = ()
    """Held-out tasks, such as knights_knaves:people=3-7,count=200; by default their split test."""
    shared_rows: Literal["refuse", "leave_out", "allow"] = "refuse"
    """What to do if held-out rows are also in the training data: refuse the run, remove them from
    the training data, or allow them."""
    every: PositiveInt = 50
    """Updates between evaluations; there is also one before the first update and one at the end."""
    samples: PositiveInt = 1
    """Answers per prompt."""
    temperature: float | None = None
    """By default 0 (greedy) for one answer per prompt, and 0.6 for several."""
    limit: PositiveInt | None = None
    """Only the first rows of every task."""
    target: float | None = None
    """Stop as soon as the mean score over the tasks reaches this."""

    def __post_init__(self) -> None:
        check_values(self, "evaluation.")
        require(
            self.samples == 1 or self.temperature != 0,
            f"evaluation.samples {self.samples} at temperature 0 would be identical; leave the "
            "temperature out, or ask for one answer",
        )
        if self.temperature is not None:
            require_temperature("evaluation.temperature", self.temperature)
        require(
            self.target is None or bool(self.tasks),
            f"evaluation.target {self.target} needs evaluation.tasks",
        )


def _default_workers() -> int:
    return min(8, max(2, (os.cpu_count() or 2) // 2))
