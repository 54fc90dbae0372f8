"""The engine protocol of a run, and generation to completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from sortedrl.core.protocols import Engine
from sortedrl.core.randomness import mix
from sortedrl.engines.sampling import RequestLimits, Sampling
from sortedrl.types import Key, Prompt, Trajectory


class RolloutEngine(Engine, Protocol):
    """What a run needs of its engine besides the loop; any such engine can be part of a pool.

    Calls come from one thread, which may differ from the one that created the engine. Only `name`,
    `slots`, `version` and `request_limits` are read from other threads.
    """

    @property
    def name(self) -> str:
        """Its name in messages."""

    @property
    def request_limits(self) -> Sequence[RequestLimits]:
        """What a request must satisfy; a pool has the limits of all its engines."""

    def submit(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling | None = None,
    ) -> None:
        """Queue work in order of priority: all of it, or none if one is refused.

        `sampling` replaces the engine's own for these trajectories, and its `max_tokens` the
        engine's limit.
        """

    def close(self) -> None:
        """Release processes, threads and memory; a second call does nothing."""


@runtime_checkable
class SleepableEngine(Protocol):
    """An engine that shares its GPU with a trainer; only one of them is awake."""

    def sleep(self) -> bool:
        """Free the memory that only generation needs; the engine must be idle.

        Returns whether the weights were dropped: then `load_weights` must come before the next
        submit, and wakes it.
        """

    def wake(self) -> None:
        """Restore the memory, unless the weights were dropped; the next submit does it too."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The scores of an answer's tokens under the current weights, each given the previous ones."""

    logprobs: list[float]
    gaps: list[float] | None = None
    """Nats by which each token falls short of the one that the engine would sample; `None` if the
    engine does not use our noise."""


@runtime_checkable
class ScoringEngine(Protocol):
    """An engine that computes the log-probabilities of given answers."""

    def score(
        self, trajectories: Sequence[Trajectory], *, sampling: Sampling | None = None
    ) -> list[TokenScores]:
        """Score the tokens of answers under the present weights; the engine must be idle."""


def fresh_trajectories(
    prompts: Sequence[Sequence[int]], *, samples_per_prompt: int, seed: int
) -> list[Trajectory]:
    """`samples_per_prompt` empty trajectories for each prompt."""
    return [
        Trajectory(
            prompt=Prompt(id=index, tokens=tuple(tokens)),
            sample_index=sample,
            group=0,
            seed=mix(seed, index, sample),
        )
        for index, tokens in enumerate(prompts)
        for sample in range(samples_per_prompt)
    ]


def run_to_end(engine: Engine, keys: Sequence[Key], *, show_progress: bool) -> list[Trajectory]:
    """Step until every trajectory is complete; returns them in the order of their keys."""
    done: dict[Key, Trajectory] = {}
    columns = (
        TextColumn("{task.completed}/{task.total} answers"),
        BarColumn(),
        TextColumn("{task.fields[tokens]:,} tokens, {task.fields[rate]:,.0f}/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not show_progress) as progress:
        task = progress.add_task("", total=len(keys), tokens=0, rate=0.0)
        tokens = 0
        while len(done) < len(keys):
            step = engine.step()
            done |= {trajectory.key: trajectory for trajectory in step.finished}
            tokens += step.decoded_tokens
            _show(progress, task, done=len(done), tokens=tokens)
    return [done[key] for key in keys]


def _show(progress: Progress, task: TaskID, *, done: int, tokens: int) -> None:
    elapsed = progress.tasks[0].elapsed or 0.0
    rate = tokens / elapsed if elapsed else 0.0
    progress.update(task, completed=done, tokens=tokens, rate=rate)
