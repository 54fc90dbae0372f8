"""The scheduler alone: what to start, when to harvest, what to train on.

It connects buffer, controller and journal, and calls neither an engine nor a trainer; `Loop` drives
it. With your own engine and trainer, a whole run is

    while not scheduler.done:
        while not scheduler.should_harvest:
            engine.add(scheduler.to_start())
            for trajectory in engine.step():
                scheduler.finished(trajectory)
        scheduler.interrupted(engine.abort())
        while batch := scheduler.batch():
            train(batch.trajectories)
            scheduler.weights_changed()

Invariant: every trajectory returned by `to_start` comes back exactly once, through `finished`,
`paused` or `interrupted`; a paused conversation, which holds no slot, comes back through `replied`
or `finished`; and each belongs to exactly one batch, which counts as trained only when the caller
says so. Between two batches nothing runs, and buffer and journal can be saved.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

from sortedrl.config.checks import require
from sortedrl.config.schedule import Schedule
from sortedrl.core.buffer import Buffer, open_group
from sortedrl.core.buffer_file import load_buffer, save_buffer
from sortedrl.core.clock import WallClock
from sortedrl.core.controller import Controller
from sortedrl.core.events import Event, Record
from sortedrl.core.files import write_whole
from sortedrl.core.protocols import PromptSource
from sortedrl.core.recorder import Journal, JournalState
from sortedrl.core.strategies import RoundPlan
from sortedrl.errors import BufferStateError, ConfigError, DataError
from sortedrl.types import Key, Prompt, TrainBatch, Trajectory

_BUFFER, _STATE = "buffer.bin", "scheduler.json"
_NOTHING = object()


class Scheduler:
    """Makes the decisions of a run, and holds every trajectory until it is trained."""

    def __init__(
        self,
        prompts: PromptSource | Iterable[object],
        *,
        slots: int,
        schedule: Schedule | None = None,
        seed: int = 0,
        buffer: Buffer | None = None,
        journal: Journal | None = None,
        version: int | None = None,
        max_begun: int | None = None,
    ) -> None:
        """Schedule `prompts` over `slots`; a resumed run passes buffer, journal and version.

        Prompts are texts, lists of token ids, dicts or `Prompt`s, from any iterable: see
        `PromptQueue`.
        At most `max_begun` conversations are begun at a time, as many as there are environments.
        """
        if schedule is not None and not isinstance(schedule, Schedule):
            raise ConfigError(
                f"schedule must be a Schedule, got {schedule!r:.80}; give sortedrl.Schedule(...)"
            )
        require(slots >= 1, f"slots must be at least 1, got {slots}")
        self.schedule = Schedule() if schedule is None else schedule
        self.controller = Controller(self.schedule)
        self.prompts: PromptSource = (
            PromptQueue(prompts) if isinstance(prompts, Iterable) else prompts
        )
        self.slots = slots
        """Trajectories that may run at once; the caller may change it at any time."""
        self.buffer = Buffer(unit_size=self.schedule.unit_size) if buffer is None else buffer
        self.journal = Journal(_ignore, clock=WallClock()) if journal is None else journal
        self.version = self.journal.version if version is None else version
        """The version of the weights that sample new tokens."""
        self._seed = seed
        self._max_begun = max_begun
        self._plan: RoundPlan | None = None
        self._is_rollout = False
        self._batches: deque[list[Key]] = deque()
        self._batch: TrainBatch | None = None
        self._progress: tuple[int, int, int] | None = None

    @property
    def has_work(self) -> bool:
        """Whether any prompt is not trained yet."""
        return self.buffer.oldest_open_group is not None or not self.prompts.is_exhausted

    @property
    def done(self) -> bool:
        """Whether every prompt is trained."""
        return not self.has_work

    @property
    def num_running(self) -> int:
        """Trajectories that were started and have not come back yet."""
        return self.buffer.num_running

    @property
    def num_outside(self) -> int:
        """Conversations that were paused and have no reply yet."""
        return self.buffer.num_outside

    @property
    def should_harvest(self) -> bool:
        """Whether to stop the engine now: a batch is complete, or nothing is left to run."""
        if not self._is_rollout:
            self.begin_round()
        return self._plan is None or self.controller.should_harvest(
            self.buffer, self._plan, is_exhausted=self.prompts.is_exhausted
        )

    def begin(self, *, version: int) -> None:
        """Start the log of a run whose engine has weights of this version."""
        self.version = version
        self.journal.began(self.schedule, slots=self.slots, seed=self._seed, version=version)

    def begin_round(self, *, version: int | None = None) -> list[Trajectory]:
        """Start a round with weights of this version; returns the complete answers they make stale.

        Those go back to waiting, to be resampled or verified. Called implicitly by the first
        `should_harvest` or `to_start` of a round.
        """
        if self._batches or self._batch is not None:
            raise BufferStateError("the previous round has batches left; train on them first")
        if self._progress is not None:
            self.end_round()
        self.version = self.version if version is None else version
        if not self.journal.has_begun:
            self.begin(version=self.version)
        if self.journal.version != self.version:
            self.journal.mark()
            self.journal.synced(self.version)
        self._progress = self._progress_now()
        stale = self._renew()
        self._plan = self.controller.plan(self.buffer, is_exhausted=self.prompts.is_exhausted)
        self._is_rollout = True
        return stale

    def to_start(self) -> list[Trajectory]:
        """Trajectories to start now, in order of priority; at most as many as slots are free.

        If nothing runs and nothing is outside afterwards, `should_harvest` is true.
        """
        if not self._is_rollout:
            self.begin_round()
        started: list[Trajectory] = []
        while not self.should_harvest and self._plan is not None:
            started = self._feed(self._plan)
            if self.buffer.num_running or self.buffer.num_outside:
                break
            self._plan = self.controller.widened(self.buffer, self._plan)
        return started

    def paused(self, trajectory: Trajectory) -> None:
        """A turn is complete: the conversation leaves its slot and waits for its environment."""
        before = self.buffer.pause(trajectory)
        self.journal.paused(
            before,
            trajectory,
            running=self.buffer.num_running,
            outside=self.buffer.num_outside,
        )

    def replied(self, trajectory: Trajectory) -> None:
        """The environment replied (in `given`); the conversation needs a slot again."""
        self.buffer.reply(trajectory)
        self.journal.replied(trajectory, outside=self.buffer.num_outside)

    def finished(self, trajectory: Trajectory) -> None:
        """A started or paused trajectory is complete: it has a finish reason."""
        self._refuse_later(trajectory)
        before = self.buffer.finish(trajectory)
        self.journal.finished(before, trajectory, running=self.buffer.num_running)

    def interrupted(self, trajectories: Iterable[Trajectory] = ()) -> list[Trajectory]:
        """End the rollout of this round; `trajectories` were running, with their tokens so far.

        Returns the conversations that are recalled from outside, because the next weights make
        their tokens stale: their environments are no longer needed.
        """
        if not self._is_rollout:
            raise BufferStateError(
                "interrupted() ends a rollout, but none has begun since the last one; call "
                "to_start() first"
            )
        self.journal.harvested(
            ready=self.buffer.num_harvestable,
            waiting=self.buffer.num_waiting,
            running=self.buffer.num_running,
        )
        for stopped in trajectories:
            self._refuse_later(stopped)
            self._put_back(stopped)
        if self.buffer.num_running:
            raise BufferStateError(
                f"{self.buffer.num_running} started trajectories are missing at the end of the "
                "rollout; pass every unfinished one to interrupted()"
            )
        self.cut_batches()
        recalled = [t for t in self.buffer.outside() if self._is_recalled(t)]
        for stopped in recalled:
            self._put_back(stopped)
        return recalled

    def _refuse_later(self, trajectory: Trajectory) -> None:
        """Refuse tokens of weights that do not exist yet: their staleness would be negative."""
        if trajectory.segments and trajectory.segments[-1].version > self.version:
            raise BufferStateError(
                f"{trajectory.key} has tokens of version {trajectory.segments[-1].version}, but "
                f"the weights are at version {self.version}; extend trajectories with "
                "version=scheduler.version"
            )

    def _is_recalled(self, paused: Trajectory) -> bool:
        """Whether the updates of this round make the tokens of an outside conversation stale."""
        if self.schedule.never_interrupts:
            return False
        if not self.schedule.keeps_stale_tokens:
            return True
        after = self.version + len(self._batches)
        return self.controller.mode.renewed(paused, version=after) is not None

    def _put_back(self, stopped: Trajectory) -> None:
        after = self.controller.mode.interrupted(stopped)
        before = self.buffer.put_back(after)
        self.journal.interrupted(before, stopped, after, running=self.buffer.num_running)

    def cut_batches(self) -> None:
        """Split the ready trajectories into the update batches of this round."""
        self._is_rollout = False
        self._batches.extend(self.controller.batches(self.buffer))

    def batch(self) -> TrainBatch | None:
        """The next update batch of this round, or `None` after the last one."""
        if self._is_rollout or self._batch is not None:
            missing = "interrupted()" if self._is_rollout else "weights_changed()"
            raise BufferStateError(f"batch() comes after {missing}, which was not called")
        if not self._batches:
            return None
        self.journal.mark()
        ready = self.buffer.ready(self._batches.popleft())
        self._batch = TrainBatch(self.version, tuple(ready))
        return self._batch

    def trained(self, batch: TrainBatch) -> None:
        """The batch returned last is trained."""
        taken = self.buffer.take([t.key for t in batch.trajectories])
        closed = {t.group for t in taken if not self.buffer.is_open(t.group)}
        self.journal.updated(batch, closed=sorted(closed))
        self._batch = None

    def weights_changed(self) -> None:
        """The update on the last batch is complete, and the engine has the new weights."""
        if self._batch is None:
            raise BufferStateError("weights_changed() comes after batch(), which was not called")
        self.trained(self._batch)
        self.version += 1

    def state(self) -> dict[str, object]:
        """The state of the run except trajectories, as JSON; only between two batches."""
        if self._is_rollout or self._batch is not None:
            raise BufferStateError(
                "a scheduler can only be saved between two batches: after weights_changed() and "
                "before the next to_start()"
            )
        position = self.prompts.position if isinstance(self.prompts, PromptQueue) else None
        return {
            "version": self.version,
            "seed": self._seed,
            "max_begun": self._max_begun,
            "position": position,
            "schedule": asdict(self.schedule),
            "journal": self.journal.state().to_json(),
        }

    def save(self, folder: str | Path) -> None:
        """Write the state and all trajectories to a folder; see `load`."""
        state, path = self.state(), Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        save_buffer(self.buffer.state(), path / _BUFFER)
        write_whole(path / _STATE, json.dumps(state).encode())

    @classmethod
    def load(
        cls,
        folder: str | Path,
        prompts: PromptSource | Iterable[object],
        *,
        slots: int,
        record: Record | None = None,
    ) -> Scheduler:
        """Load a saved scheduler; `prompts` must be the same and are skipped up to its position.

        Trained prompts stay trained, and begun ones continue. A `PromptSource` of your own keeps
        its position itself. A round that was saved between two of its batches has the others left:
        take them from `batch()` first.
        """
        path = Path(folder)
        try:
            state = json.loads((path / _STATE).read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(path, f"has no saved scheduler ({error}); check the path") from error
        journal_state = JournalState.from_json(state["journal"])
        if isinstance(prompts, Iterable):
            require(
                state["position"] is not None,
                f"{path} was saved with a PromptSource, which keeps its own position; give that "
                "source, not an iterable, whose prompts would be trained again",
            )
            prompts = PromptQueue(prompts, position=state["position"])
        scheduler = cls(
            prompts,
            slots=slots,
            schedule=Schedule(**state["schedule"]),
            seed=state["seed"],
            buffer=Buffer.from_state(load_buffer(path / _BUFFER)),
            journal=Journal(
                record or _ignore,
                clock=WallClock(start=journal_state.seconds),
                state=journal_state,
            ),
            version=state["version"],
            max_begun=state.get("max_begun"),  # folders of 0.1 have none
        )
        if scheduler.schedule.splits_rollouts:
            scheduler.cut_batches()
        return scheduler

    def end_round(self) -> None:
        """Close the round; a round without any progress would repeat for ever, and is refused."""
        if self._progress == self._progress_now():
            raise BufferStateError(f"round {self.journal.round} made no progress and would repeat")
        self._progress = None
        self.journal.round += 1

    def _progress_now(self) -> tuple[int, int, int]:
        buffer = self.buffer
        return (buffer.num_trained, buffer.num_waiting, self.journal.engine_decoded)

    def _renew(self) -> list[Trajectory]:
        if self.schedule.never_interrupts:
            return []
        stale = []
        for ready in (*self.buffer.harvestable(), *self.buffer.partnered()):
            after = self.controller.mode.renewed(ready, version=self.version)
            if after is not None:
                self.buffer.put_back(after)
                self.journal.renewed(ready, after)
                stale.append(ready)
        return stale

    def _feed(self, plan: RoundPlan) -> list[Trajectory]:
        started = self._start(plan)
        while count := self.controller.prompts_to_load(
            self.buffer, plan, free_slots=self._free_slots
        ):
            prompts = self.prompts.take(count)
            if not prompts:
                break
            group = open_group(
                prompts,
                group=self.buffer.next_group,
                samples_per_prompt=self.schedule.samples_per_prompt,
                seed=self._seed,
            )
            self.buffer.load(group)
            self.journal.loaded(group[0].group, prompts=len(prompts), trajectories=len(group))
            started += self._start(plan)
        return started

    @property
    def _free_slots(self) -> int:
        return self.slots - self.buffer.num_running

    def _start(self, plan: RoundPlan) -> list[Trajectory]:
        mode, running = self.controller.mode, self.buffer.num_running
        count = self.controller.to_start(self.buffer, plan, free_slots=self._free_slots)
        waited = self.buffer.start(count, feed=plan.feed, max_begun=self._max_begun)
        started = [mode.resumed(t, version=self.version) for t in waited]
        for before, after in zip(waited, started, strict=True):
            running += 1
            self.journal.started(before, after, running=running)
        return started


class PromptQueue:
    """A `PromptSource` over any iterable; `position` counts the prompts taken.

    text        fields {"prompt": text}
    token ids   tokens
    dict        fields, with "tokens" as the tokens where it has them
    Prompt      unchanged, except that its id is its position
    """

    def __init__(self, prompts: Iterable[object], *, position: int = 0) -> None:
        """Skip to `position`."""
        if isinstance(prompts, str | Mapping):
            raise ConfigError(f"prompts must be a list of prompts, got one: {prompts!r:.80}")
        self._rest = iter(prompts)
        self.position = position
        for _ in islice(self._rest, position):
            pass
        self._next = next(self._rest, _NOTHING)

    @property
    def is_exhausted(self) -> bool:
        """Whether no prompt is left."""
        return self._next is _NOTHING

    def take(self, count: int) -> Sequence[Prompt]:
        """The next prompts, with ascending ids; fewer than `count` only at the end."""
        taken: list[Prompt] = []
        while len(taken) < count and not self.is_exhausted:
            taken.append(_prompt(self._next, self.position))
            self.position += 1
            self._next = next(self._rest, _NOTHING)
        return taken


def _prompt(given: object, number: int) -> Prompt:
    if isinstance(given, Prompt):
        return replace(given, id=number)
    if isinstance(given, str):
        return Prompt(id=number, fields={"prompt": given})
    if isinstance(given, Mapping):
        fields = dict(given)
        return Prompt(id=number, tokens=fields.pop("tokens", ()), fields=fields)
    if isinstance(given, Sequence) and all(isinstance(token, int) for token in given):
        return Prompt(id=number, tokens=given)
    raise ConfigError(
        f"prompt {number} must be text, a list of token ids, a dict or a Prompt, got {given!r:.80}"
    )


def _ignore(event: Event) -> None:
    """A record that discards events."""
