"""Updates beside the rollout: one version older at most, and the same whatever takes how long."""

import json
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from threading import Event as Signal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from native_worlds import tiny_model
from run_worlds import TASK, weights, write_world
from run_worlds import events as happened
from run_worlds import metrics as trained_rows
from sortedrl.config.algorithm import Optimisation
from sortedrl.config.data import PeriodicEvaluation
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.config.train import Saving, TrainSettings
from sortedrl.core.buffer import Buffer
from sortedrl.core.clock import VirtualClock
from sortedrl.core.controller import Controller
from sortedrl.core.events import Landed, Update, from_json, to_json
from sortedrl.core.files import read_metrics
from sortedrl.core.loop import Loop
from sortedrl.core.meter import Figures, Meter, measure
from sortedrl.core.recorder import FinishedUpdate, Journal, JournalState
from sortedrl.engines.native import NativeEngine
from sortedrl.report.advice.diagnosis import diagnose
from sortedrl.report.lanes import lanes, story
from sortedrl.report.live import PlainView
from sortedrl.report.live_state import LiveState, Source
from sortedrl.report.page import numbers_section
from sortedrl.report.record import RunRecord, measured
from sortedrl.report.trace import trace_events
from sortedrl.runs.opening import opened_run
from sortedrl.runs.start import Stopping
from sortedrl.runs.tasks import training_tasks
from sortedrl.simulate.compare import simulated_lengths
from sortedrl.simulate.engine import SimulatedEngine, SimulatedPrompts, SimulatedTrainer
from sortedrl.simulate.fit import fit
from sortedrl.simulate.settings import PRESETS, six
from sortedrl.training.overlap import OverlappedTrainer
from sortedrl.types import TrainBatch, Weights
from training_worlds import train_settings, world
from worlds import CountingScorer, rescheduled, run, schedules, simulations

PARTIAL = schedules(modes=("partial",))
SKIPS = st.lists(st.booleans(), min_size=1, max_size=4)


class PlainTrainer:
    """A `RunTrainer` that trains nothing, and takes its time for it."""

    device = "paper"

    def __init__(self, *, skips=(False,), waits=lambda: None, version=0, updates=0):
        self.version, self.updates = version, updates
        self.last = {}
        self.is_busy = self.is_closed = False
        self.seen = []
        self._skips, self._waits = skips, waits

    def update(self, batch):
        self.is_busy = True
        self._waits()
        assert batch.version == self.version, "a batch knows the version that is trained on it"
        self.seen.append(batch)
        self.version += not self._skips[self.updates % len(self._skips)]
        self.updates += 1
        self.last = {"loss": float(self.updates)}
        self.is_busy = False

    def weights(self):
        assert not self.is_busy, "weights are taken from a trainer at work"
        return Weights(self.version)

    def flush(self):
        assert not self.is_busy
        self.last = {"loss": -1.0}
        return True

    def save(self, folder, *, tokenizer):
        assert not self.is_busy
        return {"version": self.version}

    def export(self, folder, *, tokenizer):
        assert not self.is_busy

    def close(self):
        self.is_closed = True


class VirtualOverlap(SimulatedTrainer):
    """Updates beside the rollout on a virtual clock, with the costs of the simulation."""

    def __init__(self, *, costs, clock):
        super().__init__(costs=costs, clock=clock)
        self._batch = self._began = None

    def submit(self, batch):
        self._batch = batch

    def begin(self):
        if self._batch is not None and self._began is None:
            self._began = self._clock.seconds()

    def result(self):
        self.begin()
        batch, began = self._batch, self._began
        if batch is None:
            return None
        took = self._costs.update_seconds + batch.num_tokens * self._costs.update_token_seconds
        beside = min(took, self._clock.seconds() - began)
        self._clock.advance(took - beside)
        self.version += 1
        self._batch = self._began = None
        return FinishedUpdate(
            batch=batch, version=self.version, took_seconds=took, beside_seconds=beside
        )


