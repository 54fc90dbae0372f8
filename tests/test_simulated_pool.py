"""The simulated pool: one engine of it is the simulated engine, and many of them lose nothing."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.cli import main
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.core.buffer import Buffer, open_group
from sortedrl.core.clock import VirtualClock
from sortedrl.core.controller import Controller
from sortedrl.core.loop import Loop
from sortedrl.core.meter import measure
from sortedrl.core.recorder import Journal
from sortedrl.engines.pool import Router
from sortedrl.engines.replica import Assignment
from sortedrl.errors import ConfigError
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.costs import Costs, CostSettings, ticks
from sortedrl.simulate.engine import (
    SimulatedEngine,
    SimulatedPrompts,
    SimulatedScorer,
    SimulatedTrainer,
)
from sortedrl.simulate.lengths import Lengths, LengthSettings
from sortedrl.simulate.pool import SimulatedPool, _Placement
from sortedrl.simulate.settings import PoolSettings, Simulation, six
from sortedrl.types import Prompt, Weights
from worlds import fresh, run, schedules, simulations, written

SPEEDS = st.sampled_from(
    (
        {},
        {"straggler_sigma": 0.3},
        {"slow_share": 0.4},
        {"straggler_sigma": 0.2, "slow_share": 0.2},
    )
)


@st.composite
def pools(draw, engines=(3, 2, 4, 1)):
    """Engines that fail once in a few answers, and seldom enough to write the longest one."""
    return PoolSettings(
        engines=draw(st.sampled_from(engines)),
        failures_per_hour=draw(st.sampled_from((20.0, 5.0, 0.0))),
        restart_seconds=draw(st.sampled_from((20.0, 0.0, 300.0))),
        failures_lose_tokens=draw(st.booleans()),
        weights_gigabytes=draw(st.sampled_from((0.0, 10.0))),
        **draw(SPEEDS),
    )


@st.composite
def pooled(draw, is_frozen=False, schedule=None, pool=None):
    """Simulations with a pool, on costs where a token takes about a second."""
    simulation = draw(simulations(schedule=schedule, is_frozen=is_frozen))
    slots = draw(st.sampled_from((7, 4, 8, 5)))
    costs = CostSettings(
        hardware="ticks",
        sequence_seconds=draw(st.sampled_from((0.0, 0.1))),
        cached_token_seconds=draw(st.sampled_from((0.0, 0.001))),
        prefill_token_seconds=draw(st.sampled_from((0.0, 0.05))),
        interrupt_seconds=draw(st.sampled_from((0.0, 0.5))),
        update_seconds=draw(st.sampled_from((0.0, 40.0))),
    )
    return replace(
        simulation,
        engine=replace(simulation.engine, slots=slots),
        costs=costs,
        pool=draw(pools() if pool is None else pool),
    )


def plain(simulation):
    """Events and batches of the same loop around one simulated engine."""
    events, clock, costs = [], VirtualClock(), simulation.costs.costs()
    lengths = Lengths(
        simulation.lengths,
        seed=simulation.seed,
        max_tokens=simulation.engine.max_tokens,
        samples_per_prompt=simulation.schedule.samples_per_prompt,
    )
    prompt_tokens = simulation.lengths.prompt_tokens
    loop = Loop(
        prompts=SimulatedPrompts(simulation.num_prompts, prompt_tokens=prompt_tokens),
        buffer=Buffer(unit_size=simulation.schedule.unit_size),
        controller=Controller(simulation.schedule),
        engine=SimulatedEngine(
            slots=simulation.engine.slots, lengths=lengths, costs=costs, clock=clock
        ),
        scorer=SimulatedScorer(),
        trainer=SimulatedTrainer(costs=costs, clock=clock),
        journal=Journal(events.append, clock=clock),
        seed=simulation.seed,
    )
    return list(loop.run()), events


@given(simulations())
def test_a_pool_of_one_is_the_simulated_engine_event_for_event(simulation):
    batches, events = plain(simulation)
    finished = run(simulation)
    assert finished.events == events
    assert finished.batches == batches


def keys_of(simulation):
    samples = range(simulation.schedule.samples_per_prompt)
    return [(prompt, sample) for prompt in range(simulation.num_prompts) for sample in samples]


@given(pooled())
def test_nothing_is_lost_or_trained_twice_whatever_fails(simulation):
    finished = run(simulation)
    trained = [t.key for batch in finished.batches for t in batch.trajectories]
    assert sorted(trained) == keys_of(simulation)
    ledger = measure(finished.events).run.ledger
    assert ledger.decoded == ledger.trained + ledger.discarded
    assert ledger.decoded == finished.of_kind("harvest")[-1].engine_decoded
    answers = [t for batch in finished.batches for t in batch.trajectories]
    assert ledger.decoded == sum(t.decoded_tokens for t in answers)


@given(pooled())
def test_the_slots_of_all_engines_are_never_exceeded(simulation):
    running = set()
    for event in run(simulation).of_kind("start", "finish", "interrupt"):
        key = (event.prompt, event.sample)
        running ^= {key}
        assert (key in running) == (event.kind == "start")
        assert event.running == len(running) <= simulation.engine.slots


@given(pooled(is_frozen=True, schedule=schedules(modes=("partial", "coupled"))))
def test_with_frozen_weights_any_pool_trains_on_the_answers_of_one_engine(simulation):
    one = replace(simulation, pool=PoolSettings())
    assert run(simulation).answers() == run(one).answers()


@settings(max_examples=50)
@given(pooled())
def test_the_same_settings_give_the_same_run(simulation):
    assert run(simulation).events == run(simulation).events


@settings(max_examples=50)
@given(pooled())
def test_failures_that_never_come_change_nothing(simulation):
    never = replace(simulation.pool, failures_per_hour=0.0, restart_seconds=1.0)
    rare = replace(never, failures_per_hour=1e-9, failures_lose_tokens=True)
    events = run(replace(simulation, pool=never)).events
    assert events == run(replace(simulation, pool=rare)).events


@given(
    pooled(
        schedule=schedules(strategies=("sync",)),
        pool=st.builds(PoolSettings, engines=st.sampled_from((3, 2, 4))),
    ),
    SPEEDS,
)
def test_stragglers_never_make_a_round_that_fits_the_slots_faster(simulation, speeds):
    """Only then: where work waits for slots, a slow engine may be lucky with what it is given."""
    schedule = simulation.schedule
    slots = schedule.update_batch + schedule.samples_per_prompt
    simulation = replace(simulation, engine=replace(simulation.engine, slots=max(4, slots)))
    uneven = replace(simulation, pool=replace(simulation.pool, **speeds))
    even, slowed = run(simulation).events[-1], run(uneven).events[-1]
    assert slowed.seconds >= even.seconds * (1 - 1e-9)


def pool_of(*values, slots=4, costs=None, clock=None, seed=0, **changes):
    lengths = LengthSettings(values=values, replay=True)
    return SimulatedPool(
        PoolSettings(**changes),
        slots=slots,
        lengths=Lengths(lengths, seed=0, max_tokens=10**6, samples_per_prompt=1),
        costs=costs or ticks(),
        clock=clock or VirtualClock(),
        seed=seed,
    )


def group_of(count, *, first=0):
    prompts = [Prompt(id=number) for number in range(first, first + count)]
    return open_group(prompts, group=0, samples_per_prompt=1, seed=0)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.integers(1, 4),
    st.sampled_from((0.0, 0.5)),
)
def test_each_engine_takes_the_time_of_its_own_sequences(values, engines, sigma):
    costs = Costs(step_seconds=1, sequence_seconds=0.3, cached_token_seconds=0.02)
    clock = VirtualClock()
    pool = pool_of(
        *values, slots=12, costs=costs, clock=clock, engines=engines, straggler_sigma=sigma
    )
    pool.submit(group_of(len(values)), tolerance=None)
    ends = {}
    while len(ends) < len(values):
        ends |= {t.prompt.id: clock.seconds() for t in pool.step().finished}
    slowdowns = PoolSettings(engines=engines, straggler_sigma=sigma).slowdowns(0)
    for number, slowdown in enumerate(slowdowns):
        alone = VirtualClock()
        engine = SimulatedEngine(
            slots=12,
            lengths=Lengths(
                LengthSettings(values=tuple(values), replay=True),
                seed=0,
                max_tokens=10**6,
                samples_per_prompt=1,
            ),
            costs=costs,
            clock=alone,
        )
        # Empty engines of equal size are filled in turn.
        mine = group_of(len(values))[number::engines]
        engine.submit(mine, tolerance=None)
        left = len(mine)
        while left:
            for answer in engine.step().finished:
                left -= 1
                assert ends[answer.prompt.id] == pytest.approx(alone.seconds() * slowdown)


def test_new_work_joins_after_the_step_that_is_under_way():
    clock = VirtualClock()
    settings = PoolSettings(engines=2, slow_share=0.5)
    slow = settings.slowdowns(0).index(2.0)
    values = [1, 1, 3, 3, 3]
    values[slow] = 10
    pool = pool_of(*values, clock=clock, engines=2, slow_share=0.5)
    pool.submit(group_of(2), tolerance=None)
    pool.step()
    assert clock.seconds() == 1.0
    pool.submit(group_of(3, first=2), tolerance=None)
    ends = Counter()
    for _ in range(2):
        finished = pool.step().finished
        ends[clock.seconds()] += len(finished)
    # Two start on the fast engine at 1; one on the slow engine, whose first step ends at 2.
    assert ends == {4.0: 2, 8.0: 1}


def test_an_interruption_waits_for_the_steps_under_way_and_tells_their_tokens_later():
    clock = VirtualClock()
    pool = pool_of(1, 9, 9, slots=2, clock=clock, engines=2, slow_share=1.0, slow_factor=1.5)
    pool.submit(group_of(2), tolerance=None)
    assert pool.step().decoded_tokens == 1
    assert clock.seconds() == 1.5
    (stopped,) = pool.interrupt()
    assert (clock.seconds(), stopped.num_tokens, stopped.finish_reason) == (1.5, 1, None)
    pool.submit([stopped, *group_of(1, first=2)], tolerance=None)
    step = pool.step()
    assert step.decoded_tokens == 1 + 8
    assert pool.interrupt()[0].num_tokens == 8


def steps_until(pool, holds):
    for _ in range(1000):
        if holds():
            return
        pool.step()
    raise AssertionError("it never came")


def test_a_failed_engine_takes_its_slots_with_it_and_brings_them_back():
    pool = pool_of(10**5, engines=4, failures_per_hour=1.0, restart_seconds=500.0, slots=6)
    pool.submit(group_of(6), tolerance=None)
    seen = set()
    steps_until(pool, lambda: seen.add(pool.slots) or len(seen) > 1)
    steps_until(pool, lambda: pool.slots == 6)
    stopped = pool.interrupt()
    assert sorted(t.prompt.id for t in stopped) == list(range(6))
    assert sum(t.num_tokens for t in stopped) == sum(t.decoded_tokens for t in stopped)


def test_what_a_failed_engine_had_written_is_kept_or_counted_as_lost():
    simulation = Simulation(
        groups=2,
        schedule=Schedule(group_prompts=8, update_batch=4),
        engine=EngineSettings(slots=4, max_tokens=200),
        lengths=LengthSettings(median=80, prompt_tokens=0),
        costs=CostSettings(hardware="ticks"),
        pool=PoolSettings(engines=2, failures_per_hour=30.0, restart_seconds=30.0),
    )
    lossy = replace(simulation.pool, failures_lose_tokens=True)
    kept = simulate(simulation).metrics.run
    lost = simulate(replace(simulation, pool=lossy)).metrics.run
    assert kept.ledger.discarded == 0
    assert lost.ledger.discarded > 100
    assert lost.ledger.trained == kept.ledger.trained
    assert lost.seconds > kept.seconds


def test_engines_that_never_stay_up_for_an_answer_are_refused_in_time():
    simulation = replace(
        six(),
        engine=EngineSettings(slots=4, max_tokens=10_000),
        lengths=LengthSettings(values=(5_000,), prompt_tokens=0),
        pool=PoolSettings(engines=2, failures_per_hour=60.0, failures_lose_tokens=True),
    )
    with pytest.raises(ConfigError, match="failed 200 times in a row without finishing one"):
        simulate(simulation)


def test_slots_that_wait_for_a_restart_count_as_idle():
    simulation = replace(
        six(),
        groups=8,
        schedule=Schedule(group_prompts=32, update_batch=8),
        engine=EngineSettings(slots=8, max_tokens=64),
    )
    pool = PoolSettings(engines=4, failures_per_hour=60.0, restart_seconds=200.0)
    even = simulate(replace(simulation, pool=replace(pool, failures_per_hour=0.0)))
    failing = simulate(replace(simulation, pool=pool))
    # An engine is up for 60 of 260 seconds.
    assert failing.metrics.run.bubble > even.metrics.run.bubble + 0.3


@pytest.mark.parametrize(
    ("broadcast", "seconds"), [("tree", 3 * 2.5), ("at_once", 2.5), ("one_by_one", 6 * 2.5)]
)
def test_a_hand_over_takes_its_transfers_and_the_time_of_an_engine(broadcast, seconds):
    clock = VirtualClock()
    pool = pool_of(
        5,
        slots=6,
        costs=Costs(step_seconds=1, weight_sync_seconds=0.25),
        clock=clock,
        engines=6,
        broadcast=broadcast,
        weights_gigabytes=100.0,
        network_latency_seconds=0.5,
    )
    pool.load_weights(Weights(3))
    assert clock.seconds() == 0.25 + seconds
    pool.submit(group_of(1), tolerance=None)
    assert [s.version for s in pool.step().finished[0].segments] == [3]


class Seat:
    """A seat of the real pool and a member of the simulated one."""

    def __init__(self, number, slots):
        self.number, self.slots, self.handed, self.is_alive = number, slots, {}, True

    @property
    def load(self):
        return len(self.handed) / self.slots

    @property
    def assigned(self):
        return self.handed

    @property
    def has_room(self):
        return self.is_alive and len(self.handed) < self.slots


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=5),
    st.lists(
        st.tuples(
            st.sampled_from(("place", "place", "place", "leave", "forget", "turn")),
            st.integers(0, 4),
            st.integers(0, 2),
            st.booleans(),
        ),
        max_size=60,
    ),
)
def test_work_is_placed_as_the_real_pool_places_it(slots, moves):
    seats = [Seat(number, count) for number, count in enumerate(slots)]
    real, ours = Router(queue_depth=0), _Placement(seats)
    held = {}
    for move, prompt, sample, has_tokens in moves:
        key, seat = (prompt, sample), seats[prompt % len(seats)]
        if move == "place" and key not in held:
            trajectory = fresh(prompt, sample)
            trajectory = written(trajectory, int(has_tokens), version=0)
            work = Assignment(trajectory=trajectory, tolerance=None)
            chosen = real.route(work, [seat for seat in seats if seat.is_alive])
            assert ours.place(trajectory) is chosen
            if chosen is not None:
                chosen.handed[key] = held[key] = work
                ours.changed(chosen)
        elif move == "leave" and key in held:
            del held[key]
            (seat,) = [seat for seat in seats if seat.handed.pop(key, None)]
            ours.changed(seat)
        elif move == "forget":
            real.reset()
            ours.forget()
        elif move == "turn" and not seat.handed:
            seat.is_alive = not seat.is_alive
            ours.changed(seat)


@given(st.integers(1, 50), st.integers(0, 500))
def test_the_slots_are_shared_as_evenly_as_they_go(engines, more):
    shares = PoolSettings(engines=engines).shares(engines + more)
    assert sum(shares) == engines + more
    assert max(shares) - min(shares) <= 1
    assert min(shares) >= 1


def test_the_seed_decides_who_is_slow_and_how_many_are_is_given():
    settings = PoolSettings(engines=100, slow_share=0.1, straggler_sigma=0.2)
    assert settings.slowdowns(0) == settings.slowdowns(0) != settings.slowdowns(1)
    assert min(settings.slowdowns(0)) >= 1
    slow = replace(settings, straggler_sigma=0.0).slowdowns(3)
    assert Counter(slow) == {2.0: 10, 1.0: 90}


def test_failures_come_as_often_as_they_should():
    settings = PoolSettings(failures_per_hour=4.0)
    drawn = [settings.seconds_to_failure(0, engine=n, failures=0) for n in range(4000)]
    assert sum(drawn) / 4000 == pytest.approx(900, rel=0.05)
    assert sum(seconds > 900 for seconds in drawn) / 4000 == pytest.approx(0.368, abs=0.03)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engines": 0}, "at least 1, got 0"),
        ({"slow_share": 1.5}, "must lie in 0..1, got 1.5"),
        ({"slow_factor": 0.5}, "2 is half the speed"),
        ({"straggler_sigma": -1.0}, "pool.straggler_sigma must lie in 0..10, got -1"),
        ({"failures_per_hour": float("inf")}, "pool.failures_per_hour"),
        ({"failures_per_hour": 61.0}, "pool.failures_per_hour must lie in 0..60"),
        ({"failures_per_hour": 1e18}, "pool.failures_per_hour must lie in 0..60"),
        ({"network_gigabytes_per_second": 0.0}, "must be above 0, got 0"),
        ({"broadcast": "trees"}, "did you mean 'tree'"),
    ],
)
def test_an_impossible_pool_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        PoolSettings(**changes)


def test_more_engines_than_slots_are_refused():
    with pytest.raises(ConfigError, match=r"at most engine.slots \(4\).*got 5"):
        replace(six(), pool=PoolSettings(engines=5))


def test_flags_and_files_set_up_a_pool(tmp_path, capsys):
    path = tmp_path / "pool.toml"
    path.write_text('preset = "six"\n[pool]\nengines = 2\nslow_share = 0.5\n')
    assert main(["simulate", str(path), "--json"]) == 0
    by_file = json.loads(capsys.readouterr().out)
    assert main(["simulate", "six", "--engines", "2", "--slow-share", "0.5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == by_file
    assert by_file["engines"] == 2
    assert main(["simulate", "six", "--engines", "2"]) == 0
    assert "engines    2, each" in capsys.readouterr().out
    assert main(["compare", "six", "--engines", "4", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["engines"] for row in rows} == {4}
