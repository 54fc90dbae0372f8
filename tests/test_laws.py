"""The laws of the scheduler: what holds in every run, whatever the settings and the lengths."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.core.buffer import Buffer, Feed, open_group
from sortedrl.core.controller import Controller
from sortedrl.core.events import from_json, to_json
from sortedrl.core.meter import measure
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.engine import SimulatedPrompts
from sortedrl.simulate.lengths import LengthSettings
from sortedrl.simulate.settings import six
from worlds import (
    MODES,
    STRATEGIES,
    make_loop,
    rescheduled,
    run,
    schedules,
    simulations,
    verified,
    written,
)


def feeding_order(feed, *, fresh, returned):
    """Waiting work in the order the design asks for."""
    by_age = {"key": lambda t: (t.group, -t.interruptions, t.key)}
    fresh, returned = sorted(fresh, **by_age), sorted(returned, **by_age)
    return {
        Feed.OLDEST_FIRST: sorted(fresh + returned, **by_age),
        Feed.FRESH_ONLY: fresh,
        Feed.RETURNED_ONLY: returned,
    }[feed]


class Scheduling(RuleBasedStateMachine):
    """Buffer and controller, moved as the loop moves them, by an engine without any order.

    The machine keeps its own books: for every trajectory its state and its value.
    """

    @initialize(schedule=schedules(), slots=st.integers(1, 8), prompts=st.integers(1, 20))
    def set_up(self, schedule, slots, prompts):
        self.schedule, self.slots, self.num_prompts = schedule, slots, prompts
        self.controller = Controller(schedule)
        self.buffer = Buffer(unit_size=schedule.unit_size)
        self.source = SimulatedPrompts(prompts, prompt_tokens=0)
        self.engine_version = self.version = self.round = 0
        self.plan = None
        self.batches = []
        self.fresh, self.returned, self.running, self.ready = {}, {}, {}, {}
        self.trained = Counter()
        self.loaded_in_round = {}
        self.num_loaded = 0

    @property
    def has_work(self):
        return self.buffer.oldest_open_group is not None or not self.source.is_exhausted

    @rule(data=st.data())
    def go_on(self, data):
        self.advance(
            lambda running: data.draw(
                st.lists(st.sampled_from(running), min_size=1, max_size=3, unique=True)
            ),
            lambda least, most: data.draw(st.integers(least, most)),
        )

    @precondition(lambda self: self.plan is None)
    @rule()
    def save_and_restore(self):
        state = self.buffer.state()
        assert {t.key: t for t in state.fresh} == self.fresh
        assert {t.key: t for t in state.returned} == self.returned
        assert {t.key: t for t in state.ready} == self.ready
        self.buffer = Buffer.from_state(state)
        assert self.buffer.state() == state

    def advance(self, choose, number):
        """The next thing the loop would do, with the engine's answers chosen by the caller."""
        if self.batches:
            self.train()
        elif self.plan is not None:
            self.roll_out(choose, number)
        elif self.has_work:
            self.begin_round()

    def begin_round(self):
        self.engine_version = self.version
        ready_now = [*self.buffer.harvestable(), *self.buffer.partnered()]
        for ready in () if self.schedule.never_interrupts else ready_now:
            renewed = self.controller.mode.renewed(ready, version=self.version)
            if renewed is not None:
                assert renewed.interruptions == ready.interruptions
                assert self.buffer.put_back(renewed) == self.ready.pop(ready.key)
                self.returned[renewed.key] = renewed
        self.plan = self.controller.plan(self.buffer, is_exhausted=self.source.is_exhausted)

    def train(self):
        keys = self.batches.pop(0)
        taken = self.buffer.take(keys)
        assert [t.key for t in taken] == keys
        for trajectory in taken:
            assert self.ready.pop(trajectory.key) == trajectory
            assert trajectory.finish_reason is not None
            self.check_staleness(trajectory)
        self.trained.update(keys)
        self.version += 1
        if not self.batches:
            self.round += 1
        bound = self.schedule.rounds_bound
        if bound is not None:
            for group, loaded in self.loaded_in_round.items():
                assert not self.buffer.is_open(group) or self.round - loaded < bound

    def roll_out(self, choose, number):
        """One turn of the roll-out: harvest, or feed and let some answers finish."""
        if self.controller.should_harvest(
            self.buffer, self.plan, is_exhausted=self.source.is_exhausted
        ):
            assert self.buffer.num_harvestable >= self.schedule.update_batch
            self.harvest(number)
            return
        self.feed(number)
        if not self.running:
            self.plan = self.controller.widened(self.buffer, self.plan)
            if self.plan is None:
                self.harvest(number)
            return
        for key in choose(sorted(self.running)):
            before, begun = self.running.pop(key)
            tokens = number(0 if begun.num_tokens else 1, 3)
            after = written(begun, tokens, version=self.engine_version)
            after = replace(after, finish_reason="stop")
            assert self.buffer.finish(after) == before
            self.ready[key] = after

    def feed(self, number):
        self.start(number)
        while count := self.controller.prompts_to_load(
            self.buffer, self.plan, free_slots=self.slots - self.buffer.num_running
        ):
            prompts = self.source.take(count)
            if not prompts:
                return
            group = open_group(
                prompts,
                group=self.buffer.next_group,
                samples_per_prompt=self.schedule.samples_per_prompt,
                seed=0,
            )
            self.loaded_in_round[self.buffer.load(group)] = self.round
            self.fresh.update({t.key: t for t in group})
            self.num_loaded += len(group)
            self.check_groups()
            self.start(number)

    def start(self, number):
        free = self.slots - self.buffer.num_running
        count = self.controller.to_start(self.buffer, self.plan, free_slots=free)
        assert 0 <= count <= free
        order = feeding_order(
            self.plan.feed, fresh=self.fresh.values(), returned=self.returned.values()
        )
        started = self.buffer.start(count, feed=self.plan.feed)
        assert started == order[:count]
        for before in started:
            self.fresh.pop(before.key, None)
            self.returned.pop(before.key, None)
            begun = self.controller.mode.resumed(before, version=self.engine_version)
            if self.controller.mode.tolerance is not None:
                kept = number(0, begun.num_tokens)
                begun = verified(begun, kept, version=self.engine_version)
            self.running[before.key] = before, begun

    def harvest(self, number):
        cap = self.schedule.max_restarts
        for key, (before, begun) in sorted(self.running.items()):
            stopped = written(begun, number(0, 3), version=self.engine_version)
            after = self.controller.mode.interrupted(stopped)
            assert cap is None or before.interruptions < cap
            assert after.interruptions == before.interruptions + 1
            assert self.buffer.put_back(after) == before
            self.returned[key] = after
        self.running.clear()
        self.plan = None
        self.batches = self.controller.batches(self.buffer)
        keys = [key for batch in self.batches for key in batch]
        ready = sorted(t.key for t in self.buffer.harvestable())
        if self.schedule.exact and not self.schedule.splits_rollouts:
            assert set(keys) <= set(ready)
            assert len(keys) == min(len(ready), self.schedule.update_batch)
        else:
            assert sorted(keys) == ready
        if not self.batches:
            self.round += 1
        left = self.num_prompts * self.schedule.samples_per_prompt - sum(self.trained.values())
        for batch in self.batches:
            assert len(batch) >= min(left, self.schedule.update_batch)
            assert not self.schedule.exact or len(batch) <= self.schedule.update_batch
            left -= len(batch)

    def check_staleness(self, trajectory):
        oldest = self.version - trajectory.oldest_version
        bound = self.schedule.staleness_bound
        assert bound is None or oldest <= bound
        if self.schedule.max_staleness is not None:
            assert oldest <= self.schedule.max_staleness

    def check_groups(self):
        oldest = self.buffer.oldest_open_group
        if self.schedule.never_interrupts:
            assert self.buffer.num_open_groups <= 1
        if self.schedule.strategy == "sorted":
            assert self.buffer.num_open_groups <= self.schedule.lookahead + 1
            if oldest is not None:
                assert self.buffer.next_group - oldest <= self.schedule.lookahead + 1

    @invariant()
    def every_trajectory_is_in_exactly_one_state(self):
        buffer = self.buffer
        assert buffer.num_fresh == len(self.fresh)
        assert buffer.num_returned == len(self.returned)
        assert buffer.num_running == len(self.running)
        ready = [*buffer.harvestable(), *buffer.partnered()]
        assert len(ready) == len(self.ready)
        assert {t.key: t for t in ready} == self.ready
        states = [self.fresh, self.returned, self.running, self.ready, self.trained]
        keys = [key for state in states for key in state]
        assert len(keys) == len(set(keys))
        assert len(keys) == self.num_loaded

    @invariant()
    def a_unit_is_harvestable_exactly_when_its_last_sibling_is_ready(self):
        if self.schedule.unit_size == 1:
            assert not self.buffer.partnered()
            return
        unfinished = {
            key[0] for state in (self.fresh, self.returned, self.running) for key in state
        }
        assert all(t.prompt.id not in unfinished for t in self.buffer.harvestable())
        assert all(t.prompt.id in unfinished for t in self.buffer.partnered())

    @invariant()
    def nothing_is_trained_twice(self):
        assert all(count == 1 for count in self.trained.values())
        assert self.buffer.num_trained == len(self.trained)

    @invariant()
    def slots_are_never_exceeded(self):
        assert self.buffer.num_running <= self.slots

    @invariant()
    def few_groups_are_open(self):
        self.check_groups()

    @invariant()
    def the_oldest_groups_are_known(self):
        waiting = [*self.fresh.values(), *self.returned.values()]
        running = [before for before, _ in self.running.values()]
        unfinished = [*waiting, *running, *self.buffer.partnered()]
        everything = [*unfinished, *self.buffer.harvestable()]
        assert self.buffer.num_unfinished == len(unfinished)
        assert self.buffer.num_open_groups == len({t.group for t in everything})
        assert self.buffer.oldest_open_group == min((t.group for t in everything), default=None)
        oldest = min((t.group for t in unfinished), default=None)
        assert self.buffer.oldest_unfinished_group == oldest
        for times in range(4):
            interrupted = any(t.interruptions >= times for t in running)
            assert self.buffer.any_running_interrupted(times) == interrupted

    def teardown(self):
        """Every prompt is eventually trained: from wherever we stand, in finitely many moves."""
        if not hasattr(self, "buffer"):
            return
        moves = 0
        while self.has_work or self.batches:
            moves += 1
            assert moves < 20_000, "the run would never end"
            self.advance(lambda running: running[:1], lambda least, most: least)
        assert len(self.trained) == self.num_prompts * self.schedule.samples_per_prompt
        self.nothing_is_trained_twice()