def looped(simulation, trainer, *, clock, record, overlap, scorer=None):
    return Loop(
        prompts=SimulatedPrompts(
            simulation.num_prompts, prompt_tokens=simulation.lengths.prompt_tokens
        ),
        buffer=Buffer(unit_size=simulation.schedule.unit_size),
        controller=Controller(simulation.schedule),
        engine=SimulatedEngine(
            slots=simulation.engine.slots,
            lengths=simulated_lengths(simulation),
            costs=simulation.costs.costs(),
            clock=clock,
        ),
        scorer=CountingScorer() if scorer is None else scorer,
        trainer=trainer,
        journal=Journal(record, clock=clock),
        seed=simulation.seed,
        overlap=overlap,
    )


def overlapped(simulation, plain, *, record, state=None):
    """The loop around a plain trainer; or, with what was saved of one, its continuation."""
    clock = VirtualClock()
    trainer = OverlappedTrainer(plain, seconds=clock.seconds)
    loop = looped(simulation, trainer, clock=clock, record=record, overlap=trainer)
    if state is None:
        return loop
    clock.advance(state["journal"].seconds)
    loop.prompts.take(state["buffer"].next_prompt)
    loop.engine.version = state["engine_version"]
    journal = Journal(record, clock=clock, state=state["journal"])
    return replace(loop, buffer=Buffer.from_state(state["buffer"]), journal=journal)


def saved(loop, plain):
    """What a checkpoint keeps; whoever saves finds the trainer idle."""
    loop.trainer.save(None, tokenizer=None)
    return {
        "buffer": loop.buffer.state(),
        "journal": JournalState.from_json(json.loads(json.dumps(loop.journal.state().to_json()))),
        "engine_version": loop.engine.version,
        "trainer": {"version": plain.version, "updates": plain.updates},
    }


def finished(simulation, *, skips=(False,), waits=lambda: None):
    """A whole run: its batches, its events and its trainer."""
    events, plain = [], PlainTrainer(skips=skips, waits=waits)
    loop = overlapped(simulation, plain, record=events.append)
    batches = list(loop.run())
    loop.trainer.close()
    return batches, events, plain


def on_virtual_time(simulation):
    """The events of a run whose updates take their simulated seconds beside the rollout."""
    events, clock = [], VirtualClock()
    trainer = VirtualOverlap(costs=simulation.costs.costs(), clock=clock)
    list(looped(simulation, trainer, clock=clock, record=events.append, overlap=trainer).run())
    return events


def timeless(events):
    """The events without their seconds."""
    rows = [json.loads(to_json(event)) for event in events]
    return [{name: v for name, v in row.items() if "seconds" not in name} for row in rows]


def answers_in(batches):
    return [[(t.key, t.tokens) for t in batch.trajectories] for batch in batches]


@settings(max_examples=50)
@given(simulations(schedule=PARTIAL), SKIPS)
def test_every_answer_is_trained_once_and_one_version_older_at_most(simulation, skips):
    schedule = simulation.schedule
    events, plain, batches = [], PlainTrainer(skips=skips), []
    loop = overlapped(simulation, plain, record=events.append)
    for batch in loop.run():
        batches.append(batch)
        assert loop.buffer.num_running == 0
        assert (plain.seen, plain.is_busy) == (batches, False), "yielded when it has finished"
        assert loop.trainer.version == loop.trainer.weights().version == plain.version
        assert loop.trainer.last["loss"] == len(batches)
    loop.trainer.close()
    keys = Counter(t.key for batch in batches for t in batch.trajectories)
    assert set(keys.values()) == {1}
    assert len(keys) == simulation.num_prompts * schedule.samples_per_prompt
    ledger = measure(events).run.ledger
    assert ledger.decoded == ledger.trained + ledger.discarded
    for batch in batches:
        for t in batch.trajectories:
            age = batch.version - t.oldest_version
            assert schedule.staleness_bound is None or age <= schedule.staleness_bound + 1
            assert schedule.max_staleness is None or age <= schedule.max_staleness + 1
    check_log(events, batches, version=plain.version)


def check_log(events, batches, *, version):
    """The log says what was trained at which version, and when it landed."""
    updates = [event for event in events if isinstance(event, Update)]
    landings = [event for event in events if isinstance(event, Landed)]
    in_turn = [event.kind for event in events if event.kind in ("update", "landed")]
    assert in_turn == ["update", "landed"] * len(batches)
    for batch, update in zip(batches, updates, strict=True):
        assert update.version == batch.version
        oldest = [t.staleness_max for t in update.trained]
        assert oldest == [batch.version - t.oldest_version for t in batch.trajectories]
    assert [e.version for e in landings] == [*(b.version for b in batches[1:]), version]
    assert all(0 <= event.beside_seconds <= event.took_seconds for event in landings)
    assert [from_json(to_json(event)) for event in events] == events


