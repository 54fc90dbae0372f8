"""The engine on its own: prompts in, answers out, with a progress bar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from sortedrl.randomness import mix
from sortedrl.types import Key, Prompt, Step, Trajectory


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
