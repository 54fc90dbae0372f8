"""The sections about slots: the timeline's data, and where the bubble is."""

import json
import math
import re
from collections import Counter
from dataclasses import asdict, replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from report_worlds import any_runs, drawn, run_of, size, whole_runs, words
from sortedrl.core.events import Load, Update
from sortedrl.core.meter import Figures
from sortedrl.report.html import data_script
from sortedrl.report.record import Run, RunRecord, measured
from sortedrl.report.sections import slots
from sortedrl.report.sections.slots import (
    BANDS,
    FALLBACK_BARS,
    MAX_COLUMNS,
    TICKS,
    Strip,
    StripColumn,
    bubbles_section,
    closing_rounds,
    group_columns,
    place_of_bubble,
    round_columns,
    slots_data,
    slots_section,
    strips,
    tick_seconds,
)
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.settings import PRESETS
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


finite = st.floats(0, 1000, allow_subnormal=False)
rounds = st.lists(
    st.builds(
        lambda seconds, share: Figures(
            slots=4, rollout_seconds=seconds, busy_slot_seconds=4 * seconds * share
        ),
        finite,
        st.floats(0, 1),
    ),
    min_size=1,
    max_size=40,
)


def with_rounds(figures):
    """A run with these rounds, numbered from 0."""
    run = run_of("sync")
    whole = Figures(
        slots=4,
        rollout_seconds=sum(figure.rollout_seconds for figure in figures),
        busy_slot_seconds=sum(figure.busy_slot_seconds for figure in figures),
    )
    load = next(event for event in run.record.events if event.kind == "load")
    events = [run.record.events[0], *(replace(load, round=n) for n in range(len(figures)))]
    metrics = replace(run.metrics, rounds=tuple(figures), run=whole)
    return replace(run, metrics=metrics, record=replace(run.record, events=events))


def weighted_mean(columns):
    width = sum(column.end - column.start for column in columns)
    area = sum((column.end - column.start) * column.share for column in columns)
    return area / width if width else 0.0


@given(any_runs)
def test_columns_weighted_by_their_widths_have_the_bubble_of_the_run_as_mean(run):
    columns = round_columns(run)
    assert weighted_mean(columns) == pytest.approx(run.metrics.run.bubble, abs=1e-9)
    if columns:
        assert columns[-1].end == pytest.approx(run.metrics.run.rollout_seconds)


@given(figures=rounds, most=st.integers(1, 8))
def test_neighbours_drawn_together_lose_no_idle_slot_second(figures, most):
    run = with_rounds(figures)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "MAX_COLUMNS", most)
        columns = round_columns(run)
    assert len(columns) <= most
    assert weighted_mean(columns) == pytest.approx(run.metrics.run.bubble, abs=1e-9)


@settings(max_examples=60)
@given(whole_runs)
def test_the_area_drawn_is_the_idle_time(run):
    page = bubbles_section([run])
    columns = [element for element, told in drawn(page, "rect") if told and "round" in told]
    steps = [step for step in round_columns(run) if step.share]
    assert len(columns) == len(steps)
    heights = [size(element, "height") for element in columns]
    highest = max(step.share for step in steps)
    for step, height in zip(steps, heights, strict=True):
        assert height == pytest.approx(max(0.75, max(heights) * step.share / highest), abs=0.02)
    starts = [size(element, "x") for element in columns]
    scale = (size(columns[-1], "x") - starts[0]) / ((steps[-1].start - steps[0].start) or 1)
    for step, start in zip(steps, starts, strict=True):
        assert start - starts[0] == pytest.approx(scale * (step.start - steps[0].start), abs=0.02)


def test_many_rounds_become_a_bounded_number_of_columns_and_the_caption_says_so():
    figures = [Figures(slots=4, rollout_seconds=1.0, busy_slot_seconds=n % 4) for n in range(5000)]
    page = bubbles_section([with_rounds(figures)])
    columns = [told for _, told in drawn(page, "rect") if told and "round" in told]
    stride = math.ceil(5000 / MAX_COLUMNS)
    assert len(columns) == MAX_COLUMNS
    assert columns[0].startswith(f"rounds 0 to {5000 // MAX_COLUMNS - 1}: ")
    assert any(f"Each column is up to {stride} rounds together" in told for told in words(page))
    assert any(
        "Each column is a round," in told for told in words(bubbles_section([run_of("sync")]))
    )