@settings(max_examples=20)
@given(simulations(schedule=PARTIAL), SKIPS)
def test_a_slow_trainer_and_a_quick_one_differ_only_in_seconds(simulation, skips):
    batches, events, _ = finished(simulation, skips=skips)
    slow, slow_events, _ = finished(simulation, skips=skips, waits=lambda: time.sleep(0.002))
    assert slow == batches
    assert timeless(slow_events) == timeless(events)


@settings(max_examples=25)
@given(simulations(schedule=PARTIAL, is_frozen=True))
def test_answers_that_do_not_hang_on_the_weights_are_those_without_overlap(simulation):
    simulation = rescheduled(simulation, max_staleness=None)
    batches, _, _ = finished(simulation)
    assert answers_in(batches) == answers_in(run(simulation).batches)


@settings(max_examples=30)
@given(simulations(schedule=PARTIAL), SKIPS, st.integers(0, 12))
def test_a_run_cut_at_any_batch_and_resumed_is_the_undisturbed_run(simulation, skips, cut):
    """Saving disturbs nothing: what was not saved between the batches is the same run too."""
    batches, whole, _ = finished(simulation, skips=skips)
    cut = 1 + cut % len(batches)
    events, plain = [], PlainTrainer(skips=skips)
    loop = overlapped(simulation, plain, record=events.append)
    first = []
    for batch in loop.run():
        first.append(batch)
        state = saved(loop, plain)
        if len(first) == cut:
            break
    loop.trainer.close()
    at = len(events)
    again = PlainTrainer(skips=skips, **state["trainer"])
    resumed = overlapped(simulation, again, record=events.append, state=state)
    rest = list(resumed.run())
    resumed.trainer.close()
    assert [*first, *rest] == batches
    assert events[at].kind == "resume"
    assert timeless([*events[:at], *events[at + 1 :]]) == timeless(whole)


def test_the_update_of_a_round_begins_before_the_next_rollout_and_is_waited_for_after_it():
    """The rollout of the second round goes on although the first update is not done."""
    simulation = six()
    rolled_out = Signal()
    events, plain = [], PlainTrainer(waits=lambda: rolled_out.wait(10))
    loop = overlapped(simulation, plain, record=events.append)

    class Watched:
        slots = loop.engine.slots
        version = property(lambda self: loop.engine.version)
        submit = staticmethod(loop.engine.submit)
        load_weights = staticmethod(loop.engine.load_weights)
        interrupt = staticmethod(loop.engine.interrupt)

        def step(self):
            step = loop.engine.step()
            if sum(event.kind == "update" for event in events) == 1:
                assert plain.is_busy
            if [t.prompt.id for t in step.finished] == [5]:
                rolled_out.set()
            return step

    batches = list(replace(loop, engine=Watched()).run())
    loop.trainer.close()
    assert len(batches) == 2
    kinds = [event.kind for event in events]
    assert kinds.index("update") < kinds.index("landed") - 5, "answers were written meanwhile"
    assert [b.version - t.oldest_version for b in batches[1:] for t in b.trajectories] == [1, 1, 1]


def test_six_prompts_go_tick_by_tick_with_an_update_of_four_ticks_beside_them():
    """As without overlap the answers are cut at 5; the second rollout takes 7 ticks, not 12."""
    simulation = six()
    simulation = replace(simulation, costs=replace(simulation.costs, update_seconds=4.0))
    events = on_virtual_time(simulation)
    shown = [
        (e.kind, e.seconds) for e in events if e.kind in ("harvest", "update", "landed", "end")
    ]
    assert shown == [
        ("harvest", 5),
        ("update", 5),
        ("harvest", 12),
        ("landed", 12),
        ("update", 12),
        ("landed", 16),
        ("end", 16),
    ]
    landings = [(e.took_seconds, e.beside_seconds) for e in events if e.kind == "landed"]
    assert landings == [(4, 4), (4, 0)]
    assert [e.kind for e in events].count("hand_over") == 0, "the engine never had to wait"
    took = [t.staleness_max for e in events if e.kind == "update" for t in e.trained]
    assert took == [0, 0, 0, 1, 1, 1]
    assert run(simulation).events[-1].seconds == 5 + 4 + 7 + 4