Scheduling.TestCase.settings = settings(stateful_step_count=60)
TestScheduling = Scheduling.TestCase

PLAIN = {"tolerance": None, "max_staleness": None, "lookahead": 0, "exact": False}


def trained_keys(batches):
    return [t.key for batch in batches for t in batch.trajectories]


def all_keys(simulation):
    samples = range(simulation.schedule.samples_per_prompt)
    return [(prompt, sample) for prompt in range(simulation.num_prompts) for sample in samples]


@given(simulations())
def test_every_answer_is_trained_exactly_once(simulation):
    assert sorted(trained_keys(run(simulation).batches)) == all_keys(simulation)


@given(simulations())
def test_slots_are_never_exceeded(simulation):
    running = set()
    for event in run(simulation).events:
        if event.kind == "start":
            assert (event.prompt, event.sample) not in running
            running.add((event.prompt, event.sample))
        if event.kind in ("finish", "interrupt"):
            running.remove((event.prompt, event.sample))
        if event.kind in ("start", "finish", "interrupt"):
            assert event.running == len(running) <= simulation.engine.slots
        if event.kind in ("hand_over", "update", "end"):
            assert not running


@given(simulations())
def test_the_ledger_balances_at_the_end(simulation):
    finished = run(simulation)
    ledger = measure(finished.events).run.ledger
    assert ledger.decoded == ledger.trained + ledger.discarded
    assert ledger.cached == 0
    assert ledger.decoded == finished.of_kind("harvest")[-1].engine_decoded
    assert ledger.trained == sum(batch.num_tokens for batch in finished.batches)
    answers = [t for batch in finished.batches for t in batch.trajectories]
    assert ledger.decoded == sum(t.decoded_tokens for t in answers)


