import json
from collections import Counter
from dataclasses import asdict, replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.compare import simulate
from sortedrl.events import Load
from sortedrl.report.html import data_script
from sortedrl.report.record import Run, RunRecord, measured
from sortedrl.report.sections.slots import (
    BANDS,
    FALLBACK_BARS,
    TICKS,
    slots_data,
    slots_section,
    tick_seconds,
)
from sortedrl.simulate.presets import PRESETS
from worlds import run as simulated
from worlds import simulations


def packed(run: Run) -> dict:
    """The slots_data of one run, as the page's script gets it."""
    (only,) = json.loads(json.dumps(slots_data([run]), allow_nan=False))["runs"]
    return only


def unpacked(only: dict) -> list[dict]:
    """The bars that the columns stand for, times in ticks."""
    answers = only["answers"] | {
        name: list(accumulate(only["answers"][name])) for name in ("prompt", "group")
    }
    bars = only["bars"]
    rewards = answers.pop("reward")
    slots = [slot for slot, count in enumerate(bars["count"]) for _ in range(count)]
    rows = zip(
        slots,
        accumulate(bars["answer"]),
        bars["gap"],
        bars["width"],
        bars["kept"],
        bars["decoded"],
        bars["discarded"],
        accumulate(bars["version"]),
        bars["finished"],
        strict=True,
    )
    found: list[dict] = []
    for slot, answer, gap, width, kept, decoded, discarded, version, finished in rows:
        before = found[-1]["end"] if found and found[-1]["slot"] == slot else 0
        found.append(
            {name: column[answer] for name, column in answers.items()}
            | {
                "slot": slot,
                "start": before + gap,
                "end": before + gap + width,
                "kept": kept,
                "decoded": decoded,
                "discarded": discarded,
                "version": version,
                "is_finished": bool(finished),
                "reward": rewards[answer] if rewards else None,
            }
        )
    return found


def record(simulation, *, name: str = "run") -> RunRecord:
    return RunRecord(name=name, events=simulated(simulation).events)


def picture(**changes: object) -> RunRecord:
    events: list = []
    preset = PRESETS["picture"]()
    schedule = replace(preset.schedule, **changes)
    simulate(replace(preset, schedule=schedule), record=events.append)
    return RunRecord(name="picture", events=events)


@settings(max_examples=60)
@given(simulations(), st.floats(0, 1))
def test_the_columns_give_back_every_bar_of_a_log_cut_anywhere(simulation, share):
    whole = record(simulation)
    cut = replace(whole, events=whole.events[: 1 + int(share * (len(whole.events) - 1))])
    run = measured(cut)
    only = packed(run)
    trained_at = {key: version for key, version, _ in run.metrics.trained_lengths}
    found = unpacked(only)
    assert len(found) == len(run.lanes.bars)
    for bar, row in zip(run.lanes.bars, found, strict=True):
        exact = asdict(bar)
        for name in ("start", "end"):
            seconds = exact.pop(name) - run.lanes.start
            assert row[name] * only["tick"] == pytest.approx(seconds, abs=0.51 * only["tick"])
        del exact["cached"]
        assert exact == {name: row[name] for name in exact}
        assert row["trained_at"] == trained_at.get((bar.prompt, bar.sample))


@settings(max_examples=60)
@given(simulations())
def test_bars_that_do_not_overlap_still_do_not_when_rounded(simulation):
    found = unpacked(packed(measured(record(simulation))))
    assert all(row["start"] <= row["end"] for row in found)
    for before, after in pairwise(found):
        assert before["slot"] != after["slot"] or before["end"] <= after["start"]


@settings(max_examples=60)
@given(simulations())
def test_sums_over_the_columns_are_the_numbers_of_the_run(simulation):
    run = measured(record(simulation))
    only = packed(run)
    bars, figures = only["bars"], run.metrics.run
    assert sum(bars["decoded"]) == figures.ledger.decoded
    assert sum(bars["discarded"]) == figures.ledger.discarded
    assert sum(bars["kept"]) == figures.ledger.kept
    assert sum(only["answers"]["length"]) == figures.ledger.trained
    assert len(only["answers"]["length"]) == figures.trajectories
    most = only["tick"] * len(bars["width"])
    assert sum(bars["width"]) * only["tick"] == pytest.approx(figures.busy_slot_seconds, abs=most)
    bands = only["bands"]
    rollout = sum(
        width for kind, width in zip(bands["kind"], bands["width"], strict=True) if not kind
    )
    most = only["tick"] * len(bands["width"])
    assert rollout * only["tick"] == pytest.approx(figures.rollout_seconds, abs=most)


def test_bands_and_loads_stand_where_they_happened():
    whole = picture()
    run = measured(whole)
    only = packed(run)
    starts = [ticks * only["tick"] for ticks in accumulate(only["bands"]["start"])]
    assert starts == pytest.approx([band.start - run.lanes.start for band in run.lanes.bands])
    kinds = [BANDS[kind] for kind in only["bands"]["kind"]]
    assert kinds == [band.kind for band in run.lanes.bands]
    loads = [event for event in whole.events if isinstance(event, Load)]
    assert list(accumulate(only["loads"]["group"])) == [load.group for load in loads]
    ticks = [ticks * only["tick"] for ticks in accumulate(only["loads"]["start"])]
    assert ticks == pytest.approx([load.seconds - run.lanes.start for load in loads])


def test_rewards_go_to_the_bars_of_their_answers_and_odd_ones_are_left_out():
    run = measured(picture(mode="partial"))
    assert packed(run)["answers"]["reward"] is None
    rewards = {(0, 0): 0.123456, (1, 0): float("nan"), (2, 0): float("inf"), (3, 0): -1.0}
    seen = Counter(
        (row["prompt"], row["reward"])
        for row in unpacked(packed(replace(run, rewards=rewards)))
        if row["prompt"] < 5 and row["sample"] == 0
    )
    assert set(seen) == {(0, 0.1235), (1, None), (2, None), (3, -1.0), (4, None)}


@given(st.floats(1e-4, 1e7))
def test_a_run_has_ticks_enough_for_any_zoom_and_few_enough_for_whole_numbers(seconds):
    ticks = seconds / tick_seconds(seconds)
    assert ticks < 10 * TICKS * (1 + 1e-9)
    assert ticks > min(TICKS, seconds * 1e9) * (1 - 1e-9)


def test_a_run_that_took_no_time_has_a_tick_too():
    assert tick_seconds(0.0) == 1e-9


def test_without_scripts_a_small_run_is_a_picture_and_a_large_one_a_sentence():
    run = measured(picture())
    assert len(run.lanes.bars) <= FALLBACK_BARS
    small = slots_section([run])
    assert small.startswith('<section id="slots">')
    assert "<noscript><div" in small
    assert "<svg" in small
    assert "<style" not in small
    copies = [run] * (1 + FALLBACK_BARS // len(run.lanes.bars))
    large = slots_section(copies)
    assert "<svg" not in large
    assert "needs JavaScript" in large


def test_a_run_in_which_nothing_was_written_has_no_timeline():
    whole = picture()
    empty = measured(replace(whole, events=whole.events[:1]))
    assert slots_section([empty]) == ""
    assert packed(empty)["bars"]["count"] == [0] * empty.lanes.slots


def test_names_from_outside_are_text():
    nasty = '</script><img src=x onerror="alert(1)">'
    run = measured(replace(picture(), name=nasty))
    assert "<img" not in slots_section([run])
    assert "<img" not in data_script("slots", slots_data([run]))