@settings(max_examples=25)
@given(simulations(schedule=PARTIAL, is_frozen=True), st.sampled_from((0.5, 3.0, 40.0)))
def test_only_what_was_waited_for_adds_to_the_rollout(simulation, update_seconds):
    simulation = rescheduled(simulation, max_staleness=None)
    costs = replace(simulation.costs, weight_sync_seconds=0.0, update_token_seconds=0.0)
    free = replace(simulation, costs=replace(costs, update_seconds=0.0))
    simulation = replace(simulation, costs=replace(costs, update_seconds=update_seconds))
    events = on_virtual_time(simulation)
    found, instant = measure(events).run, measure(run(free).events).run
    assert found.rollout_seconds == pytest.approx(instant.rollout_seconds)
    assert found.bubble == pytest.approx(instant.bubble, abs=1e-9)
    assert found.goodput == pytest.approx(instant.goodput)
    waited = sum(event.waited_seconds for event in events if isinstance(event, Landed))
    assert found.seconds == pytest.approx(instant.seconds + waited)
    assert found.seconds <= measure(run(simulation).events).run.seconds * (1 + 1e-9)


def paper():
    """A run of several rounds, whose updates cost about as much as a rollout."""
    simulation = PRESETS["paper"]()
    return replace(
        simulation,
        groups=4,
        schedule=Schedule(group_prompts=16, update_batch=8),
        engine=EngineSettings(slots=8, max_tokens=400),
        lengths=replace(simulation.lengths, median=80),
        costs=replace(simulation.costs, update_seconds=0.7, update_token_seconds=0.001),
    )


def test_the_fit_finds_the_costs_of_updates_that_nobody_waited_for():
    events = on_virtual_time(paper())
    assert any(event.beside_seconds > 0 for event in events if isinstance(event, Landed))
    assert all(event.took_seconds == 0 for event in events if isinstance(event, Update))
    whole = fit(events).costs
    assert whole.update_seconds == pytest.approx(0.7, rel=1e-6)
    assert whole.update_token_seconds == pytest.approx(0.001, rel=1e-6)
    open_end = events[: 1 + max(i for i, e in enumerate(events) if e.kind == "update")]
    assert fit(open_end).costs.update_seconds == pytest.approx(0.7, rel=1e-6)


def test_a_window_of_the_meter_reaches_from_update_to_update():
    meter, windows = Meter(), []
    events = on_virtual_time(paper())
    for event in events:
        meter(event)
        if event.kind == "landed":
            windows.append(meter.window())
    assert sum(window.ledger.decoded for window in windows) == meter.run.ledger.decoded
    trained = [sum(t.tokens for t in e.trained) for e in events if isinstance(e, Update)]
    assert [window.ledger.trained for window in windows] == trained
    assert all(window.goodput > 0 and window.updates == 1 for window in windows)


def updates_in_trace(record):
    return [event for event in trace_events(record) if event.get("cat") == "updates"]


def test_every_reader_of_events_takes_a_log_with_landings():
    events = on_virtual_time(paper())
    landings = [event for event in events if isinstance(event, Landed)]
    record = measured(RunRecord(name="beside", events=events))
    bands = [band for band in record.lanes.bands if band.kind == "update"]
    waits = [event.waited_seconds for event in landings if event.waited_seconds > 0]
    assert [band.end - band.start for band in bands] == pytest.approx(waits)
    found = updates_in_trace(record)
    assert [bar["dur"] for bar in found] == pytest.approx(
        [1e6 * event.took_seconds for event in landings], abs=2
    )
    assert all(early["ts"] + early["dur"] <= late["ts"] for early, late in pairwise(found))
    assert "updates overlapped with rollouts" in numbers_section([record])
    assert "updates overlapped" not in numbers_section(
        [measured(RunRecord(name="in turn", events=run(paper()).events))]
    )
    cut = measured(RunRecord(name="cut", events=events[: events.index(landings[-1])]))
    assert len(updates_in_trace(cut)) == len(landings)
    state = LiveState(
        Source(
            schedule="",
            slots=8,
            update_batch=8,
            max_tokens=400,
            device="cpu",
            decoded=lambda: 0,
            seconds=lambda: 1.0,
            figures=Figures,
        )
    )
    for event in events:
        state(event)
    assert state.ready == state.running == 0
    small = on_virtual_time(six())
    assert any("update 2 trains" in line for line in story(small, lanes(small)))