@given(whole_runs)
def test_every_group_has_a_column_with_its_bubble(run):
    groups = sorted(run.metrics.groups, key=lambda group: group.group)
    columns = group_columns(run)
    assert [step.share for step in columns] == [group.figures.bubble for group in groups]
    assert [step.start for step in columns] == [group.group - 0.4 for group in groups]


@given(any_runs)
def test_rounds_that_end_a_group_are_as_many_as_the_log_has(run):
    ending = {e.round for e in run.record.events if isinstance(e, Update) and e.closed}
    closing = closing_rounds(run)
    assert len(closing) == len(ending)
    assert all(0 <= place < len(run.metrics.rounds) for place in closing)


def idle_of(figures):
    return figures.bubble * figures.slots * figures.rollout_seconds


@given(whole_runs)
def test_shares_in_words_are_shares_of_the_idle_slot_seconds(run):
    told = place_of_bubble(run)
    assert told.startswith(f"bubble {100 * run.metrics.run.bubble:.1f} %.")
    idle = [idle_of(figures) for figures in run.metrics.rounds]
    count = math.ceil(len(idle) / 10)
    shares = {"last": idle[-1] / sum(idle), "worst": sum(sorted(idle)[-count:]) / sum(idle)}
    which = "last" if shares["last"] >= 0.5 else "worst"
    assert f" {100 * shares[which]:.1f} % of the idle slot-seconds" in told
    if found := re.search(r"Rounds that end a group, .* hold ([\d.]+) %", told):
        share = sum(idle[place] for place in closing_rounds(run)) / sum(idle)
        assert found[1] == f"{100 * share:.1f}"


def test_an_even_bubble_is_told_as_spread_and_one_in_few_rounds_is_not():
    even = [Figures(slots=4, rollout_seconds=1.0, busy_slot_seconds=2.0)] * 30
    assert "10.0 % of the idle slot-seconds: the bubble is spread" in place_of_bubble(
        with_rounds(even)
    )
    uneven = [*even[:3], *[Figures(slots=4, rollout_seconds=1.0, busy_slot_seconds=3.99)] * 27]
    told = place_of_bubble(with_rounds(uneven))
    assert "3 of 30" in told
    assert "spread" not in told


def test_the_end_of_the_run_is_told_apart_only_once_the_run_has_ended():
    full = Figures(slots=4, rollout_seconds=1.0, busy_slot_seconds=4.0)
    empty = replace(full, busy_slot_seconds=0.0)
    run = with_rounds([*[full] * 9, empty])
    assert "The worst of its 10 rounds holds 100.0 %" in place_of_bubble(run)
    end = run_of("sync").record.events[-1]
    ended = replace(run, record=replace(run.record, events=[*run.record.events, end]))
    assert "100.0 % of the idle slot-seconds are in the last of its 10" in place_of_bubble(ended)


def test_full_slots_are_told_in_words_and_not_drawn():
    full = [Figures(slots=4, rollout_seconds=1.0, busy_slot_seconds=4.0)] * 3
    page = bubbles_section([with_rounds(full)])
    assert words(page) == [
        "Slots were idle for less than 0.05 % of the slot-seconds of the rollouts."
    ]
    assert drawn(page, "rect") == []


def test_strips_share_their_scales():
    def strip(name, share, end):
        step = StripColumn(start=0.0, end=end, share=share, tooltip=name)
        return Strip(name=name, note="", steps=(step,), level=share)

    rows = [strip("one", 0.6, 10.0), strip("two", 0.3, 5.0)]
    page = strips(rows, title="t", x_label="x", has_whole_x=False)
    one, two = (
        next(e for e, told in drawn(page, "rect") if told == name and size(e, "width") > 11)
        for name in ("one", "two")
    )
    levels = [size(line, "y1") for line, _ in drawn(page, "line", css="guide")]
    assert levels == [size(one, "y"), size(two, "y")]
    top = next(e for e, _ in drawn(page, "text") if e.text == "60 %")
    assert size(top, "y") - 4 == pytest.approx(size(one, "y"), abs=0.02)
    assert size(one, "height") == pytest.approx(2 * size(two, "height"), abs=0.02)
    assert size(one, "width") + 1 == pytest.approx(2 * (size(two, "width") + 1), abs=0.02)
