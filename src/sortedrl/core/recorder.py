"""Records what the loop does: each method turns an action into its event.

It keeps the clock, the round and the engine's token counts, so that the loop contains only the data
flow. Its state at an update is all that a resumed run needs to continue the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from sortedrl.config.schedule import Schedule
from sortedrl.core.buffer import Buffer
from sortedrl.core.clock import Clock
from sortedrl.core.events import (
    Begin,
    End,
    Finish,
    Harvest,
    Interrupt,
    Landed,
    Load,
    Pause,
    Record,
    Renew,
    Reply,
    Resume,
    Score,
    Scored,
    Start,
    SyncWeights,
    Trained,
    Update,
)
from sortedrl.types import Step, TrainBatch, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalState:
    """The state of a journal between two updates, for a checkpoint."""

    has_begun: bool = False
    round: int = 0
    version: int = 0
    engine_decoded: int = 0
    engine_prefilled: int = 0
    seconds: float = 0.0
    """The clock of the resumed run continues from here."""

    def to_json(self) -> dict[str, bool | int | float]:
        """The state as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, object]) -> JournalState:
        """Parse a JSON object; `ValueError` if it is not a valid state."""
        kinds = {f.name: type(f.default) for f in fields(cls)}
        if {name: type(value) for name, value in row.items()} != kinds:
            names = ", ".join(f"{name} ({kind.__name__})" for name, kind in kinds.items())
            raise ValueError(f"the state of a journal must have {names}, got {dict(row)}")
        return cls(**row)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedUpdate:
    """A finished update that overlapped the rollout."""

    batch: TrainBatch
    version: int
    """Of the new weights."""
    took_seconds: float
    beside_seconds: float
    """The part of them that overlapped the rollout."""

    @property
    def waited_seconds(self) -> float:
        """How long the run waited for it."""
        return self.took_seconds - self.beside_seconds