def test_the_diagnosis_of_updates_that_were_not_waited_for_does_not_count_them():
    events = on_virtual_time(paper())
    diagnosis = diagnose(events, schedule=paper().schedule)
    assert diagnosis.error is not None
    assert abs(diagnosis.error) < 0.1


def given_batch(version=0):
    return TrainBatch(version, ())


def test_what_an_update_raises_is_raised_by_its_result_and_again_when_asked_again():
    def fail():
        raise RuntimeError("out of memory")

    plain = PlainTrainer(waits=fail)
    trainer = OverlappedTrainer(plain, seconds=time.perf_counter)
    trainer.submit(given_batch())
    trainer.begin()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer.result()
    assert trainer.version == 0
    trainer.close()
    assert plain.is_closed


def test_until_an_update_has_finished_version_and_numbers_are_those_before_it():
    go_on = Signal()
    plain = PlainTrainer(waits=lambda: go_on.wait(10))
    trainer = OverlappedTrainer(plain, seconds=time.perf_counter)
    assert trainer.result() is None
    assert trainer.last == {}
    go_on.set()
    trainer.submit(given_batch())
    assert trainer.weights().version == 0, "an update that has not begun leaves the weights"
    finished = trainer.result()
    assert (finished.version, trainer.version, trainer.last["loss"]) == (1, 1, 1.0)
    assert finished.waited_seconds == trainer.last["overlap/waited_seconds"]
    go_on.clear()
    trainer.submit(given_batch(version=1))
    trainer.begin()
    assert (trainer.version, trainer.last["loss"]) == (1, 1.0)
    for forbidden in (
        trainer.weights,
        trainer.flush,
        lambda: trainer.update(given_batch(version=1)),
        lambda: trainer.submit(given_batch(version=1)),
        lambda: trainer.save(None, tokenizer=None),
        lambda: trainer.export(None, tokenizer=None),
    ):
        with pytest.raises(AssertionError):
            forbidden()
    go_on.set()
    while plain.is_busy or plain.updates < 2:
        time.sleep(0.001)
    assert (trainer.version, trainer.last["loss"]) == (1, 1.0), "done, but not asked for"
    assert trainer.result().beside_seconds > 0
    assert (trainer.version, trainer.last["loss"]) == (2, 2.0)
    assert trainer.flush()
    assert trainer.last == {"loss": -1.0}, "held answers are trained on in turn"
    trainer.close()


def test_an_update_is_done_when_it_returns_with_and_without_overlap():
    plain = PlainTrainer()
    trainer = OverlappedTrainer(plain, seconds=time.perf_counter)
    trainer.update(given_batch())
    assert (plain.version, trainer.version, trainer.last) == (1, 1, {"loss": 1.0})
    assert trainer.result() is None
    trainer.close()


def real(*, learning_rate, has_overlap, seconds=0.0):
    """A run of a tiny model, with an engine that has weights of its own."""
    settings = train_settings(learning_rate=learning_rate)
    here = world(settings, model=tiny_model(std=0.3))
    policy = here.trainer
    policy._engine_weights = lambda: dict(here.model.named_parameters())
    update = policy.update

    def slow(batch):
        time.sleep(seconds)
        update(batch)
        time.sleep(seconds)

    policy.update = slow
    trainer = policy
    engine = NativeEngine(
        tiny_model(std=0.3), slots=6, max_tokens=24, stop_tokens=[1, 7, 30, 55, 90]
    )
    loop = replace(here.loop, engine=engine, trainer=trainer)
    if has_overlap:
        trainer = OverlappedTrainer(trainer, seconds=time.perf_counter)
        loop = replace(loop, trainer=trainer, overlap=trainer)
    batches = list(loop.run())
    trainer.close()
    return batches, [parameter.detach() for parameter in here.model.parameters()], here.events


