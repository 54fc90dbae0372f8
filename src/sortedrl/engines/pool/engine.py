"""A pool of engines that is an engine itself: it goes on while one of its members lives.

    submit -> queue -> seats -> threads of the members -> reports -> step, interrupt

Every trajectory that was submitted comes back once. Only the caller's thread moves trajectories
from place to place; the threads of the members do nothing but report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from sortedrl.config import require
from sortedrl.engines.pool.crew import Crew
from sortedrl.engines.pool.member import Member, Terms, Work
from sortedrl.engines.pool.placement import Placement
from sortedrl.engines.pool.thread import GoOn, Interrupt, LoadWeights
from sortedrl.engines.sampling import Sampling
from sortedrl.errors import EngineError, EngineLost, RequestError
from sortedrl.types import Step, Trajectory, Weights


class EnginePool:
    """Several engines as one, each driven by a thread of its own.

    The pool owns its members: from now on nobody else calls them, and `close` closes them.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        warn: Callable[[str], None],
        names: Sequence[str] | None = None,
        patience_seconds: float = 300.0,
        spare: int = 0,
    ) -> None:
        """A member that has work and says nothing for `patience_seconds` counts as lost.

        `names` are for messages, by default what the members call themselves. `spare`
        trajectories more than it has slots are handed to a member, so that a free slot is filled
        before the pool hears of it.
        """
        names = [member.name for member in members] if names is None else names
        _refuse_impossible(members, names, patience_seconds=patience_seconds, spare=spare)
        self.name = f"pool of {', '.join(names)}"
        self.version = members[0].version
        self._crew = Crew(members, names=names, warn=warn, patience_seconds=patience_seconds)
        self._placement = Placement(spare=spare)
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def slots(self) -> int:
        """Answers that the living members write at the same time."""
        return self._crew.slots

    def check(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling | None,
        max_tokens: int | None,
    ) -> None:
        """Raise the `RequestError` of any living member: each may have to write them."""
        for seat in self._crew.living:
            # One that knows it is lost says so to its thread as well.
            with suppress(EngineLost):
                seat.member.check(
                    trajectories, tolerance=tolerance, sampling=sampling, max_tokens=max_tokens
                )

    def submit(self, trajectories: Sequence[Trajectory], *, tolerance: float | None) -> None:
        """Take on work in order of priority; all of it or, if one is impossible, none."""
        self._take_on(trajectories, Terms(tolerance=tolerance))

    def submit_with(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling,
        max_tokens: int,
    ) -> None:
        """The same with other sampling and another limit."""
        terms = Terms(tolerance=tolerance, sampling=sampling, max_tokens=max_tokens)
        self._take_on(trajectories, terms)

    def step(self) -> Step:
        """Wait until some member has written a token or completed an answer."""
        self._require_open()
        crew = self._crew
        for seat in crew.living:
            if seat.is_stalled:
                seat.ask(GoOn())
        crew.hear(is_waiting=False)
        while True:
            self._hand_out()
            crew.raise_error()
            if crew.has_news or crew.is_idle:
                return crew.take_step()
            crew.require_living()
            crew.hear(is_waiting=True)

    def interrupt(self) -> Sequence[Trajectory]:
        """Stop all members, and give back every unfinished trajectory, in the order of the keys.

        It does so even if no member is left. An answer that was completed since the last step
        comes back as unfinished too: submitted again, it is complete at once.
        """
        self._require_open()
        self._crew.ask_all(Interrupt())
        self._crew.raise_error()
        return sorted(self._crew.take_all(), key=lambda trajectory: trajectory.key)

    def load_weights(self, weights: Weights) -> None:
        """Have all members write with these weights from now on; they load them side by side."""
        self._require_open()
        crew = self._crew
        crew.require_living()
        # No member keeps a beginning that other weights have read.
        self._placement.forget()
        crew.ask_all(LoadWeights(weights))
        crew.raise_error()
        crew.require_living()
        for seat in crew.living:
            if seat.member.version != weights.version:
                raise EngineError(
                    f"{seat.title} must have the weights of version {weights.version} that it was "
                    f"given, but says it has version {seat.member.version}"
                )
        self.version = weights.version

    def add(self, member: Member, *, name: str | None = None) -> None:
        """Have one more member from now on; its weights must be of the present version."""
        self._require_open()
        name = member.name if name is None else name
        require(
            all(seat.member is not member for seat in self._crew.seats),
            f"each engine must be in a pool once, got {name} again; make a new one",
        )
        require(member.slots >= 1, f"{name} must have at least 1 slot, got {member.slots}")
        require(
            member.version == self.version,
            f"{name} must have the weights of version {self.version}, as the pool, got version "
            f"{member.version}; load them first",
        )
        self._crew.add(member, name=name)
        self.name = f"{self.name}, {name}"

    def close(self) -> None:
        """Close all members and end their threads; what they were writing is given up."""
        if not self._is_closed:
            self._is_closed = True
            self._crew.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineError("the pool is closed; make a new one")

    def _take_on(self, trajectories: Sequence[Trajectory], terms: Terms) -> None:
        self._require_open()
        self._crew.require_living()
        self._refuse_doubled(trajectories)
        self.check(
            trajectories,
            tolerance=terms.tolerance,
            sampling=terms.sampling,
            max_tokens=terms.max_tokens,
        )
        self._crew.queue.extend(Work(trajectory, terms) for trajectory in trajectories)
        self._crew.hear(is_waiting=False)
        self._hand_out()

    def _refuse_doubled(self, trajectories: Sequence[Trajectory]) -> None:
        keys = self._crew.keys
        for trajectory in trajectories:
            if trajectory.key in keys:
                raise RequestError(
                    f"trajectory {trajectory.key} must be submitted once until it comes back, "
                    "but it is in the pool already"
                )
            keys.add(trajectory.key)

    def _hand_out(self) -> None:
        """Give queued work to free slots, first come, first served."""
        queue, living = self._crew.queue, self._crew.living
        while queue and (seat := self._placement.place(queue[0], living)):
            seat.take(queue.popleft())
        for seat in living:
            seat.hand_over()


def _refuse_impossible(
    members: Sequence[Member], names: Sequence[str], *, patience_seconds: float, spare: int
) -> None:
    require(len(members) >= 1, "a pool must have at least 1 engine, got none")
    require(
        len({id(member) for member in members}) == len(members),
        "each engine must be in a pool once; give each member an engine of its own",
    )
    require(
        len(names) == len(members),
        f"a pool of {len(members)} engines must have as many names, got {len(names)}",
    )
    slots = [member.slots for member in members]
    require(min(slots) >= 1, f"each engine of a pool must have at least 1 slot, got {slots}")
    versions = sorted({member.version for member in members})
    require(
        len(versions) == 1,
        f"the engines of a pool must have weights of one version, got {versions}; load the same "
        "weights into all of them first",
    )
    require(patience_seconds > 0, f"patience_seconds must be above 0, got {patience_seconds}")
    require(spare >= 0, f"spare must be 0 or more, got {spare}")
