"""The loop, with the simulated engine and with one that finishes work in random order."""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.core.buffer import Buffer, BufferState
from sortedrl.core.clock import VirtualClock
from sortedrl.core.controller import Controller
from sortedrl.core.events import EventFile, Record, to_json
from sortedrl.core.loop import Loop
from sortedrl.core.meter import measure
from sortedrl.core.recorder import Journal, JournalState
from sortedrl.errors import BufferStateError
from sortedrl.report.lanes import lanes
from sortedrl.simulate.compare import simulated_lengths
from sortedrl.simulate.costs import ticks
from sortedrl.simulate.engine import SimulatedEngine, SimulatedPrompts, SimulatedTrainer
from sortedrl.simulate.lengths import LengthSettings
from sortedrl.simulate.settings import six
from worlds import (
    MODES,
    STRATEGIES,
    CountingScorer,
    RandomEngine,
    make_loop,
    run,
    schedules,
    simulations,
)


def random_loop(schedule, *, slots, prompts, seed, record):
    clock = VirtualClock()
    return Loop(
        prompts=SimulatedPrompts(prompts, prompt_tokens=0),
        buffer=Buffer(unit_size=schedule.unit_size),
        controller=Controller(schedule),
        engine=RandomEngine(slots=slots, random=Random(seed)),
        scorer=CountingScorer(),
        trainer=SimulatedTrainer(costs=ticks(), clock=clock),
        journal=Journal(record, clock=clock),
        seed=seed,
    )


@given(schedules(), st.integers(1, 8), st.integers(1, 20), st.integers(0, 2**32))
def test_the_laws_hold_for_an_engine_without_any_order(schedule, slots, prompts, seed):
    events = []
    loop = random_loop(schedule, slots=slots, prompts=prompts, seed=seed, record=events.append)
    batches = list(loop.run())
    keys = [t.key for batch in batches for t in batch.trajectories]
    assert len(keys) == len(set(keys)) == prompts * schedule.samples_per_prompt
    ledger = measure(events).run.ledger
    assert ledger.decoded == ledger.trained + ledger.discarded == loop.journal.engine_decoded
    for batch in batches:
        for trajectory in batch.trajectories:
            age = batch.version - trajectory.oldest_version
            assert schedule.staleness_bound is None or age <= schedule.staleness_bound
            assert schedule.max_staleness is None or age <= schedule.max_staleness


@given(schedules(), st.integers(1, 8), st.integers(1, 20), st.integers(0, 2**32))
def test_every_answer_is_scored_once_and_a_renewed_one_forgotten(schedule, slots, prompts, seed):
    loop = random_loop(schedule, slots=slots, prompts=prompts, seed=seed, record=lambda _: None)
    for batch in loop.run():
        assert all(t.reward == t.num_tokens for t in batch.trajectories)
    assert not loop.scorer.pending
    assert set(loop.scorer.collected.values()) == {1}


@given(simulations())
def test_whenever_a_batch_is_yielded_nothing_runs_and_the_versions_count_up(simulation):
    loop, _ = make_loop(simulation)
    for number, batch in enumerate(loop.run()):
        assert loop.buffer.num_running == 0
        loop.buffer.state()
        assert batch.version == number
        assert loop.trainer.version == number + 1
    assert loop.prompts.is_exhausted
    assert loop.buffer.oldest_open_group is None


class SkippingTrainer(SimulatedTrainer):
    """Leaves the weights as they are where the next of `skips`, over and over, says so."""

    def __init__(self, skips: Sequence[bool], **parts) -> None:
        super().__init__(**parts)
        self.updates = 0
        self._skips = skips

    def update(self, batch):
        version = self.version
        super().update(batch)
        if self._skips[self.updates % len(self._skips)]:
            self.version = version
        self.updates += 1