@given(simulations(), st.integers(0, 20))
def test_the_ledger_balances_in_the_middle(simulation, updates):
    loop, events = make_loop(simulation)
    for number, _ in enumerate(loop.run()):
        if number == updates:
            break
    state = loop.buffer.state()
    held = sum(t.num_tokens for t in (*state.fresh, *state.returned, *state.ready))
    ledger = measure(events).run.ledger
    assert ledger.decoded == ledger.trained + ledger.discarded + held
    assert ledger.cached == held
    assert ledger.decoded == loop.journal.engine_decoded


@given(simulations())
def test_rounds_and_groups_add_up_to_the_run(simulation):
    metrics = measure(run(simulation).events)
    for parts in (metrics.rounds, [group.figures for group in metrics.groups]):
        assert sum(part.ledger.decoded for part in parts) == metrics.run.ledger.decoded
        assert sum(part.ledger.trained for part in parts) == metrics.run.ledger.trained
        assert sum(part.ledger.discarded for part in parts) == metrics.run.ledger.discarded
        assert sum(part.ledger.kept for part in parts) == metrics.run.ledger.kept
        again = sum(part.ledger.prefilled_again for part in parts)
        assert again == metrics.run.ledger.prefilled_again
        assert sum(part.trajectories for part in parts) == metrics.run.trajectories
        assert sum(part.staleness_sum for part in parts) == metrics.run.staleness_sum
        assert max(part.staleness_max for part in parts) == metrics.run.staleness_max
    assert sum(part.updates for part in metrics.rounds) == metrics.run.updates
    assert sum(part.seconds for part in metrics.rounds) == pytest.approx(metrics.run.seconds)
    rollout = sum(part.rollout_seconds for part in metrics.rounds)
    assert rollout == pytest.approx(metrics.run.rollout_seconds)


