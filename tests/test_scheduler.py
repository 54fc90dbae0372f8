"""The scheduler by itself, driven by an engine and a trainer that are not ours."""

from dataclasses import replace

import pytest
from hypothesis import given

from sortedrl.config.schedule import Schedule
from sortedrl.core.buffer import Buffer
from sortedrl.core.clock import VirtualClock
from sortedrl.core.meter import measure
from sortedrl.core.recorder import Journal, JournalState
from sortedrl.core.scheduler import Scheduler
from sortedrl.errors import BufferStateError
from sortedrl.simulate.engine import SimulatedPrompts
from sortedrl.types import Segment
from worlds import make_loop, run, simulations

SCHEDULE = Schedule(group_prompts=4, update_batch=2, mode="partial")


class Writer:
    """An engine of four lines: every answer is as long as its prompt's number, plus one."""

    def __init__(self):
        self.running = {}

    def add(self, trajectories):
        self.running.update({t.key: t for t in trajectories})

    def step(self, version):
        """Every running answer grows by a token; gives those that are complete."""
        done = []
        for key, old in sorted(self.running.items()):
            token = Segment((old.num_tokens,), (-1.0,), version)
            new = replace(
                old, segments=(*old.segments, token), decoded_tokens=old.decoded_tokens + 1
            )
            if new.num_tokens == key[0] + 1:
                done.append(replace(self.running.pop(key) and new, finish_reason="stop"))
            else:
                self.running[key] = new
        return done

    def abort(self):
        stopped, self.running = list(self.running.values()), {}
        return stopped


def scheduler_of(schedule, *, prompts=8, slots=3, **given):
    return Scheduler(
        SimulatedPrompts(prompts, prompt_tokens=1), slots=slots, schedule=schedule, **given
    )


def driven(scheduler, *, updates=None):
    """The loop of the module's docstring; gives the batches."""
    writer, batches = Writer(), []
    while not scheduler.done:
        while not scheduler.should_harvest:
            writer.add(scheduler.to_start())
            for trajectory in writer.step(scheduler.version):
                scheduler.finished(trajectory)
        scheduler.interrupted(writer.abort())
        while batch := scheduler.batch():
            batches.append(batch)
            scheduler.weights_changed()
            if len(batches) == updates:
                return batches
    return batches


def keys_of(batches):
    return [[t.key for t in batch.trajectories] for batch in batches]


@pytest.mark.parametrize("mode", ["on_policy", "redraw", "partial"])
@pytest.mark.parametrize("strategy", ["sorted", "april", "ungrouped", "posthoc", "sync"])
def test_a_foreign_engine_and_trainer_train_every_prompt_once(strategy, mode):
    events = []
    schedule = Schedule(group_prompts=4, update_batch=2, mode=mode, strategy=strategy)
    journal = Journal(events.append, clock=VirtualClock())
    batches = driven(scheduler_of(schedule, journal=journal))
    assert sorted(key for keys in keys_of(batches) for key in keys) == [(n, 0) for n in range(8)]
    ledger = measure(events).run.ledger
    assert ledger.decoded == ledger.trained + ledger.discarded
    assert [event.version for event in events if event.kind == "update"] == list(
        range(len(batches))
    )


def test_batches_run_from_short_to_long():
    batches = driven(scheduler_of(SCHEDULE, prompts=4, slots=4))
    assert keys_of(batches) == [[(0, 0), (1, 0)], [(2, 0), (3, 0)]]
    longest = batches[1].trajectories[1]
    assert [(s.version, len(s.tokens)) for s in longest.segments] == [
        (0, 1),
        (0, 1),
        (1, 1),
        (1, 1),
    ]


def test_a_run_that_is_cut_between_two_batches_continues_with_the_same_ones():
    whole = driven(scheduler_of(SCHEDULE))
    for updates in range(1, len(whole)):
        scheduler = scheduler_of(SCHEDULE)
        first = driven(scheduler, updates=updates)
        state = scheduler.journal.state().to_json()
        resumed = scheduler_of(
            SCHEDULE,
            buffer=Buffer.from_state(scheduler.buffer.state()),
            version=scheduler.version,
            journal=Journal(
                lambda event: None,
                clock=VirtualClock(),
                state=JournalState.from_json(state | {"seconds": 0.0}),
            ),
        )
        resumed.prompts = scheduler.prompts
        assert first + driven(resumed) == whole


@given(simulations())
def test_exact_batches_have_exactly_their_size_but_for_the_last(simulation):
    schedule = simulation.schedule
    if not schedule.exact:
        return
    sizes = [len(batch.trajectories) for batch in run(simulation).batches]
    if schedule.splits_rollouts or schedule.strategy == "sync":
        assert all(size <= schedule.update_batch for size in sizes)
    assert all(size == schedule.update_batch for size in sizes[:-1])
    assert 1 <= sizes[-1] <= schedule.update_batch


@given(simulations())
def test_the_loop_is_the_scheduler_with_our_engine(simulation):
    """Driven by hand with the parts of the loop, the scheduler writes the same log."""
    loop, events = make_loop(simulation)
    list(loop.run())
    other, others = make_loop(simulation)
    scheduler, engine, trainer = other.scheduler, other.engine, other.trainer
    while scheduler.has_work:
        while not scheduler.should_harvest:
            engine.submit(scheduler.to_start(), tolerance=other.controller.mode.tolerance)
            if scheduler.num_running:
                step = engine.step()
                other.journal.stepped(step)
                for trajectory in step.finished:
                    scheduler.finished(trajectory)
        scheduler.interrupted(engine.interrupt() if scheduler.num_running else ())
        while batch := scheduler.batch():
            trainer.update(batch)
            scheduler.weights_changed()
        engine.load_weights(trainer.weights())

    def trained(log):
        return [(e.version, [t.prompt for t in e.trained]) for e in log if e.kind == "update"]

    if not simulation.schedule.splits_rollouts:
        assert trained(others) == trained(events)


def test_calls_out_of_order_are_refused():
    scheduler = scheduler_of(SCHEDULE)
    with pytest.raises(BufferStateError, match="comes after batch"):
        scheduler.weights_changed()
    started = scheduler.to_start()
    with pytest.raises(BufferStateError, match="comes after interrupted"):
        scheduler.batch()
    with pytest.raises(
        BufferStateError, match="3 trajectories that were started are still missing"
    ):
        scheduler.interrupted()
    scheduler.interrupted(started)
    assert scheduler.batch() is None


def test_a_batch_must_be_trained_before_the_next_one_and_before_the_next_round():
    scheduler, writer = scheduler_of(SCHEDULE), Writer()
    while not scheduler.should_harvest:
        writer.add(scheduler.to_start())
        for trajectory in writer.step(0):
            scheduler.finished(trajectory)
    scheduler.interrupted(writer.abort())
    assert scheduler.batch() is not None
    with pytest.raises(BufferStateError, match="comes after weights_changed"):
        scheduler.batch()
    with pytest.raises(BufferStateError, match="train on them first"):
        scheduler.to_start()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"update_batch": 3}, "a multiple of update_batch"),
        ({"update_batch": 6, "samples_per_prompt": 4, "harvest_unit": "prompt"}, "multiple of 4"),
        ({"update_batch": 2, "samples_per_prompt": 4, "strategy": "sync"}, "multiple of 4"),
    ],
)
def test_exact_sizes_that_cannot_come_out_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Schedule(exact=True, group_prompts=4, **given)