def test_a_real_model_learns_the_same_whether_updates_are_slow_or_quick():
    batches, learned, events = real(learning_rate=1e-2, has_overlap=True)
    slow, same, slow_events = real(learning_rate=1e-2, has_overlap=True, seconds=0.02)
    assert slow == batches
    assert all(torch.equal(a, b) for a, b in zip(learned, same, strict=True))
    assert timeless(slow_events) == timeless(events)
    in_turn, _, _ = real(learning_rate=1e-2, has_overlap=False)
    assert answers_in(in_turn)[0] == answers_in(batches)[0]
    assert answers_in(in_turn) != answers_in(batches), "the weights are those of other versions"


def test_a_real_model_with_frozen_weights_trains_on_the_answers_of_a_run_without_overlap():
    batches, _, _ = real(learning_rate=0.0, has_overlap=True)
    in_turn, _, _ = real(learning_rate=0.0, has_overlap=False)
    assert len(batches) > 2
    assert answers_in(batches) == answers_in(in_turn)


ROW = ("update", "version", "reward/mean", "length/mean", "rollout/decoded_tokens")


class AfterTheRollout:
    """Begins updates when they are waited for: engine and trainer share their weights here."""

    def __init__(self, trainer):
        self.submit, self.result = trainer.submit, trainer.result

    def begin(self):
        """Not yet."""


def whole_run(out, *, has_overlap, learning_rate=0.0, is_resumed=False, **changes):
    """The rows of a run, from its folder."""
    settings = TrainSettings(
        model="begun",
        task=TASK,
        reward="judge.py:letters",
        out=out,
        device="cpu",
        threads=1,
        engine=EngineSettings(slots=6, max_tokens=32),
        schedule=Schedule(group_prompts=8, update_batch=4),
        optimiser=Optimisation(learning_rate=learning_rate),
        evaluation=PeriodicEvaluation(
            tasks=("knights_knaves:people=2,count=4,style=compact",), every=3
        ),
        saving=Saving(every=2),
        **changes,
    )
    task, held_out = training_tasks(settings)
    view = PlainView(lambda *_: None)
    with (
        opened_run(
            settings, task=task, held_out=held_out, is_resumed=is_resumed, view=view
        ) as opened,
        Stopping(lambda _: None) as stopping,
    ):
        parts = opened.parts
        if has_overlap:
            trainer = OverlappedTrainer(parts.trainer, seconds=parts.clock.seconds)
            loop = replace(parts.loop, trainer=trainer, overlap=AfterTheRollout(trainer))
            opened = replace(opened, parts=replace(parts, trainer=trainer, loop=loop))
        opened.go(stopping)
        opened.parts.trainer.close()
    return read_metrics(out / "metrics.jsonl")


@pytest.fixture
def begun(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_world(tmp_path)
    return tmp_path


def test_a_row_of_metrics_has_the_numbers_of_its_own_update(begun):
    plain = whole_run(begun / "plain", has_overlap=False)
    rows = whole_run(begun / "beside", has_overlap=True)
    assert [[row.get(name) for name in ROW] for row in rows] == [
        [row.get(name) for name in ROW] for row in plain
    ]
    updates = [row for row in rows if "loss" in row]
    assert len(updates) == 6
    for row in updates:
        assert row["overlap/update_seconds"] == pytest.approx(
            row["overlap/beside_seconds"] + row["overlap/waited_seconds"]
        )
    stale = [row["rollout/mean_staleness"] for row in updates]
    in_turn = [row["rollout/mean_staleness"] for row in plain if "loss" in row]
    assert stale == pytest.approx([0.0, 1.0, *(age + 1 for age in in_turn[2:])])


def test_a_stopped_run_goes_on_as_if_nothing_had_happened(begun):
    """Evaluations and checkpoints come where they would, and change nothing."""
    whole_run(begun / "whole", has_overlap=True, learning_rate=1e-2)
    whole_run(begun / "cut", has_overlap=True, learning_rate=1e-2, max_updates=3)
    whole_run(begun / "cut", has_overlap=True, learning_rate=1e-2, is_resumed=True)
    assert trained_rows(begun / "cut") == trained_rows(begun / "whole")
    assert happened(begun / "cut") == happened(begun / "whole")
    assert weights(begun / "cut") == weights(begun / "whole")