@given(simulations())
def test_the_engine_prefills_prompts_and_cached_tokens_and_nothing_else(simulation):
    finished = run(simulation)
    ledger = measure(finished.events).run.ledger
    prompts = len(all_keys(simulation)) * simulation.lengths.prompt_tokens
    prefilled = finished.of_kind("harvest")[-1].engine_prefilled
    assert prefilled == prompts + ledger.prefilled_again


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(data=st.data())
def test_an_update_holds_at_least_a_batch_or_all_that_is_left(strategy, data):
    simulation = data.draw(simulations(schedules(strategies=(strategy,))))
    left = len(all_keys(simulation))
    for batch in run(simulation).batches:
        assert len(batch.trajectories) >= min(left, simulation.schedule.update_batch)
        left -= len(batch.trajectories)


@given(simulations(schedules(strategies=("sorted", "posthoc"))))
def test_with_whole_groups_every_update_holds_at_least_a_batch(simulation):
    for batch in run(replace(simulation, prompts=None)).batches:
        assert len(batch.trajectories) >= simulation.schedule.update_batch


@given(simulations(schedules(strategies=("sync", "posthoc", "sorted"))))
def test_a_group_is_trained_within_its_bound_of_rounds(simulation):
    bound = simulation.schedule.rounds_bound
    assert bound is not None
    groups = measure(run(simulation).events).groups
    assert all(1 <= group.rounds <= bound for group in groups)


