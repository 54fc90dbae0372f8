"""What an engine must offer to be a member of a pool, and the work that it is handed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sortedrl.engines.guest import RolloutEngine
from sortedrl.engines.sampling import Sampling
from sortedrl.types import Key, Trajectory


class Member(RolloutEngine, Protocol):
    """An engine that can be in a pool.

    All calls come from one thread, and that is not the one that made the engine. Only `name`,
    `slots`, `version` and `check` are asked from another thread too, while the engine may be at
    work.
    """

    def check(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling | None,
        max_tokens: int | None,
    ) -> None:
        """Raise the `RequestError` that submitting these would raise; nothing is taken on.

        With `sampling` and `max_tokens` it is `submit_with` that is meant, without them `submit`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How trajectories were submitted; `None` for the engine's own rules."""

    tolerance: float | None
    sampling: Sampling | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """A trajectory to be written, on the terms it was submitted with."""

    trajectory: Trajectory
    terms: Terms

    @property
    def key(self) -> Key:
        """The name of its trajectory."""
        return self.trajectory.key


def submit_to(member: Member, trajectories: Sequence[Trajectory], terms: Terms) -> None:
    """Submit to a member on these terms."""
    if terms.sampling is None or terms.max_tokens is None:
        member.submit(trajectories, tolerance=terms.tolerance)
    else:
        member.submit_with(
            trajectories,
            tolerance=terms.tolerance,
            sampling=terms.sampling,
            max_tokens=terms.max_tokens,
        )
