"""The training loop: round after round, the same for simulated and real runs.

A round: sync new weights, renew what they made stale, feed the engine and let it generate until the
controller says harvest, put unfinished work back, train, and yield each update batch.
Nothing runs while a batch is yielded, so the state of buffer and recorder can be saved there. A
loop built from saved state finishes the interrupted round and continues with the same batches.

With an `Overlap`, the last update of a round runs during the rollout of the next one. It begins
when the engine has the previous weights, and ends before the next update: tokens trained on are at
most one version staler, regardless of timing. Its batch is yielded when it has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from sortedrl.core.buffer import Buffer
from sortedrl.core.controller import Controller
from sortedrl.core.protocols import Engine, Environments, PromptSource, Scorer, Trainer
from sortedrl.core.recorder import FinishedUpdate, Journal
from sortedrl.core.scheduler import Scheduler
from sortedrl.types import TrainBatch, Trajectory


class Overlap(Protocol):
    """Runs updates during the rollout, one at a time: submit, begin, result."""

    def submit(self, batch: TrainBatch) -> None:
        """Accept the batch of the next update; the weights are not changed yet."""

    def begin(self) -> None:
        """Begin the submitted update in the background; do nothing without one."""

    def result(self) -> FinishedUpdate | None:
        """Wait for the update that was submitted or begun; `None` if there is none."""


@dataclass(slots=True, kw_only=True)
class Loop:
    """The components of a run, connected: the scheduler decides, the loop acts."""

    prompts: PromptSource
    buffer: Buffer
    controller: Controller
    engine: Engine
    scorer: Scorer
    trainer: Trainer
    journal: Journal
    seed: int
    queue: int = 0
    """Answers that may queue in the engine, so that it refills a free slot without asking."""
    environments: Environments | None = None
    """Replies to the policy's turns; without it, an answer is complete after one turn."""
    overlap: Overlap | None = None
    """Runs updates during the rollout; without it, the trainer runs each one synchronously."""
    scheduler: Scheduler = field(init=False)

    def __post_init__(self) -> None:
        """Create the scheduler."""
        self.scheduler = Scheduler(
            self.prompts,
            slots=self.engine.slots,
            schedule=self.controller.schedule,
            seed=self.seed,
            buffer=self.buffer,
            journal=self.journal,
            max_begun=None if self.environments is None else self.environments.limit,
        )

    def run(self) -> Iterator[TrainBatch]:
        """Train until the prompts are used up, yielding each batch after its update."""
        if self.journal.is_resumed:
            yield from self._resume()
        else:
            self.scheduler.begin(version=self.engine.version)
        while self.scheduler.has_work:
            self._sync_weights()
            if self.overlap is not None:
                self.overlap.begin()
            self._roll_out()
            yield from self._train_ready()
            self.scheduler.end_round()
        self.journal.ended(self.buffer)

    def _resume(self) -> Iterator[TrainBatch]:
        """Finish the interrupted round; its answers are submitted again to the new scorer."""
        self.journal.resumed(self.trainer.version)
        for ready in (*self.buffer.harvestable(), *self.buffer.partnered()):
            self.scorer.submit(ready)
        if self.environments is not None:
            for paused in self.buffer.outside():
                self.environments.submit(paused)
        # Otherwise a round ends with its first batch, and other ready answers wait for the next.
        if self.overlap is not None or self.controller.schedule.splits_rollouts:
            self.scheduler.cut_batches()
        yield from self._train_ready()
        self.scheduler.end_round()

    def _sync_weights(self) -> None:
        # An evaluation between two rounds may have synced the weights already.
        if {self.engine.version, self.journal.version} != {self.trainer.version}:
            self.journal.mark()
            if self.engine.version != self.trainer.version:
                self.engine.load_weights(self.trainer.weights())
            self.journal.synced(self.engine.version)
        for stale in self.scheduler.begin_round(version=self.engine.version):
            self.scorer.cancel(stale)

    def _roll_out(self) -> None:
        scheduler, tolerance = self.scheduler, self.controller.mode.tolerance
        while not scheduler.should_harvest:
            scheduler.slots = self.engine.slots + self.queue
            self.engine.submit(scheduler.to_start(), tolerance=tolerance)
            if scheduler.num_running:
                step = self.engine.step()
                self.journal.stepped(step)
                for trajectory in step.finished:
                    self._end_turn(trajectory)
            self._take_replies()
        for recalled in scheduler.interrupted(self._unfinished()):
            assert self.environments is not None
            self.environments.cancel(recalled)

    def _end_turn(self, trajectory: Trajectory) -> None:
        if self.environments is not None and trajectory.finish_reason == "stop":
            turn = replace(trajectory, finish_reason=None)
            self.scheduler.paused(turn)
            self.environments.submit(turn)
        else:
            self._finish(trajectory)

    def _take_replies(self) -> None:
        if self.environments is None or not self.scheduler.num_outside:
            return
        for trajectory in self.environments.collect(wait=not self.scheduler.num_running):
            if trajectory.finish_reason is None:
                self.scheduler.replied(trajectory)
            else:
                self._finish(trajectory)

    def _finish(self, trajectory: Trajectory) -> None:
        self.scorer.submit(trajectory)
        self.scheduler.finished(trajectory)

    def _unfinished(self) -> Iterator[Trajectory]:
        """Stops the engine when the first one is requested, after the harvest is recorded."""
        if self.scheduler.num_running:
            yield from self.engine.interrupt()

    def _train_ready(self) -> Iterator[TrainBatch]:
        while ready := self.scheduler.batch():
            yield from self._finish_update()
            self.journal.mark()
            scored = self.scorer.collect(ready.trajectories)
            self.journal.scored(scored)
            batch = TrainBatch(self.trainer.version, tuple(scored))
            if self.overlap is None:
                self.trainer.update(batch)
            else:
                self.overlap.submit(batch)
            self.scheduler.trained(batch)
            if self.overlap is None:
                yield batch
        if not self.scheduler.has_work:
            yield from self._finish_update()

    def _finish_update(self) -> Iterator[TrainBatch]:
        update = None if self.overlap is None else self.overlap.result()
        if update is not None:
            self.journal.overlapped(update)
            yield update.batch