def test_the_bounds_of_rounds_and_staleness_are_reached():
    """A long answer of group 1, loaded with group 0, outlasts all of groups 0, 1 and 2."""
    schedule = Schedule(group_prompts=2, update_batch=1, lookahead=1)
    lengths = LengthSettings(values=(2, 4, 50, 6, 5, 7), replay=True)
    simulation = replace(six(), groups=3, schedule=schedule, lengths=lengths)
    simulation = replace(simulation, engine=EngineSettings(slots=4, max_tokens=100))
    metrics = measure(run(simulation).events)
    rounds = {group.group: group.rounds for group in metrics.groups}
    assert rounds[1] == schedule.rounds_bound == 6
    assert metrics.run.staleness_max == schedule.staleness_bound == 5


@given(simulations())
def test_no_token_is_staler_than_its_bound(simulation):
    schedule = simulation.schedule
    for update in run(simulation).of_kind("update"):
        for trained in update.trained:
            bound = schedule.staleness_bound
            assert bound is None or trained.staleness_max <= bound
            if schedule.max_staleness is not None:
                assert trained.staleness_max <= schedule.max_staleness
            if not schedule.splits_rollouts and not schedule.keeps_stale_tokens:
                assert trained.staleness_max == 0
            assert 0 <= trained.staleness_sum <= trained.staleness_max * trained.tokens


@given(simulations(schedules(modes=("partial",))))
def test_versions_never_fall_along_an_answer_and_the_last_part_is_new(simulation):
    for batch in run(simulation).batches:
        for trajectory in batch.trajectories:
            versions = [segment.version for segment in trajectory.segments]
            assert versions == sorted(set(versions))
            assert versions[-1] <= batch.version


@given(simulations(schedules(modes=MODES)))
def test_an_answer_interrupted_often_enough_is_left_alone(simulation):
    most = Counter((event.prompt, event.sample) for event in run(simulation).of_kind("interrupt"))
    cap = simulation.schedule.max_restarts
    assert cap is None or max(most.values(), default=0) <= cap


@given(simulations())
def test_the_same_seed_gives_the_same_log_byte_for_byte(simulation):
    first, second = (list(map(to_json, run(simulation).events)) for _ in range(2))
    assert first == second


@given(st.sampled_from(MODES), st.integers(0, 1000), st.integers(1, 1000))
def test_another_seed_gives_another_run(mode, seed, distance):
    lengths = LengthSettings(median=1000)
    simulation = rescheduled(replace(six(), lengths=lengths, seed=seed), mode=mode)
    simulation = replace(simulation, engine=replace(simulation.engine, max_tokens=10_000))
    first = run(simulation)
    second = run(replace(simulation, seed=seed + distance))
    assert list(map(to_json, first.events[1:])) != list(map(to_json, second.events[1:]))


@given(simulations())
def test_bubble_and_idle_share_lie_between_0_and_1(simulation):
    metrics = simulate(simulation).metrics
    parts = [*metrics.rounds, *(group.figures for group in metrics.groups), metrics.run]
    parts += [metrics.steady] if metrics.steady else []
    for figures in parts:
        assert 0 <= figures.bubble <= 1
        assert 0 <= figures.idle_share <= 1
        assert figures.busy_slot_seconds <= figures.slots * figures.rollout_seconds * (1 + 1e-9)
        assert figures.rollout_seconds <= figures.seconds * (1 + 1e-9)
    assert metrics.run.bubble <= metrics.run.idle_share + 1e-9


@given(simulations(schedules(strategies=("sorted", "ungrouped", "tail_batching", "april"))))
def test_answers_inside_an_update_come_shortest_first(simulation):
    for batch in run(simulation).batches:
        lengths = [t.num_tokens for t in batch.trajectories]
        assert lengths == sorted(lengths)


@given(simulations(schedules(strategies=("posthoc",))))
def test_posthoc_updates_of_a_group_come_shortest_first(simulation):
    finished = run(simulation)
    for group in range(simulation.groups):
        lengths = [
            t.tokens for u in finished.of_kind("update") for t in u.trained if t.group == group
        ]
        if simulation.schedule.unit_size == 1:
            assert lengths == sorted(lengths)


