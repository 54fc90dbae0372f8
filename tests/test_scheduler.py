"""The scheduler by itself, driven by an engine and a trainer that are not ours."""

from dataclasses import replace

import pytest
from hypothesis import given

from sortedrl.config.schedule import Schedule
from sortedrl.core.buffer import Buffer, open_group
from sortedrl.core.clock import VirtualClock
from sortedrl.core.meter import measure
from sortedrl.core.recorder import Journal, JournalState
from sortedrl.core.scheduler import PromptQueue, Scheduler
from sortedrl.errors import BufferStateError, ConfigError, DataError
from sortedrl.simulate.engine import SimulatedPrompts
from sortedrl.types import Prompt, Segment
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
    with pytest.raises(BufferStateError, match="3 started trajectories are missing"):
        scheduler.interrupted()
    scheduler.interrupted(started)
    with pytest.raises(BufferStateError, match=r"none has begun .* call to_start\(\) first"):
        scheduler.interrupted()
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


# --- what users give and keep -------------------------------------------------------------------


def test_prompts_are_texts_tokens_dicts_and_prompts_from_any_iterable():
    given = ["why?", [1, 2], {"tokens": [3], "answer": 4}, Prompt(id=99, tokens=(5,))]
    queue = PromptQueue(iter(given))
    assert not queue.is_exhausted
    text, tokens, row, prompt = queue.take(9)
    assert queue.is_exhausted
    assert [p.id for p in (text, tokens, row, prompt)] == [0, 1, 2, 3]
    assert (text.fields["prompt"], list(tokens.tokens)) == ("why?", [1, 2])
    assert (list(row.tokens), dict(row.fields), list(prompt.tokens)) == ([3], {"answer": 4}, [5])


@pytest.mark.parametrize("given", ["one text", {"prompt": "one row"}])
def test_one_prompt_is_not_a_list_of_prompts(given):
    with pytest.raises(ConfigError, match="must be a list of prompts, got one"):
        Scheduler(given, slots=1)


def test_what_would_never_end_or_count_wrongly_is_refused():
    with pytest.raises(ConfigError, match="slots must be at least 1, got 0"):
        Scheduler(["one"], slots=0)
    with pytest.raises(ConfigError, match=r"must be a Schedule, got \{'mode': 'partial'\}"):
        Scheduler(["one"], slots=1, schedule={"mode": "partial"})
    scheduler = Scheduler(["one", "two"], slots=2)
    first, second = scheduler.to_start()
    with pytest.raises(ValueError, match=r"'stop' .* or 'length' .* got 'eos'"):
        first.finished("eos")
    with pytest.raises(BufferStateError, match="of version 1, but the weights are at version 0"):
        scheduler.finished(first.extended([0], [-1.0], version=1).finished())
    with pytest.raises(BufferStateError, match="of version 3"):
        scheduler.interrupted([second.extended([0], [-1.0], version=3)])


def test_a_prompt_of_another_kind_is_refused_with_its_place():
    scheduler = Scheduler(["a", 3.5], slots=2, schedule=SCHEDULE)
    with pytest.raises(ConfigError, match=r"prompt 1 must be text.*got 3\.5"):
        scheduler.to_start()


def test_a_trajectory_grows_by_version_and_counts_what_was_decoded():
    (start,) = open_group([Prompt(id=0)], group=0, samples_per_prompt=1, seed=0)
    grown = start.extended([1, 2], [-0.5, -1.0], version=3).extended([4], [-2.0], version=3)
    grown = grown.extended([5], [-3.0], version=4).extended([], [], version=5)
    assert [(s.version, list(s.tokens)) for s in grown.segments] == [(3, [1, 2, 4]), (4, [5])]
    assert (grown.decoded_tokens, grown.logprobs) == (4, [-0.5, -1.0, -2.0, -3.0])
    assert grown.finished().finish_reason == "stop"
    assert grown.finished("length").finish_reason == "length"
    with pytest.raises(ValueError, match="2 tokens and 1 log-probabilities"):
        start.extended([1, 2], [0.0], version=0)


def test_a_conversation_grows_after_what_was_given():
    (start,) = open_group([Prompt(id=0)], group=0, samples_per_prompt=1, seed=0)
    asked = start.extended([1, 2], [-0.5, -1.0], version=0)
    answered = replace(asked, given=(7, 8)).extended([3], [-2.0], version=0)
    grown = answered.extended([4], [-3.0], version=0)
    assert grown.response == [1, 2, 7, 8, 3, 4]
    assert grown.loss_mask == [1, 1, 0, 0, 1, 1]
    assert (grown.num_turns, grown.num_tokens, grown.decoded_tokens) == (2, 4, 4)


def test_a_saved_scheduler_keeps_the_limit_of_conversations(tmp_path):
    prompts = [f"prompt {number}" for number in range(4)]
    schedule = Schedule(group_prompts=4, update_batch=1, mode="partial")
    scheduler = Scheduler(prompts, slots=4, schedule=schedule, max_begun=2)
    started = scheduler.to_start()
    assert len(started) == 2
    scheduler.finished(started[0].extended([1], [-0.5], version=0).finished())
    scheduler.interrupted([started[1]])
    assert scheduler.batch() is not None
    scheduler.weights_changed()
    scheduler.save(tmp_path)
    loaded = Scheduler.load(tmp_path, prompts, slots=4)
    assert len(loaded.to_start()) == 2


@pytest.mark.parametrize("mode", ["on_policy", "partial"])
@pytest.mark.parametrize("strategy", ["sorted", "sync", "posthoc"])
def test_a_saved_scheduler_goes_on_with_the_same_batches(tmp_path, strategy, mode):
    schedule = Schedule(group_prompts=4, update_batch=2, mode=mode, strategy=strategy)
    prompts = [f"prompt {number}" for number in range(10)]
    whole = driven(Scheduler(prompts, slots=3, schedule=schedule))
    for updates in range(1, len(whole)):
        scheduler = Scheduler(iter(prompts), slots=3, schedule=schedule)
        first = driven(scheduler, updates=updates)
        scheduler.save(tmp_path / str(updates))
        loaded = Scheduler.load(tmp_path / str(updates), iter(prompts), slots=3)
        rest = trained_rest(loaded)
        assert keys_of([*first, *rest]) == keys_of(whole)


def trained_rest(scheduler):
    """What is left of a round that was cut, and all that follows."""
    left = []
    while batch := scheduler.batch():
        left.append(batch)
        scheduler.weights_changed()
    return left + driven(scheduler)


def test_a_source_that_keeps_its_own_position_is_not_read_again_from_its_start(tmp_path):
    source = SimulatedPrompts(8, prompt_tokens=1)
    scheduler = Scheduler(source, slots=3, schedule=SCHEDULE)
    first = driven(scheduler, updates=2)
    scheduler.save(tmp_path)
    with pytest.raises(ConfigError, match="give that source, not an iterable"):
        Scheduler.load(tmp_path, [f"prompt {number}" for number in range(8)], slots=3)
    rest = trained_rest(Scheduler.load(tmp_path, source, slots=3))
    keys = [key for batch in keys_of([*first, *rest]) for key in batch]
    assert sorted(keys) == [(number, 0) for number in range(8)]


def test_a_scheduler_is_saved_between_batches_only(tmp_path):
    scheduler = scheduler_of(SCHEDULE)
    scheduler.to_start()
    with pytest.raises(BufferStateError, match="saved between two batches"):
        scheduler.save(tmp_path)
    with pytest.raises(DataError, match="has no saved scheduler"):
        Scheduler.load(tmp_path, [], slots=1)
