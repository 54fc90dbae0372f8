"""The loop, with the simulated engine and with one that finishes work in random order."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sortedrl.buffer import Buffer
from sortedrl.build import simulated_lengths
from sortedrl.clock import VirtualClock
from sortedrl.config import EngineSettings, Schedule
from sortedrl.controller import Controller
from sortedrl.engines.simulated import SimulatedEngine, SimulatedPrompts, SimulatedTrainer
from sortedrl.errors import BufferStateError
from sortedrl.journal import Journal
from sortedrl.loop import Loop
from sortedrl.meter import measure
from sortedrl.simulate.costs import ticks
from sortedrl.simulate.lengths import LengthSettings
from sortedrl.simulate.presets import six
from worlds import (
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


@given(simulations(), st.integers(0, 12))
def test_a_run_cut_after_any_update_goes_on_with_the_same_batches(simulation, updates):
    whole = run(simulation).batches
    assume(len(whole) > 1)
    updates = updates % (len(whole) - 1)
    loop, _ = make_loop(simulation)
    for batch in loop.run():
        if batch.version == updates:
            break
    state = loop.buffer.state()
    again, _ = make_loop(simulation)
    again.prompts.take(state.next_prompt)
    again.trainer.version = loop.trainer.version
    resumed = replace(again, buffer=Buffer.from_state(state))
    assert list(resumed.run()) == whole[updates + 1 :]


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
    with pytest.raises(BufferStateError, match="round 0 moved nothing"):
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
