from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from sortedrl.compare import simulate, variants
from sortedrl.config import Schedule
from sortedrl.events import (
    Begin,
    Event,
    Finish,
    HandOver,
    Harvest,
    Interrupt,
    Resume,
    Start,
    Update,
)
from sortedrl.meter import measure
from sortedrl.report.lanes import Lanes, lanes
from sortedrl.simulate.presets import PRESETS
from sortedrl.simulate.settings import Simulation


def events_of(simulation: Simulation) -> list[Event]:
    events: list[Event] = []
    simulate(simulation, record=events.append)
    return events


def small(schedule: Schedule) -> Simulation:
    """The paper's costs, with interrupts and hand-overs that take time, on few prompts."""
    paper = PRESETS["paper"]()
    return replace(
        paper, groups=3, schedule=schedule, engine=replace(paper.engine, slots=12, max_tokens=600)
    )


BASE = Schedule(group_prompts=16, samples_per_prompt=3, update_batch=9)
SCHEDULES = [
    *variants(BASE),
    *variants(replace(BASE, harvest_unit="prompt"), strategies=("sorted", "april")),
    replace(BASE, max_staleness=1),
]


@pytest.fixture(scope="module", params=SCHEDULES, ids=lambda s: f"{s.strategy}-{s.mode}")
def log(request) -> list[Event]:
    return events_of(small(request.param))


@pytest.fixture(scope="module")
def run(log) -> Lanes:
    return lanes(log)


def test_bars_of_one_slot_never_overlap(run):
    for slot, lane in enumerate(run.lanes):
        assert all(bar.slot == slot and bar.start <= bar.end for bar in lane)
        assert all(before.end <= after.start for before, after in pairwise(lane))


def test_every_start_has_exactly_one_bar(log, run):
    starts = Counter((e.seconds, e.prompt, e.sample) for e in log if isinstance(e, Start))
    assert Counter((bar.start, bar.prompt, bar.sample) for bar in run.bars) == starts


def test_widths_of_bars_are_the_busy_slot_seconds_of_the_run(log, run):
    busy = sum(bar.end - bar.start for bar in run.bars)
    assert busy == pytest.approx(measure(log).run.busy_slot_seconds, rel=1e-6)


def test_rollout_bands_are_the_rollout_seconds_and_hold_every_bar(log, run):
    rollouts = [band for band in run.bands if band.kind == "rollout"]
    seconds = sum(band.end - band.start for band in rollouts)
    assert seconds == pytest.approx(measure(log).run.rollout_seconds, rel=1e-6)
    assert all(any(b.start <= bar.start and bar.end <= b.end for b in rollouts) for bar in run.bars)


def test_bands_follow_each_other_without_overlap(run):
    for before, after in pairwise(run.bands):
        assert before.end <= after.start + 1e-9


def test_tokens_of_bars_balance_with_the_ledger(log, run):
    ledger = measure(log).run.ledger
    assert sum(bar.decoded for bar in run.bars) == ledger.decoded
    assert sum(bar.discarded for bar in run.bars) == ledger.discarded
    assert sum(bar.kept for bar in run.bars) == ledger.kept


def test_bars_of_an_answer_hold_exactly_what_was_trained_on(log, run):
    trained = {
        (t.prompt, t.sample): t.tokens for e in log if isinstance(e, Update) for t in e.trained
    }
    left: Counter[tuple[int, int]] = Counter()
    for bar in run.bars:
        left[bar.prompt, bar.sample] += bar.decoded - bar.discarded
        assert bar.length == trained[bar.prompt, bar.sample]
        assert bar.start <= bar.discarded_from <= bar.end
    assert left == Counter(trained)


def test_a_bar_has_the_version_of_the_last_hand_over_before_it(log, run):
    version, versions = 0, {}
    for event in log:
        if isinstance(event, HandOver):
            version = event.version
        elif isinstance(event, Start):
            versions[event.prompt, event.sample, event.seconds] = version
    assert max(versions.values()) > 0
    for bar in run.bars:
        assert bar.version == versions[bar.prompt, bar.sample, bar.start]


