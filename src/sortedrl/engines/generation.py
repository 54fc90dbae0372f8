"""What evaluation and generation ask of an engine: prompts in, complete answers out.

An evaluation borrows the engine of a run between two updates: other sampling, the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from sortedrl.core.protocols import Engine
from sortedrl.core.randomness import mix
from sortedrl.engines.sampling import Sampling
from sortedrl.types import Key, Prompt, Step, Trajectory, Weights


class Stepper(Protocol):
    """What is stepped until it is done."""

    def step(self) -> Step:
        """Work until at least one token was written or an answer is complete."""


def fresh_trajectories(
    prompts: Sequence[Sequence[int]], *, samples_per_prompt: int, seed: int
) -> list[Trajectory]:
    """`samples_per_prompt` answers to be written for each prompt."""
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


def run_to_end(engine: Stepper, keys: Sequence[Key], *, show_progress: bool) -> list[Trajectory]:
    """Step until every trajectory is complete; gives them in the order of their keys."""
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


class RolloutEngine(Engine, Protocol):
    """What a run asks of its engine beyond the loop: to be lent, and to be let go of."""

    @property
    def name(self) -> str:
        """What it is, for messages."""

    def submit_with(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling,
        max_tokens: int,
    ) -> None:
        """Take on work with other sampling and another limit."""

    def close(self) -> None:
        """Let go of everything it holds; a second time it does nothing."""


@runtime_checkable
class Releasable(Protocol):
    """An engine that shares its memory with a trainer, in turns."""

    def release(self) -> None:
        """Let go of what only writing needs, until work comes; only while there is none."""


class Guest:
    """An `Engine` over another one, which must be idle meanwhile."""

    def __init__(self, engine: RolloutEngine, *, sampling: Sampling, max_tokens: int) -> None:
        """Write with this sampling, at most so many tokens."""
        self._engine = engine
        self._sampling = sampling
        self._max_tokens = max_tokens

    @property
    def slots(self) -> int:
        """Answers written at the same time."""
        return self._engine.slots

    @property
    def version(self) -> int:
        """Version of the weights it writes with."""
        return self._engine.version

    def submit(self, trajectories: Sequence[Trajectory], *, tolerance: float | None) -> None:
        """Take on work, in order of priority."""
        self._engine.submit_with(
            trajectories,
            tolerance=tolerance,
            sampling=self._sampling,
            max_tokens=self._max_tokens,
        )

    def step(self) -> Step:
        """Work until at least one token was written or an answer is complete."""
        return self._engine.step()

    def interrupt(self) -> Sequence[Trajectory]:
        """Stop, and give back every unfinished trajectory."""
        return self._engine.interrupt()

    def load_weights(self, weights: Weights) -> None:
        """Write with these weights from now on."""
        self._engine.load_weights(weights)
