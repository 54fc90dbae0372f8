"""Stations 1 to 8 in order: one round after another, the same for simulated and real parts.

A round: sync new weights, renew what they made stale, feed the engine and let it write until the
controller says harvest, put unfinished work back, train, and yield each update batch.
Whenever a batch is yielded nothing runs, so the state of buffer and recorder can be saved there. A
loop made from what was saved finishes the interrupted round and continues: it trains on the same
batches.

With an `Overlap`, the last update of a round runs beside the rollout of the next one. It begins
when the engine has the weights before it, and ends before the next update: what is trained on is
at most one version older, regardless of timing. Its batch is yielded when it has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from sortedrl.core.buffer import Buffer, open_group
from sortedrl.core.controller import Controller
from sortedrl.core.protocols import Engine, PromptSource, Scorer, Trainer
from sortedrl.core.recorder import FinishedUpdate, Journal
from sortedrl.core.strategies import Plan
from sortedrl.errors import BufferStateError
from sortedrl.types import Key, TrainBatch


class Overlap(Protocol):
    """Runs updates beside the rollout, one at a time: submit, begin, result."""

    def submit(self, batch: TrainBatch) -> None:
        """Accept the batch of the next update; the weights are still those before it."""

    def begin(self) -> None:
        """Begin the update that was submitted, beside what follows; without one, do nothing."""

    def result(self) -> FinishedUpdate | None:
        """Wait for the update that was submitted or begun; `None` if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The parts of a run, joined."""

    prompts: PromptSource
    buffer: Buffer
    controller: Controller
    engine: Engine
    scorer: Scorer
    trainer: Trainer
    journal: Journal
    seed: int
    queue: int = 0
    """Answers that may wait in the engine itself, so that a free slot is filled without asking."""
    overlap: Overlap | None = None
    """Runs the updates beside the rollout; without it the trainer runs each at once."""

    def run(self) -> Iterator[TrainBatch]:
        """Train until the prompts are used up, yielding each batch after its update."""
        buffer, journal = self.buffer, self.journal
        if journal.is_resumed:
            yield from self._resume()
        else:
            journal.began(
                self.controller.schedule,
                slots=self.engine.slots,
                seed=self.seed,
                version=self.engine.version,
            )
        while self._has_work:
            before = (buffer.num_trained, buffer.num_waiting, journal.engine_decoded)
            self._sync_weights()
            if self.overlap is not None:
                self.overlap.begin()
            self._roll_out()
            yield from self._train_ready()
            if before == (buffer.num_trained, buffer.num_waiting, journal.engine_decoded):
                raise BufferStateError(f"round {journal.round} moved nothing; the run would hang")
            journal.round += 1
        journal.ended(buffer)

    @property
    def _has_work(self) -> bool:
        return self.buffer.oldest_open_group is not None or not self.prompts.is_exhausted

    def _resume(self) -> Iterator[TrainBatch]:
        """Finish the round that was cut; the scorer is a new one and has to be told."""
        self.journal.resumed(self.trainer.version)
        for ready in (*self.buffer.harvestable(), *self.buffer.partnered()):
            self.scorer.submit(ready)
        yield from self._train_ready()
        self.journal.round += 1

    def _sync_weights(self) -> None:
        # An evaluation between two rounds has given the engine the weights already.
        if {self.engine.version, self.journal.version} != {self.trainer.version}:
            self.journal.mark()
            if self.engine.version != self.trainer.version:
                self.engine.load_weights(self.trainer.weights())
            self.journal.synced(self.engine.version)
        for ready in self.buffer.partnered():
            renewed = self.controller.mode.renewed(ready, version=self.engine.version)
            if renewed is not None:
                self.scorer.cancel(ready)
                self.buffer.put_back(renewed)
                self.journal.renewed(ready, renewed)

    def _roll_out(self) -> None:
        buffer, controller, prompts = self.buffer, self.controller, self.prompts
        plan: Plan | None = controller.plan(buffer, is_exhausted=prompts.is_exhausted)
        while plan and not controller.should_harvest(
            buffer, plan, is_exhausted=prompts.is_exhausted
        ):
            self._feed(plan)
            if not buffer.num_running:
                plan = controller.widened(buffer, plan)
                continue
            step = self.engine.step()
            self.journal.stepped(step)
            for after in step.finished:
                before = buffer.finish(after)
                self.scorer.submit(after)
                self.journal.finished(before, after, running=buffer.num_running)
        self.journal.harvested(buffer)
        for stopped in self.engine.interrupt() if buffer.num_running else ():
            after = controller.mode.interrupted(stopped)
            before = buffer.put_back(after)
            self.journal.interrupted(before, stopped, after, running=buffer.num_running)

    def _feed(self, plan: Plan) -> None:
        self._start(plan)
        while count := self.controller.prompts_to_load(
            self.buffer, plan, free_slots=self._free_slots
        ):
            prompts = self.prompts.take(count)
            if not prompts:
                return
            group = open_group(
                prompts,
                group=self.buffer.next_group,
                samples_per_prompt=self.controller.schedule.samples_per_prompt,
                seed=self.seed,
            )
            self.buffer.load(group)
            self.journal.loaded(group, prompts=len(prompts))
            self._start(plan)

    @property
    def _free_slots(self) -> int:
        return self.engine.slots + self.queue - self.buffer.num_running

    def _start(self, plan: Plan) -> None:
        mode, running = self.controller.mode, self.buffer.num_running
        count = self.controller.to_start(self.buffer, plan, free_slots=self._free_slots)
        waited = self.buffer.start(count, feed=plan.feed)
        started = [mode.resumed(t, version=self.engine.version) for t in waited]
        self.engine.submit(started, tolerance=mode.tolerance)
        for before, after in zip(waited, started, strict=True):
            running += 1
            self.journal.started(before, after, running=running)

    def _train_ready(self) -> Iterator[TrainBatch]:
        for keys in self.controller.batches(self.buffer):
            yield from self._finish_update()
            batch = self._train(keys)
            if self.overlap is None:
                yield batch
        if not self._has_work:
            yield from self._finish_update()

    def _finish_update(self) -> Iterator[TrainBatch]:
        update = None if self.overlap is None else self.overlap.result()
        if update is not None:
            self.journal.overlapped(update)
            yield update.batch

    def _train(self, keys: list[Key]) -> TrainBatch:
        self.journal.mark()
        scored = self.scorer.collect(self.buffer.ready(keys))
        self.journal.scored(scored)
        batch = TrainBatch(self.trainer.version, tuple(scored))
        if self.overlap is None:
            self.trainer.update(batch)
        else:
            self.overlap.submit(batch)
        taken = self.buffer.take(keys)
        closed = {t.group for t in taken if not self.buffer.is_open(t.group)}
        self.journal.updated(batch, closed=sorted(closed))
        return batch