class Journal:
    """Records the events of one run."""

    def __init__(self, record: Record, *, clock: Clock, state: JournalState | None = None) -> None:
        """Stamp events with the clock's seconds and pass them to `record`.

        With the state of an earlier run, continue it.
        """
        state = JournalState() if state is None else state
        if clock.seconds() < state.seconds:
            raise ValueError(
                f"the clock of a resumed run must start at {state.seconds} seconds or later, "
                f"got {clock.seconds()}"
            )
        self.is_resumed = state.has_begun
        self.round = state.round
        self.version = state.version
        """The version of the weights in the engine, according to the log."""
        self.engine_decoded = state.engine_decoded
        self.engine_prefilled = state.engine_prefilled
        self.has_begun = state.has_begun
        """Whether the first event was written, by this journal or before a resume."""
        self._record = record
        self._seconds = clock.seconds
        self._since = 0.0

    def state(self) -> JournalState:
        """The state to save; valid before the run begins and right after a batch was yielded."""
        return JournalState(
            has_begun=self.has_begun,
            round=self.round,
            version=self.version,
            engine_decoded=self.engine_decoded,
            engine_prefilled=self.engine_prefilled,
            seconds=float(self._seconds()),
        )

    def mark(self) -> None:
        """Start timing the next weight sync or update."""
        self._since = self._seconds()

    def began(self, schedule: Schedule, *, slots: int, seed: int, version: int) -> None:
        """The run starts, with the weights of `version` in the engine."""
        self.has_begun = True
        self.version = version
        self._record(
            Begin(
                seconds=self._seconds(),
                schedule=schedule.name,
                slots=slots,
                seed=seed,
            )
        )

    def resumed(self, version: int) -> None:
        """The run resumes from a checkpoint."""
        self._record(Resume(seconds=self._seconds(), round=self.round, version=version))

    def synced(self, version: int) -> None:
        """The engine has new weights."""
        now = self._seconds()
        took = now - self._since
        self.version = version
        self._record(SyncWeights(seconds=now, round=self.round, version=version, took_seconds=took))

    def renewed(self, before: Trajectory, after: Trajectory) -> None:
        """A complete answer went back to waiting."""
        self._record(
            Renew(
                seconds=self._seconds(),
                prompt=before.prompt.id,
                sample=before.sample_index,
                tokens=before.num_tokens,
                kept=after.num_tokens,
            )
        )

    def loaded(self, group: int, *, prompts: int, trajectories: int) -> None:
        """A group was loaded."""
        self._record(
            Load(
                seconds=self._seconds(),
                round=self.round,
                group=group,
                prompts=prompts,
                trajectories=trajectories,
            )
        )

    def started(self, before: Trajectory, after: Trajectory, *, running: int) -> None:
        """A trajectory went to the engine."""
        cached = after.num_tokens
        self._record(
            Start(
                seconds=self._seconds(),
                round=self.round,
                prompt=after.prompt.id,
                sample=after.sample_index,
                group=after.group,
                attempt=after.attempt,
                prompt_tokens=len(after.prompt.tokens),
                cached=cached,
                dropped=before.num_tokens - cached,
                running=running,
            )
        )

    def stepped(self, step: Step) -> None:
        """Count the tokens of an engine step; they are written with the next event."""
        self.engine_decoded += step.decoded_tokens
        self.engine_prefilled += step.prefilled_tokens

    def paused(self, before: Trajectory, after: Trajectory, *, running: int, outside: int) -> None:
        """A conversation left its slot and waits for its environment."""
        self._record(
            Pause(
                seconds=self._seconds(),
                prompt=after.prompt.id,
                sample=after.sample_index,
                tokens=after.num_tokens,
                decoded=after.decoded_tokens - before.decoded_tokens,
                running=running,
                outside=outside,
                engine_decoded=self.engine_decoded,
                engine_prefilled=self.engine_prefilled,
            )
        )

    def replied(self, trajectory: Trajectory, *, outside: int) -> None:
        """The environment of a conversation replied."""
        self._record(
            Reply(
                seconds=self._seconds(),
                prompt=trajectory.prompt.id,
                sample=trajectory.sample_index,
                given=len(trajectory.given),
                outside=outside,
            )
        )

    def finished(self, before: Trajectory, after: Trajectory, *, running: int) -> None:
        """An answer is complete."""
        assert after.finish_reason is not None
        self._record(
            Finish(
                seconds=self._seconds(),
                prompt=after.prompt.id,
                sample=after.sample_index,
                tokens=after.num_tokens,
                decoded=after.decoded_tokens - before.decoded_tokens,
                reason=after.finish_reason,
                running=running,
                engine_decoded=self.engine_decoded,
                engine_prefilled=self.engine_prefilled,
            )
        )

    def harvested(self, *, ready: int, waiting: int, running: int) -> None:
        """The rollout of the round is over."""
        self._record(
            Harvest(
                seconds=self._seconds(),
                round=self.round,
                ready=ready,
                waiting=waiting,
                running=running,
                engine_decoded=self.engine_decoded,
                engine_prefilled=self.engine_prefilled,
            )
        )

    def interrupted(
        self, before: Trajectory, stopped: Trajectory, after: Trajectory, *, running: int
    ) -> None:
        """A running trajectory went back to waiting."""
        self._record(
            Interrupt(
                seconds=self._seconds(),
                prompt=after.prompt.id,
                sample=after.sample_index,
                tokens=stopped.num_tokens,
                decoded=stopped.decoded_tokens - before.decoded_tokens,
                kept=after.num_tokens,
                running=running,
            )
        )

    def overlapped(self, update: FinishedUpdate) -> None:
        """The overlapped update is complete."""
        self._record(
            Landed(
                seconds=self._seconds(),
                round=self.round,
                version=update.version,
                took_seconds=update.took_seconds,
                beside_seconds=update.beside_seconds,
            )
        )

    def scored(self, trajectories: Sequence[Trajectory]) -> None:
        """The answers of an update are scored; no event is written if none has a reward."""
        if all(t.reward is None and t.scoring is None for t in trajectories):
            return
        now = self._seconds()
        self._record(
            Score(
                seconds=now,
                round=self.round,
                waited_seconds=now - self._since,
                scored=tuple(map(_scored, trajectories)),
            )
        )

    def updated(self, batch: TrainBatch, *, closed: Sequence[int]) -> None:
        """The trainer received a batch."""
        now = self._seconds()
        self._record(
            Update(
                seconds=now,
                round=self.round,
                version=batch.version,
                took_seconds=now - self._since,
                trained=tuple(_trained(t, batch.version) for t in batch.trajectories),
                closed=tuple(closed),
            )
        )

    def ended(self, buffer: Buffer) -> None:
        """All prompts are trained."""
        self._record(End(seconds=self._seconds(), rounds=self.round, trained=buffer.num_trained))


def _scored(trajectory: Trajectory) -> Scored:
    scoring = trajectory.scoring
    return Scored(
        prompt=trajectory.prompt.id,
        sample=trajectory.sample_index,
        reward=trajectory.reward,
        worker=None if scoring is None else scoring.worker,
        start=None if scoring is None else scoring.start,
        took_seconds=None if scoring is None else scoring.seconds,
    )


def _trained(trajectory: Trajectory, version: int) -> Trained:
    ages = [(version - segment.version, len(segment.tokens)) for segment in trajectory.segments]
    return Trained(
        prompt=trajectory.prompt.id,
        sample=trajectory.sample_index,
        group=trajectory.group,
        tokens=trajectory.num_tokens,
        staleness_sum=sum(age * tokens for age, tokens in ages),
        staleness_max=max((age for age, _ in ages), default=0),
    )