SKIPS = st.lists(st.booleans(), min_size=1, max_size=4)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a checkpoint keeps of a run."""

    buffer: BufferState
    journal: JournalState
    version: int
    updates: int
    engine_version: int


def saved(loop: Loop) -> Saved:
    row = json.loads(json.dumps(loop.journal.state().to_json()))
    return Saved(
        buffer=loop.buffer.state(),
        journal=JournalState.from_json(row),
        version=loop.trainer.version,
        updates=loop.trainer.updates,
        engine_version=loop.engine.version,
    )


def skipping_loop(
    simulation, skips, *, record: Record, scorer=None, state: Saved | None = None
) -> Loop:
    """The loop of a simulation, new or made of what was saved of one that was cut."""
    clock, costs = VirtualClock(), simulation.costs.costs()
    loop = Loop(
        prompts=SimulatedPrompts(
            simulation.num_prompts, prompt_tokens=simulation.lengths.prompt_tokens
        ),
        buffer=Buffer(unit_size=simulation.schedule.unit_size),
        controller=Controller(simulation.schedule),
        engine=SimulatedEngine(
            slots=simulation.engine.slots,
            lengths=simulated_lengths(simulation),
            costs=costs,
            clock=clock,
        ),
        scorer=CountingScorer() if scorer is None else scorer,
        trainer=SkippingTrainer(skips, costs=costs, clock=clock),
        journal=Journal(record, clock=clock),
        seed=simulation.seed,
    )
    if state is None:
        return loop
    clock.advance(state.journal.seconds)
    loop.prompts.take(state.buffer.next_prompt)
    loop.engine.version = state.engine_version
    loop.trainer.version, loop.trainer.updates = state.version, state.updates
    journal = Journal(record, clock=clock, state=state.journal)
    return replace(loop, buffer=Buffer.from_state(state.buffer), journal=journal)


def cut_after(simulation, skips, *, updates: int):
    """A run killed after so many updates: what it saved, what it logged, what it trained on."""
    events: list = []
    loop = skipping_loop(simulation, skips, record=events.append)
    batches = []
    for batch in loop.run():
        batches.append(batch)
        if len(batches) == updates:
            break
    return saved(loop), events, batches


def without(events, *kinds):
    return [event for event in events if event.kind not in kinds]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=15)
@given(data=st.data(), skips=SKIPS)
def test_the_laws_hold_for_a_trainer_that_skips_updates(strategy, mode, data, skips):
    schedule = schedules(strategies=(strategy,), modes=(mode,))
    simulation = data.draw(simulations(schedule=schedule))
    events = []
    loop = skipping_loop(simulation, skips, record=events.append)
    batches = list(loop.run())
    keys = [t.key for batch in batches for t in batch.trajectories]
    total = simulation.num_prompts * simulation.schedule.samples_per_prompt
    assert len(keys) == len(set(keys)) == total
    figures = measure(events).run
    assert figures.ledger.decoded == figures.ledger.trained + figures.ledger.discarded
    assert figures.ledger.decoded == loop.journal.engine_decoded
    assert figures.updates == len(batches)
    skipped = [skips[number % len(skips)] for number in range(len(batches))]
    assert [batch.version for batch in batches] == [
        number - sum(skipped[:number]) for number in range(len(batches))
    ]
    assert not loop.scorer.pending
    assert set(loop.scorer.collected.values()) == {1}


@settings(max_examples=80)
@given(simulations(), SKIPS)
def test_weights_that_stayed_are_not_handed_over_again(simulation, skips):
    events = []
    list(skipping_loop(simulation, skips, record=events.append).run())
    versions = [event.version for event in events if event.kind == "hand_over"]
    assert versions == sorted(set(versions))
    assert 0 not in versions
    every = [True]
    events.clear()
    list(skipping_loop(simulation, every, record=events.append).run())
    assert not [event for event in events if event.kind == "hand_over"]


@settings(max_examples=80)
@given(simulations(), SKIPS, st.lists(st.booleans(), min_size=1, max_size=5))
def test_weights_that_an_evaluation_took_over_are_handed_over_in_the_log(
    simulation, skips, evaluates
):
    """A guest of the engine may load the new weights between two rounds: the log is the same."""
    simulation = replace(simulation, costs=replace(simulation.costs, weight_sync_seconds=0.0))
    plain: list = []
    list(skipping_loop(simulation, skips, record=plain.append).run())
    events: list = []
    loop = skipping_loop(simulation, skips, record=events.append)
    for number, _ in enumerate(loop.run()):
        if evaluates[number % len(evaluates)]:
            loop.engine.load_weights(loop.trainer.weights())
    assert events == plain


@given(simulations(), SKIPS, st.integers(0, 12))
def test_a_run_cut_after_any_update_and_resumed_is_the_undisturbed_run(simulation, skips, cut):
    """The log too, `resume` aside, if the engine comes back with the version it had."""
    whole: list = []
    batches = list(skipping_loop(simulation, skips, record=whole.append).run())
    cut = 1 + cut % len(batches)
    state, events, first = cut_after(simulation, skips, updates=cut)
    at = len(events)
    scorer = CountingScorer()
    resumed = skipping_loop(simulation, skips, record=events.append, scorer=scorer, state=state)
    rest = list(resumed.run())
    assert [*first, *rest] == batches
    assert events[at].kind == "resume"
    assert (events[at].round, events[at].version) == (state.journal.round, state.version)
    assert without(events, "resume") == whole
    assert measure(events) == measure(whole)
    assert lanes(events) == lanes(whole)
    assert not scorer.pending


@given(simulations(), SKIPS, st.integers(0, 12), st.booleans())
def test_an_engine_that_comes_back_with_other_weights_changes_only_the_hand_overs(
    simulation, skips, cut, has_new_weights
):
    simulation = replace(simulation, costs=replace(simulation.costs, weight_sync_seconds=0.0))
    whole: list = []
    total = len(list(skipping_loop(simulation, skips, record=whole.append).run()))
    state, events, _ = cut_after(simulation, skips, updates=1 + cut % total)
    state = replace(state, engine_version=state.version if has_new_weights else 0)
    list(skipping_loop(simulation, skips, record=events.append, state=state).run())
    assert without(events, "resume", "hand_over") == without(whole, "hand_over")
    assert measure(events).run == measure(whole).run


@settings(max_examples=40)
@given(simulations(), SKIPS, st.lists(st.integers(0, 12), min_size=2, max_size=3), st.data())
def test_a_log_cut_at_the_checkpoint_is_written_again_byte_for_byte(
    simulation, skips, checkpoints, data
):
    """Killed at any byte after the newest checkpoint, two or three times."""
    whole: list = []
    total = len(list(skipping_loop(simulation, skips, record=whole.append).run()))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        state, kept, updates = None, None, 0
        for checkpoint in sorted(1 + number % total for number in checkpoints):
            with closing(EventFile(path, keep_bytes=kept)) as file:
                loop = skipping_loop(simulation, skips, record=file, state=state)
                for number, _ in enumerate(loop.run(), start=updates + 1):
                    if number == checkpoint:
                        state, kept, updates = saved(loop), file.sync(), number
            content = path.read_bytes()
            path.write_bytes(content[: data.draw(st.integers(kept, len(content)))])
        with closing(EventFile(path, keep_bytes=kept)) as file:
            list(skipping_loop(simulation, skips, record=file, state=state).run())
        lines = path.read_text().splitlines()
    assert [line for line in lines if '"event":"resume"' not in line] == [
        to_json(event) for event in whole
    ]


def test_a_checkpoint_made_before_the_run_began_is_a_new_run():
    events: list = []
    loop = skipping_loop(six(), [False], record=events.append)
    again = skipping_loop(six(), [False], record=events.append, state=saved(loop))
    list(again.run())
    assert [event.kind for event in events].count("begin") == 1
    assert "resume" not in [event.kind for event in events]


def test_a_run_resumed_after_its_last_update_only_ends():
    whole = run(six())
    state, events, _ = cut_after(six(), [False], updates=len(whole.batches))
    at = len(events)
    assert list(skipping_loop(six(), [False], record=events.append, state=state).run()) == []
    assert [event.kind for event in events[at:]] == ["resume", "end"]
    assert events[-1] == whole.events[-1]


def test_a_journal_refuses_a_clock_that_begins_anew():
    state = JournalState(has_begun=True, seconds=3.0)
    with pytest.raises(ValueError, match=r"must start at 3\.0 seconds or later, got 0\.0"):
        Journal(lambda _: None, clock=VirtualClock(), state=state)


@pytest.mark.parametrize(
    "change", [{"round": 1.5}, {"round": None}, {"has_begun": 1}, {"seconds": "3"}, {"more": 1}]
)
def test_a_journal_state_of_other_fields_is_refused(change):
    row = JournalState().to_json()
    assert JournalState.from_json(row) == JournalState()
    with pytest.raises(ValueError, match="must have has_begun"):
        JournalState.from_json(row | change)
    with pytest.raises(ValueError, match="must have has_begun"):
        JournalState.from_json({"round": 1})


@given(simulations())
def test_the_events_of_a_round_come_in_order(simulation):
    order = ["hand_over", "renew", "rollout", "harvest", "interrupt", "update"]
    rollout = {"load", "start", "finish"}
    events = run(simulation).events
    assert events[0].kind == "begin"
    assert events[-1].kind == "end"
    kinds = ["rollout" if event.kind in rollout else event.kind for event in events[1:-1]]
    rounds, place = 0, len(order)
    for kind in kinds:
        if order.index(kind) < place:
            rounds += 1
        place = order.index(kind)
    assert kinds.count("harvest") == rounds == events[-1].rounds
    assert events[-1].trained == sum(len(e.trained) for e in events if e.kind == "update")


def test_six_prompts_on_four_slots_go_tick_by_tick():
    """Lengths 2, 7, 3, 5, 4, 9: at tick 5 the first three are ready and 1, 4, 5 go back."""
    finished = run(six())
    ends = [(e.seconds, e.prompt, e.tokens) for e in finished.of_kind("finish")]
    assert ends == [(2, 0, 2), (3, 2, 3), (5, 3, 5), (7, 4, 4), (8, 1, 7), (13, 5, 9)]
    stops = [(e.seconds, e.prompt, e.tokens, e.kept) for e in finished.of_kind("interrupt")]
    assert stops == [(5, 1, 5, 5), (5, 4, 3, 3), (5, 5, 2, 2)]
    updates = [(e.seconds, [t.prompt for t in e.trained]) for e in finished.of_kind("update")]
    assert updates == [(6, [0, 2, 3]), (14, [4, 1, 5])]
    staleness = [
        [(t.staleness_sum, t.staleness_max) for t in e.trained] for e in finished.of_kind("update")
    ]
    assert staleness == [[(0, 0), (0, 0), (0, 0)], [(3, 1), (5, 1), (2, 1)]]
    assert [(s.version, len(s.tokens)) for s in finished.batches[1].trajectories[1].segments] == [
        (0, 5),
        (1, 2),
    ]


def test_a_source_that_promises_prompts_and_gives_none_stops_the_run():
    class Empty:
        is_exhausted = False

        def take(self, count):
            return []

    loop, _ = make_loop(six())
    with pytest.raises(BufferStateError, match="round 0 made no progress"):
        list(replace(loop, prompts=Empty()).run())


def test_an_engine_with_the_weights_already_is_not_handed_them_again():
    simulation = six()
    clock = VirtualClock()
    loop, events = make_loop(simulation)
    engine = SimulatedEngine(
        slots=4, lengths=simulated_lengths(simulation), costs=ticks(), clock=clock
    )
    list(replace(loop, engine=engine).run())
    assert [e.version for e in events if e.kind == "hand_over"] == [1]


def test_a_prompt_source_of_nothing_ends_at_once():
    loop, events = make_loop(six())
    loop.prompts.take(6)
    assert list(loop.run()) == []
    assert [event.kind for event in events] == ["begin", "end"]


@pytest.mark.parametrize(
    ("strategy", "group_prompts", "slots", "lengths", "batches"),
    [
        ("tail_batching", 4, 4, (1, 1, 9, 1), [[0, 1], [3, 2]]),
        ("ungrouped", 3, 2, (1, 3, 1, 1), [[0, 2], [3, 1]]),
    ],
)
def test_the_last_fresh_prompt_is_not_trained_alone_while_returned_work_waits(
    strategy, group_prompts, slots, lengths, batches
):
    schedule = Schedule(
        strategy=strategy, group_prompts=group_prompts, update_batch=2, over_launch=1.5
    )
    simulation = replace(
        six(),
        prompts=4,
        schedule=schedule,
        engine=EngineSettings(slots=slots, max_tokens=16),
        lengths=LengthSettings(values=lengths, replay=True, prompt_tokens=0),
    )
    trained = [[t.prompt.id for t in batch.trajectories] for batch in run(simulation).batches]
    assert trained == batches


class FailingTrainer(SimulatedTrainer):
    def update(self, batch):
        if self.version == 1:
            raise RuntimeError("out of memory")
        super().update(batch)


def test_an_update_that_fails_leaves_its_answers_ready():
    schedule = replace(six().schedule, mode="partial")
    events = []
    loop = random_loop(schedule, slots=4, prompts=6, seed=0, record=events.append)
    loop = replace(loop, trainer=FailingTrainer(costs=ticks(), clock=VirtualClock()))
    with pytest.raises(RuntimeError, match="out of memory"):
        list(loop.run())
    state = loop.buffer.state()
    assert len(state.ready) == 6 - state.num_trained > 0
