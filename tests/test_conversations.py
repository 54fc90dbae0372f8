"""Laws of conversations: turns, replies, and a state outside that holds no slot."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.core.buffer import Buffer
from sortedrl.core.buffer_file import load_buffer, save_buffer
from sortedrl.core.events import Order, from_json, to_json
from sortedrl.core.meter import measure
from sortedrl.core.recorder import Journal
from sortedrl.errors import ConfigError, DataError
from sortedrl.report.lanes import lanes
from sortedrl.simulate.compare import agent_variants
from sortedrl.simulate.conversations import ConversationSettings, read_conversations
from sortedrl.simulate.settings import PRESETS, PoolSettings
from sortedrl.types import Segment, Trajectory
from worlds import make_loop, run, simulations


@st.composite
def worlds(draw, is_frozen=False, schedule=None):
    simulation = draw(simulations(schedule=schedule, is_frozen=is_frozen))
    is_lock_step = draw(st.sampled_from((False, False, False, True)))
    conversations = ConversationSettings(
        turns=draw(st.sampled_from((2.0, 4.0, 1.0))),
        turns_sigma=draw(st.sampled_from((0.5, 0.0, 1.0))),
        tool_seconds=draw(st.sampled_from((1.0, 0.1, 10.0, 0.0))),
        given_tokens=draw(st.sampled_from((3.0, 1.0, 20.0))),
        max_open=draw(st.sampled_from((None, 1, 2, 5, 12))),
        is_lock_step=is_lock_step,
        has_serial_tools=is_lock_step and draw(st.booleans()),
    )
    return replace(simulation, conversations=conversations, pool=PoolSettings())


def all_keys(simulation):
    samples = range(simulation.schedule.samples_per_prompt)
    return [(prompt, sample) for prompt in range(simulation.num_prompts) for sample in samples]


def conversations_of(finished):
    """What was trained on, by key: every token, written or given."""
    return {
        t.key: (t.response, t.loss_mask, t.finish_reason)
        for batch in finished.batches
        for t in batch.trajectories
    }


@given(worlds())
def test_every_conversation_is_trained_exactly_once(simulation):
    trained = [t.key for batch in run(simulation).batches for t in batch.trajectories]
    assert sorted(trained) == all_keys(simulation)


@given(worlds())
def test_the_ledger_counts_written_tokens_and_balances(simulation):
    finished = run(simulation)
    ledger = measure(finished.events).run.ledger
    assert ledger.decoded == ledger.trained + ledger.discarded
    answers = [t for batch in finished.batches for t in batch.trajectories]
    assert ledger.trained == sum(t.num_tokens for t in answers)
    assert ledger.decoded == sum(t.decoded_tokens for t in answers)
    for answer in answers:
        assert len(answer.response) == answer.num_tokens + answer.num_given
        assert sum(answer.loss_mask) == answer.num_tokens == len(answer.logprobs)
        assert not answer.given


@given(worlds())
def test_the_lanes_show_every_token_that_was_written_and_discarded(simulation):
    finished = run(simulation)
    bars, ledger = lanes(finished.events).bars, measure(finished.events).run.ledger
    assert sum(bar.decoded for bar in bars) == ledger.decoded
    assert sum(bar.discarded for bar in bars) == ledger.discarded
    left = Counter()
    for bar in bars:
        left[bar.prompt, bar.sample] += bar.decoded - bar.discarded
    answers = [t for batch in finished.batches for t in batch.trajectories]
    assert dict(left) == {t.key: t.num_tokens for t in answers}
    ended = Counter((bar.prompt, bar.sample) for bar in bars if bar.is_finished)
    assert all(ended[t.key] for t in answers)


@given(worlds())
def test_neither_slots_nor_environments_are_exceeded(simulation):
    running, outside, begun, order = set(), set(), set(), Order()
    limit = simulation.max_open
    for event in run(simulation).events:
        order(from_json(to_json(event)))
        key = (getattr(event, "prompt", None), getattr(event, "sample", None))
        if event.kind == "start":
            running.add(key)
            begun.add(key)
        elif event.kind == "pause":
            running.remove(key)
            outside.add(key)
            assert event.outside == len(outside)
        elif event.kind == "reply":
            outside.remove(key)
            assert event.outside == len(outside)
        elif event.kind in ("finish", "interrupt"):
            running.discard(key)
            outside.discard(key)
            if event.kind == "finish" or not event.kept:
                begun.remove(key)
        elif event.kind == "renew" and event.kept:
            begun.add(key)
        assert len(running) <= simulation.engine.slots
        assert limit is None or len(begun) <= limit + simulation.schedule.group_trajectories * (
            event.kind == "renew" or simulation.schedule.mode == "coupled"
        )


@given(worlds(is_frozen=True), st.sampled_from(("partial", "coupled", "redraw")))
def test_with_frozen_weights_every_mode_trains_on_the_same_conversations(simulation, mode):
    plain = {"tolerance": None, "max_staleness": None, "lookahead": 0, "exact": False}
    sync = replace(simulation.schedule, strategy="sync", mode="on_policy", **plain)
    other = replace(simulation.schedule, mode=mode, **plain)
    reference = conversations_of(run(replace(simulation, schedule=sync)))
    assert conversations_of(run(replace(simulation, schedule=other))) == reference


@given(worlds())
def test_tokens_of_older_weights_are_trained_on_in_partial_mode_alone(simulation):
    schedule = simulation.schedule
    for batch in run(simulation).batches:
        ages = [batch.version - s.version for t in batch.trajectories for s in t.segments]
        if not schedule.keeps_stale_tokens and not schedule.never_interrupts:
            assert set(ages) <= {0}
        bound = schedule.staleness_bound
        assert bound is None or max(ages) <= bound


@settings(max_examples=40)
@given(worlds(), st.integers(0, 12))
def test_a_run_cut_between_two_updates_loses_no_conversation(tmp_path_factory, simulation, updates):
    loop, _ = make_loop(simulation)
    trained = []
    for number, batch in enumerate(loop.run()):
        trained += [t.key for t in batch.trajectories]
        if number == updates:
            break
    path = tmp_path_factory.mktemp("cut") / "buffer.bin"
    save_buffer(loop.buffer.state(), path)
    state = load_buffer(path)
    assert state == loop.buffer.state()
    fresh, _ = make_loop(simulation)
    clock = fresh.journal._seconds.__self__
    clock.advance(loop.journal.state().seconds)
    fresh.prompts.take(state.next_prompt)
    fresh.engine.version, fresh.trainer.version = loop.engine.version, loop.trainer.version
    resumed = replace(
        fresh,
        buffer=Buffer.from_state(state),
        journal=Journal(lambda event: None, clock=clock, state=loop.journal.state()),
    )
    trained += [t.key for batch in resumed.run() for t in batch.trajectories]
    assert sorted(trained) == all_keys(simulation)


def test_a_slot_is_free_while_a_tool_runs():
    simulation = replace(PRESETS["agents"](), groups=2)
    idle = {}
    for name, variant in agent_variants(simulation):
        idle[name] = measure(run(variant).events).run
    lock_step, trajectory = idle["lock step"], idle["slot per trajectory, sorted/partial"]
    turn = idle["slot per turn, sorted/partial"]
    assert lock_step.bubble > trajectory.bubble > turn.bubble
    assert turn.outside_bubble < trajectory.outside_bubble / 2
    assert turn.goodput > 4 * lock_step.goodput
    assert turn.outside_bubble <= turn.bubble


def test_a_trajectory_tells_written_from_given_tokens():
    trajectory = Trajectory(
        prompt=None,
        sample_index=0,
        group=0,
        seed=0,
        segments=(Segment((1, 2), (-0.1, -0.2), 0), Segment((5,), (-0.3,), 1, given=(3, 4))),
        given=(6,),
    )
    assert trajectory.response == [1, 2, 3, 4, 5, 6]
    assert trajectory.loss_mask == [1, 1, 0, 0, 1, 0]
    assert trajectory.tokens == [1, 2, 5]
    assert (trajectory.num_tokens, trajectory.num_given, trajectory.num_turns) == (3, 3, 3)


def test_conversations_are_replayed_from_a_log(tmp_path):
    log = tmp_path / "conversations.jsonl"
    turns = [{"tokens": 5, "seconds": 2.0, "given": 7}, {"tokens": 3, "seconds": 0, "given": 0}]
    log.write_text(json.dumps({"turns": turns}) + "\n")
    simulation = replace(PRESETS["six"](), conversations=ConversationSettings(log=log), prompts=4)
    for batch in run(simulation).batches:
        for answer in batch.trajectories:
            assert (answer.num_turns, answer.num_tokens, answer.num_given) == (2, 8, 7)


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{}",
        '{"turns": []}',
        '{"turns": [{"tokens": 0, "seconds": 1, "given": 1}]}',
        "nonsense",
    ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path, line):
    log = tmp_path / "conversations.jsonl"
    log.write_text('{"turns": [{"tokens": 1, "seconds": 1, "given": 1}]}\n' + line + "\n")
    with pytest.raises(DataError, match=r"conversations\.jsonl:2"):
        read_conversations(log)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"turns": 0.5}, "conversations.turns"),
        ({"turns": 2.0, "tool_seconds": -1.0}, "conversations.tool_seconds"),
        ({"turns": 2.0, "max_open": 0}, "conversations.max_open"),
        ({"turns": 2.0, "has_serial_tools": True}, "is_lock_step"),
    ],
)
def test_impossible_settings_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        ConversationSettings(**values)