def test_versions_say_how_stale_kept_tokens_are():
    schedule = replace(BASE, strategy="sorted", mode="partial")
    log = events_of(small(schedule))
    trained_at = {
        (t.prompt, t.sample): e.version for e in log if isinstance(e, Update) for t in e.trained
    }
    stale = sum(
        (bar.decoded - bar.discarded) * (trained_at[bar.prompt, bar.sample] - bar.version)
        for bar in lanes(log).bars
    )
    assert stale > 0
    assert stale == measure(log).run.staleness_sum


def test_a_log_cut_anywhere_still_has_lanes(log):
    for cut in range(1, len(log), 97):
        run = lanes(log[:cut])
        assert run.end == log[cut - 1].seconds
        busy = sum(bar.end - bar.start for bar in run.bars)
        assert busy == pytest.approx(measure(log[:cut]).run.busy_slot_seconds, rel=1e-6)


def start(seconds: float, *, prompt: int, running: int) -> Start:
    return Start(
        seconds=seconds,
        round=0,
        prompt=prompt,
        sample=0,
        group=0,
        attempt=0,
        prompt_tokens=0,
        cached=0,
        dropped=0,
        running=running,
    )


def finish(seconds: float, *, prompt: int, tokens: int, running: int) -> Finish:
    return Finish(
        seconds=seconds,
        prompt=prompt,
        sample=0,
        tokens=tokens,
        decoded=tokens,
        reason="stop",
        running=running,
        engine_decoded=0,
        engine_prefilled=0,
    )


BEGIN = Begin(seconds=0, schedule="sorted/on_policy", slots=2, seed=0)


def test_work_beyond_the_slots_queues_and_takes_the_next_slot_freed():
    run = lanes(
        [
            BEGIN,
            *(start(0, prompt=prompt, running=prompt + 1) for prompt in range(4)),
            finish(3, prompt=1, tokens=3, running=3),
            finish(5, prompt=0, tokens=5, running=2),
        ]
    )
    assert [(bar.prompt, bar.slot, bar.start) for bar in run.bars] == [
        (0, 0, 0),
        (3, 0, 5),
        (1, 1, 0),
        (2, 1, 3),
    ]


def test_work_interrupted_in_the_queue_has_no_bar():
    stop = Harvest(
        seconds=4, round=0, ready=0, waiting=0, running=3, engine_decoded=0, engine_prefilled=0
    )
    stopped = [
        Interrupt(seconds=5, prompt=p, sample=0, tokens=t, decoded=t, kept=0, running=2 - p)
        for p, t in ((0, 4), (1, 4), (2, 0))
    ]
    starts = [start(0, prompt=prompt, running=prompt + 1) for prompt in range(3)]
    run = lanes([BEGIN, *starts, stop, *stopped])
    assert [(bar.prompt, bar.end, bar.outcome) for bar in run.bars] == [
        (0, 4, "discarded"),
        (1, 4, "discarded"),
    ]


def test_a_run_taken_up_again_goes_on_with_the_version_of_its_checkpoint():
    run = lanes(
        [
            BEGIN,
            start(0, prompt=0, running=1),
            finish(1, prompt=0, tokens=1, running=0),
            Resume(seconds=2, round=7, version=7),
            start(2, prompt=1, running=1),
        ]
    )
    assert [(bar.prompt, bar.version) for bar in run.bars] == [(0, 0), (1, 7)]


def test_outcomes_tell_finished_interrupted_and_discarded_apart():
    six = PRESETS["six"]()
    seen = {}
    for mode in ("on_policy", "partial", "coupled"):
        schedule = replace(six.schedule, strategy="sorted", mode=mode)
        run = lanes(events_of(replace(six, schedule=schedule)))
        seen[mode] = Counter(bar.outcome for bar in run.bars)
    assert seen == {
        "on_policy": {"finished": 6, "discarded": 3},
        "partial": {"finished": 6, "interrupted": 3},
        "coupled": {"finished": 6, "interrupted": 2, "discarded": 1},
    }


def test_a_log_without_its_begin_is_refused():
    with pytest.raises(ValueError, match="opens with 'begin'"):
        lanes([start(0, prompt=0, running=1)])
    with pytest.raises(ValueError, match="empty"):
        lanes([])