@given(simulations(schedules(strategies=("minibatch",), modes=("on_policy",))))
def test_minibatch_differs_from_posthoc_in_the_order_alone(simulation):
    shuffled, ordered = run(simulation), run(rescheduled(simulation, strategy="posthoc"))

    def sizes_and_answers(finished):
        batches = [{t.key: t.num_tokens for t in batch.trajectories} for batch in finished.batches]
        return sorted(key for batch in batches for key in batch.items())

    if not simulation.lengths.drift:
        assert sizes_and_answers(shuffled) == sizes_and_answers(ordered)
    if simulation.schedule.unit_size == 1:
        assert [len(b.trajectories) for b in shuffled.batches] == [
            len(b.trajectories) for b in ordered.batches
        ]


@given(simulations(schedules(strategies=("sync", "posthoc", "sorted"), modes=("partial",))))
def test_groups_close_in_order_without_lookahead(simulation):
    finished = run(rescheduled(simulation, lookahead=0))
    closed = [group for update in finished.of_kind("update") for group in update.closed]
    loads = finished.of_kind("load")
    assert closed == list(range(len(loads)))
    assert all(load.group == number for number, load in enumerate(loads))


@given(simulations())
def test_an_event_survives_its_line(simulation):
    for event in run(simulation).events:
        line = to_json(event)
        assert from_json(line) == event
        assert json.loads(line)["event"] == event.kind
        assert "\n" not in line


@given(simulations())
def test_time_never_goes_back(simulation):
    seconds = [event.seconds for event in run(simulation).events]
    assert seconds == sorted(seconds)


@given(simulations(is_frozen=True), st.data())
def test_frozen_weights_give_every_strategy_the_same_answers(simulation, data):
    """The frozen-weights law: what is not redrawn does not depend on the schedule."""
    baseline = run(rescheduled(simulation, **PLAIN, strategy="sync", mode="on_policy"))
    strategy = data.draw(
        st.sampled_from(("posthoc", "sorted", "april", "ungrouped", "tail_batching"))
    )
    mode = data.draw(st.sampled_from(("partial", "coupled")))
    lookahead = data.draw(st.integers(0, 3)) if strategy == "sorted" else 0
    other = rescheduled(
        simulation, **(PLAIN | {"lookahead": lookahead}), strategy=strategy, mode=mode
    )
    assert run(other).answers() == baseline.answers()


@given(simulations())
def test_one_update_over_everything_is_the_synchronous_baseline(simulation):
    whole = {**PLAIN, "update_batch": simulation.schedule.group_trajectories}
    sync = run(rescheduled(simulation, **whole, strategy="sync", mode="partial")).batches
    mode = simulation.schedule.mode
    ours = run(rescheduled(simulation, **whole, strategy="sorted", mode=mode)).batches
    assert len(ours) == len(sync)
    for one, other in zip(ours, sync, strict=True):
        assert one.version == other.version
        assert sorted(one.trajectories, key=lambda t: t.key) == list(other.trajectories)


@given(simulations())
def test_modes_differ_only_where_work_is_interrupted(simulation):
    schedule = simulation.schedule
    if not schedule.never_interrupts:
        simulation = rescheduled(
            simulation, strategy="sorted", update_batch=schedule.group_trajectories
        )
    runs = [run(rescheduled(simulation, **PLAIN, mode=mode)) for mode in MODES]
    assert not any(each.of_kind("interrupt", "renew") for each in runs)
    assert runs[0].events[1:] == runs[1].events[1:] == runs[2].events[1:]


@given(simulations())
def test_infinite_tolerance_is_partial_mode(simulation):
    partial = run(rescheduled(simulation, **{**PLAIN, "mode": "partial"}))
    infinite = {**PLAIN, "mode": "coupled", "tolerance": float("inf")}
    assert run(rescheduled(simulation, **infinite)).events[1:] == partial.events[1:]
    ledger = measure(partial.events).run.ledger
    assert ledger.discarded == 0
