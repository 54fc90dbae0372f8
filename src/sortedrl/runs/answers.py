"""Which answers of an update are kept as text: some of every length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sortedrl.answer_log import LoggedAnswer
from sortedrl.types import TrainBatch, Trajectory


def spread(trajectories: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """At most `count` of them, from the shortest to the longest in even steps of rank."""
    ranked = sorted(trajectories, key=lambda t: (t.num_tokens, t.key))
    if len(ranked) <= count:
        return ranked
    if count == 1:
        return [ranked[len(ranked) // 2]]
    last = len(ranked) - 1
    return [ranked[place * last // (count - 1)] for place in range(count)]


def logged(
    batch: TrainBatch,
    *,
    update: int,
    count: int,
    question: Callable[[Sequence[int]], str],
    response: Callable[[Trajectory], str],
) -> Iterator[LoggedAnswer]:
    """The answers of an update to keep; `question` gives the text of a prompt's tokens."""
    for trajectory in spread(batch.trajectories, count):
        versions = [segment.version for segment in trajectory.segments] or [batch.version]
        yield LoggedAnswer(
            update=update,
            prompt=trajectory.prompt.id,
            sample=trajectory.sample_index,
            group=trajectory.group,
            versions=(min(versions), max(versions)),
            tokens=trajectory.num_tokens,
            is_truncated=trajectory.finish_reason == "length",
            reward=trajectory.reward,
            parts=dict(trajectory.reward_parts),
            question=question(trajectory.prompt.tokens),
            response=response(trajectory),
        )
