"""The rollouts of one rank: scheduler, engine, prompts and logs, and their state in a checkpoint.

    checkpoint-N/trainer_state.json         TRL's, written last
    checkpoint-N/sortedrl/rank-R.json       version, position, journal, lengths of the logs
    checkpoint-N/sortedrl/rank-R.buffer     every answer that is not trained yet

A checkpoint is complete when it has all of these; only complete ones are resumed. Nothing runs
while it is written. Neither torch nor TRL is needed here.

The rows of the dataset are one stream of prompts, in an order of its own for each epoch, shared out
over the ranks:

    stream   0 1 2 3 | 4 5 6 7 | ...     4 rows
    rank 0   0   2   | 4   6   |
    rank 1     1   3 |   5   7 |
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from sortedrl.config.schedule import Schedule
from sortedrl.core.buffer import Buffer
from sortedrl.core.buffer_file import load_buffer, save_buffer
from sortedrl.core.clock import WallClock
from sortedrl.core.events import Event, EventFile, Finish, Interrupt, Start, Update, read_events
from sortedrl.core.files import MetricsFile, refuse_foreign, write_whole
from sortedrl.core.meter import Meter, numbers, update_row
from sortedrl.core.randomness import mix
from sortedrl.core.recorder import Journal, JournalState
from sortedrl.core.scheduler import Scheduler
from sortedrl.engines.generation import RolloutEngine
from sortedrl.errors import CheckpointError, ConfigError
from sortedrl.integrations.trl.conversations import ToolConversations
from sortedrl.simulate.lengths import LengthObservation, written_lengths
from sortedrl.types import Key, Prompt, TrainBatch, Trajectory

_SAMPLED_ROWS = 256


class DatasetPrompts:
    """A `PromptSource` over a dataset: every row once per epoch, every `world`-th for each rank.

    A prompt's id is its position in the stream of all ranks. Rows are tokenized when they are
    taken.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenize: Callable[[list[Mapping[str, Any]]], Sequence[Sequence[int]]],
        *,
        total: int,
        shuffle: bool,
        seed: int,
        rank: int = 0,
        world: int = 1,
        position: int = 0,
    ) -> None:
        """A stream of `total` prompts for this rank, of which `position` were taken before."""
        self._dataset = dataset
        self._tokenize = tokenize
        self._total = total
        self._shuffle = shuffle
        self._seed = seed
        self._rank, self._world = rank, world
        self._order: tuple[int, Sequence[int]] = (-1, ())
        self.position = position

    @property
    def is_exhausted(self) -> bool:
        """Whether no prompt is left."""
        return self.position >= self._total

    def take(self, count: int) -> Sequence[Prompt]:
        """The next prompts of this rank; fewer than `count` only at the end."""
        end = max(self.position, min(self.position + count, self._total))
        ids = [position * self._world + self._rank for position in range(self.position, end)]
        self.position = end
        if not ids:
            return []
        rows = [self._row_at(number) for number in ids]
        tokens = self._tokenize([self._dataset[row] for row in rows])
        return [
            Prompt(id=number, tokens=tuple(ids_T), fields={"row": row})
            for number, ids_T, row in zip(ids, tokens, rows, strict=True)
        ]

    def row_of(self, prompt: Prompt) -> dict[str, Any]:
        """The row of the dataset that a prompt was made from."""
        row: dict[str, Any] = dict(self._dataset[prompt.fields["row"]])
        return row

    def longest(self, *, sampled_rows: int = _SAMPLED_ROWS) -> int:
        """Tokens of the longest prompt among a sample of the rows."""
        step = max(1, len(self._dataset) // sampled_rows)
        rows = range(0, len(self._dataset), step)
        return max(map(len, self._tokenize([self._dataset[row] for row in rows])))

    @property
    def fingerprint(self) -> str:
        """A hash of the number of rows and of some of the prompts."""
        size = len(self._dataset)
        digest = hashlib.sha256(str(size).encode())
        for row in range(0, size, max(1, size // _SAMPLED_ROWS)):
            # A row without a prompt gets one from its environment.
            prompt = self._dataset[row].get("prompt")
            digest.update(json.dumps(prompt, default=str).encode())
        return digest.hexdigest()

    def _row_at(self, number: int) -> int:
        epoch, place = divmod(number, len(self._dataset))
        if not self._shuffle:
            return place
        if self._order[0] != epoch:
            rows = range(len(self._dataset))
            self._order = (epoch, sorted(rows, key=lambda row: mix(self._seed, epoch, row)))
        return self._order[1][place]


_FOLDER = "sortedrl"
_FORMAT = 1
_WINDOW = 4096


class LengthWindow:
    """Lengths trained on, over the lengths the policy writes; of the last few thousand answers."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        self._attempts: dict[Key, int] = {}
        self._last: dict[Key, LengthObservation] = {}
        self._seen: deque[LengthObservation] = deque(maxlen=_WINDOW)
        self._trained: deque[int] = deque(maxlen=_WINDOW)

    def __call__(self, event: Event) -> None:
        """Count an event."""
        if isinstance(event, Start):
            key = (event.prompt, event.sample)
            if self._attempts.get(key, event.attempt) != event.attempt and key in self._last:
                self._seen.append(self._last.pop(key))
            self._attempts[key] = event.attempt
        elif isinstance(event, Finish | Interrupt):
            key = (event.prompt, event.sample)
            is_first = self._attempts[key] == 0
            self._last[key] = LengthObservation(
                0, event.tokens, isinstance(event, Finish), is_first
            )
        elif isinstance(event, Update):
            for trained in event.trained:
                key = (trained.prompt, trained.sample)
                del self._attempts[key]
                self._seen.append(self._last.pop(key))
                self._trained.append(trained.tokens)

    @property
    def bias(self) -> float:
        """Mean length trained on over mean length written; NaN where nothing is known."""
        seen = [s for s in (*self._seen, *self._last.values()) if s.exit > s.entry]
        if not seen or not self._trained:
            return math.nan
        return sum(self._trained) / len(self._trained) / written_lengths(seen).mean


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which rank this is, and where it writes."""

    folder: Path
    rank: int
    world: int

    @property
    def events(self) -> Path:
        """The events of this rank; `sortedrl report` reads those of rank 0."""
        name = "events.jsonl" if self.rank == 0 else f"events-rank-{self.rank}.jsonl"
        return self.folder / name

    @property
    def metrics(self) -> Path | None:
        """One line of numbers for each update."""
        return self.folder / "metrics.jsonl" if self.rank == 0 else None

    def state(self, checkpoint: Path, rank: int | None = None) -> Path:
        """The state of a rank in a checkpoint; its buffer is next to it."""
        return checkpoint / _FOLDER / f"rank-{self.rank if rank is None else rank}.json"

    def is_complete(self, checkpoint: Path) -> bool:
        """Whether a checkpoint has TRL's state, which is written last, and that of every rank."""
        try:
            json.loads((checkpoint / "trainer_state.json").read_text())
        except (OSError, ValueError):
            return False
        return all(self.state(checkpoint, rank).is_file() for rank in range(self.world))

    def newest_checkpoint(self) -> Path:
        """The newest complete checkpoint; half-written ones of a killed run do not count."""
        found = [path for path in self.folder.glob("checkpoint-*") if path.name[11:].isdigit()]
        for path in sorted(found, key=lambda path: int(path.name[11:]), reverse=True):
            if self.is_complete(path):
                return path
        raise CheckpointError(
            f"{self.folder} holds no complete checkpoint of SortedGRPOTrainer with {self.world} "
            "processes; train without resume_from_checkpoint"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The state of one rank in a checkpoint."""

    path: Path
    state: Mapping[str, Any]
    buffer: Buffer

    @classmethod
    def read(cls, path: Path) -> Saved:
        """The state at this path, with the buffer beside it."""
        try:
            state = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} must hold the state of this rank, but cannot be read ({error}); resume a "
                "checkpoint that SortedGRPOTrainer saved with as many processes, or start a new "
                "run with its folder as the model"
            ) from error
        buffer = Buffer.from_state(load_buffer(path.with_suffix(".buffer")))
        return cls(path=path, state=state, buffer=buffer)

    def refuse_others(self, own: Mapping[str, object]) -> None:
        """Refuse settings under which this would be another run."""
        for name, value in own.items():
            if self.state[name] != value:
                raise CheckpointError(
                    f"a run is resumed with the settings it was saved under; {name} was "
                    f"{self.state[name]!r}, is {value!r}; restore it, or start a new run with "
                    f"the model {self.path.parent.parent}"
                )


class Rollouts:
    """The scheduler of one rank with its engine, prompts and logs, from the first step on."""

    def __init__(
        self,
        *,
        schedule: Schedule,
        engine: RolloutEngine,
        prompts: DatasetPrompts,
        place: RankPlace,
        submit: Callable[[Sequence[Trajectory], float | None], None],
        sync: Callable[[int], None],
        seed: int,
        saved: Saved | None = None,
        is_cut: bool = False,
        conversations: ToolConversations | None = None,
    ) -> None:
        """Begin a run, or continue the saved one; `is_cut`: in the middle of a batch.

        `sync` gives the engine the present weights under a version, where it does not have them.
        """
        self.prompts = prompts
        self._conversations = conversations
        self._batch = TrainBatch(0, ())
        self._engine, self._submit, self._sync = engine, submit, sync
        self._place, self._seed, self._schedule = place, seed, schedule
        self.meter, self._lengths = Meter(), LengthWindow()
        kept = {"events": None, "metrics": None} if saved is None else saved.state["bytes"]
        if saved is None:
            for path in filter(None, (place.events, place.metrics)):
                refuse_foreign(path, mark=b'"begin"' if path == place.events else b'"update"')
        else:
            EventFile(place.events, keep_bytes=kept["events"]).close()
            for event in read_events(place.events):
                self.meter(event)
                self._lengths(event)
        self._events = EventFile(place.events, keep_bytes=kept["events"], is_watched=True)
        metrics = place.metrics
        self._metrics = None
        if metrics is not None:
            self._metrics = MetricsFile(metrics, keep_bytes=kept["metrics"])
        state = None if saved is None else JournalState.from_json(saved.state["journal"])
        self.clock = WallClock(start=0.0 if state is None else state.seconds)
        self._journal = Journal(self._record, clock=self.clock, state=state)
        self.scheduler = Scheduler(
            prompts,
            slots=engine.slots,
            schedule=schedule,
            seed=seed,
            buffer=None if saved is None else saved.buffer,
            journal=self._journal,
            version=0 if saved is None else saved.state["version"],
            max_begun=None if conversations is None else conversations.limit,
        )
        self._is_resumed = saved is not None
        if saved is None:
            self.scheduler.begin(version=0)
        else:
            self._journal.resumed(self.scheduler.version)
            if conversations is not None:
                for paused in self.scheduler.buffer.outside():
                    conversations.submit(paused)
            if schedule.splits_rollouts or is_cut:
                self.scheduler.cut_batches()

    def next_batch(self) -> TrainBatch:
        """The next update batch, siblings side by side; rolls out until there is one."""
        while (batch := self.scheduler.batch()) is None:
            if self.scheduler.done:
                raise ConfigError(
                    "every prompt is trained, but TRL asks for another generation batch; start "
                    "a new run, or resume with more num_train_epochs or max_steps"
                )
            self._roll_out()
        by_key = sorted(batch.trajectories, key=lambda t: t.key)
        self._batch = TrainBatch(batch.version, tuple(by_key))
        return self._batch

    def scored(self, batch: TrainBatch, rewards: Sequence[float | None]) -> None:
        """TRL has scored the answers of this batch."""
        pairs = zip(batch.trajectories, rewards, strict=True)
        self._journal.scored([replace(answer, reward=reward) for answer, reward in pairs])

    def trained(self, *, update: int, rewards: Sequence[float | None]) -> dict[str, float]:
        """TRL's optimiser step on the last batch is done; gives the numbers of its window."""
        self.scheduler.weights_changed()
        if self._conversations is not None:
            for over in self._batch.trajectories:
                self._conversations.cancel(over)
        figures = self.meter.window()
        known = [reward for reward in rewards if reward is not None]
        totals = update_row(
            update=update,
            version=self.scheduler.version,
            seconds=self.clock.seconds(),
            run=self.meter.run,
            window=figures,
        )
        if self._metrics is not None:
            self._metrics({**totals, "reward/mean": sum(known) / len(known) if known else None})
        return {**numbers(figures), "length_bias": self._lengths.bias}

    def save(self, checkpoint: Path) -> None:
        """Write buffer, journal and position into a checkpoint's folder."""
        path = self._place.state(checkpoint)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_buffer(self.scheduler.buffer.state(), path.with_suffix(".buffer"))
        metrics = self._metrics
        state = {
            **self.identity,
            "version": self.scheduler.version,
            "position": self.prompts.position,
            "journal": self._journal.state().to_json(),
            "bytes": {
                "events": self._events.sync(),
                "metrics": None if metrics is None else metrics.sync(),
            },
        }
        write_whole(path, json.dumps(state).encode())

    @property
    def identity(self) -> dict[str, object]:
        """What must be the same when the run is resumed."""
        return identity_of(self._schedule, self.prompts, self._place, seed=self._seed)

    def close(self) -> None:
        """Close the logs; after the last checkpoint, which a longer run may resume."""
        if self.scheduler.done:
            self.scheduler.end_round()
            self._journal.ended(self.scheduler.buffer)
        self._events.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._conversations is not None:
            self._conversations.close()

    def _record(self, event: Event) -> None:
        self._events(event)
        self.meter(event)
        self._lengths(event)

    def _roll_out(self) -> None:
        scheduler, tolerance = self.scheduler, self.scheduler.controller.mode.tolerance
        if self._is_resumed:
            scheduler.end_round()
            self._is_resumed = False
        self._journal.mark()
        self._sync(scheduler.version)
        if self._journal.version != scheduler.version:
            self._journal.synced(scheduler.version)
        scheduler.begin_round()
        while not scheduler.should_harvest:
            scheduler.slots = self._engine.slots
            self._submit(scheduler.to_start(), tolerance)
            if scheduler.num_running:
                step = self._engine.step()
                self._journal.stepped(step)
                for trajectory in step.finished:
                    self._end_turn(trajectory)
            self._take_replies()
        running = self._engine.interrupt() if scheduler.num_running else ()
        for recalled in scheduler.interrupted(running):
            assert self._conversations is not None, "only conversations are outside"
            self._conversations.cancel(recalled)

    def _end_turn(self, trajectory: Trajectory) -> None:
        if self._conversations is None:
            self.scheduler.finished(trajectory)
            return
        # TRL makes the calls of a turn that was cut off too.
        turn = replace(trajectory, finish_reason=None)
        self.scheduler.paused(turn)
        self._conversations.submit(turn)

    def _take_replies(self) -> None:
        if self._conversations is None or not self.scheduler.num_outside:
            return
        for trajectory in self._conversations.collect(wait=not self.scheduler.num_running):
            if trajectory.finish_reason is None:
                self.scheduler.replied(trajectory)
            else:
                self.scheduler.finished(trajectory)


def identity_of(
    schedule: Schedule, prompts: DatasetPrompts, place: RankPlace, *, seed: int
) -> dict[str, object]:
    """What identifies a run: format, ranks, seed, schedule and data."""
    return {
        "format": _FORMAT,
        "world": place.world,
        "seed": seed,
        "schedule": json.loads(json.dumps(asdict(schedule))),
        "data": prompts.fingerprint,
    }
