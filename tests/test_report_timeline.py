"""The slots over time: events as lanes, and lanes as a picture."""

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from sortedrl.config.schedule import Schedule
from sortedrl.core.events import (
    Begin,
    Event,
    Finish,
    Harvest,
    Interrupt,
    Pause,
    Resume,
    Start,
    SyncWeights,
    Update,
)
from sortedrl.core.meter import measure
from sortedrl.report.charts.timeline import density, timelines
from sortedrl.report.lanes import Lanes, lanes
from sortedrl.simulate.compare import simulate, variants
from sortedrl.simulate.settings import PRESETS, Simulation


def run_of(preset: str, **schedule) -> Lanes:
    simulation = PRESETS[preset]()
    events = []
    simulate(
        replace(simulation, schedule=replace(simulation.schedule, **schedule)),
        record=events.append,
    )
    return lanes(events)


@pytest.fixture(scope="module")
def sync() -> Lanes:
    return run_of("picture", strategy="sync", mode="on_policy")


@pytest.fixture(scope="module")
def overlapped() -> Lanes:
    return run_of("picture", strategy="sorted", mode="partial", lookahead=2)


def test_the_first_picture_is_well_formed_small_and_draws_every_bar(sync, overlapped):
    svg = timelines([("sync", "bubble 62 %", sync), ("sorted/partial +2", "", overlapped)])
    root = ElementTree.fromstring(svg)
    assert root.attrib["width"] == "860"
    groups = list(root.iter("{http://www.w3.org/2000/svg}g"))
    assert len(groups) == len(sync.bars) + len(overlapped.bars)
    assert len(svg) < 100_000


def test_a_shorter_run_is_shorter_on_the_page(sync, overlapped):
    svg = timelines([("long", "", sync), ("short", "", overlapped)])
    idle = re.findall(r'class="idle" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"', svg)
    ends: dict[str, float] = {}
    for x, y, width in idle[:-1]:
        ends[y] = max(ends.get(y, 0), float(x) + float(width))
    long, short = ends.values()
    assert (short - 34) / (long - 34) == pytest.approx(overlapped.end / sync.end, abs=0.01)
    assert "done after 1,104 s, 55 % less time than long" in svg


def test_nothing_is_drawn_outside_the_page(sync, overlapped):
    svg = timelines([("long", "", sync), ("short", "", overlapped)])
    root = ElementTree.fromstring(svg)
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        right = float(rect.get("x", 0)) + float(rect.get("width", 0))
        bottom = float(rect.get("y", 0)) + float(rect.get("height", 0))
        assert right <= float(root.attrib["width"])
        assert bottom <= float(root.attrib["height"])


def test_labels_are_escaped(sync):
    svg = timelines([("<script>", "a & b", sync)])
    assert "<script>" not in svg
    ElementTree.fromstring(svg)


def test_thrown_away_tokens_are_hatched_and_in_the_legend(sync):
    assert "discarded later" not in timelines([("sync", "", sync)])
    svg = timelines([("", "", run_of("picture", strategy="sorted", mode="on_policy"))])
    assert 'class="hatched"' in svg
    assert "discarded later" in svg


def test_a_large_run_is_drawn_as_shares_and_stays_small():
    panels = [
        (mode, "", run_of("paper", strategy="sorted", mode=mode))
        for mode in ("on_policy", "partial")
    ]
    assert sum(len(run.bars) for _, _, run in panels) > 10_000
    svg = timelines(panels)
    ElementTree.fromstring(svg)
    assert "<g>" not in svg
    assert 100_000 < len(svg) < 2_000_000


def test_shares_of_the_slots_add_up_to_the_busy_time(overlapped):
    columns = 300
    shares = density(overlapped, columns=columns, names=["all"], layer=lambda _: "all")
    width = (overlapped.end - overlapped.start) / columns
    rollout = [
        sum(
            max(0.0, min(band.end, right) - max(band.start, left))
            for band in overlapped.bands
            if band.kind == "rollout"
        )
        for left, right in zip(shares.edges[:-1], shares.edges[1:], strict=True)
    ]
    busy = sum(
        share * seconds * overlapped.slots
        for share, seconds in zip(shares.layers["all"], rollout, strict=True)
    )
    assert width * columns == pytest.approx(overlapped.end)
    assert busy == pytest.approx(sum(bar.end - bar.start for bar in overlapped.bars))
    assert max(shares.layers["all"]) <= 1 + 1e-9


def test_no_panels_are_refused():
    with pytest.raises(ValueError, match="at least one panel"):
        timelines([])


SVG = "{http://www.w3.org/2000/svg}"


def hatched(svg) -> float:
    """The widths of everything thrown away, without the legend."""
    found = re.findall(r'class="hatched" x="[\d.]+" y="[\d.]+" width="([\d.]+)"', svg)
    return sum(map(float, found)) - 15


def widths(svg) -> float:
    """The widths of all bars together, with the thin gaps after them."""
    found = re.findall(r'class="(?:shade\d|hatched)" x="[\d.]+" y="[\d.]+" width="([\d.]+)"', svg)
    legend = len(re.findall(r'class="(?:shade\d|hatched)"[^>]* width="15" height="10"', svg))
    return sum(map(float, found)) - 15 * legend + 0.7 * svg.count("<g>")


def test_a_picture_for_a_page_has_no_style_but_its_hatch(sync):
    panels = [("", "", run_of("picture", strategy="sorted", mode="on_policy"))]
    inline = timelines(panels, scheme=None)
    assert "<style" not in inline
    assert inline.count('id="hatch"') == 1
    assert "<defs>" not in timelines([("sync", "", sync)], scheme=None)
    standing = ElementTree.fromstring(timelines(panels))
    drawn = [part.get("class") for part in standing.iter() if part.get("class")]
    assert [p.get("class") for p in ElementTree.fromstring(inline).iter() if p.get("class")] == [
        name for place, name in enumerate(drawn) if not (name == "paper" and place < 3)
    ]


def test_windows_beside_each_other_hold_the_whole_run(overlapped):
    end = overlapped.end - overlapped.start
    cuts = [0, 0.3 * end, 0.55 * end, end]
    drawn = [timelines([("run", "", overlapped)], window=window) for window in pairwise(cuts)]
    whole = timelines([("run", "", overlapped)])
    # every window is as wide as the whole picture, so its bars are longer by that much
    shares = [(b - a) / end for a, b in pairwise(cuts)]
    parts = sum(widths(svg) * share for svg, share in zip(drawn, shares, strict=True))
    assert parts == pytest.approx(widths(whole), rel=0.003)


def test_windows_hold_what_was_thrown_away_where_it_was_written():
    run = run_of("picture", strategy="sorted", mode="coupled")
    bar = next(bar for bar in run.bars if 0 < bar.discarded < bar.decoded)
    end = run.end - run.start
    whole = hatched(timelines([("", "", run)]))
    for cut in (0.5 * (bar.start + bar.discarded_from), 0.5 * (bar.discarded_from + bar.end)):
        windows = ((0, cut), (cut, end))
        parts = [(timelines([("", "", run)], window=window), window) for window in windows]
        shown = sum(
            hatched(svg) * (b - a) / end for svg, (a, b) in parts if 'class="hatched"' in svg
        )
        assert shown == pytest.approx(whole, rel=0.03)


def test_a_window_has_its_seconds_on_the_axis_and_nothing_outside(sync):
    svg = timelines([("sync", "", sync)], window=(500, 900))
    root = ElementTree.fromstring(svg)
    marks = [t.text for t in root.iter(f"{SVG}text") if t.get("class") == "small"]
    assert marks[1:] == ["500 s", "550", "600", "650", "700", "750", "800", "850", "900"]
    for rect in root.iter(f"{SVG}rect"):
        if rect.get("class", "").startswith(("shade", "hatched", "idle", "update")):
            assert float(rect.get("x")) >= 33.9
            assert float(rect.get("x")) + float(rect.get("width")) <= 836.1


def test_a_run_that_ends_inside_a_window_tells_its_own_end_and_is_not_compared(sync, overlapped):
    end = overlapped.end - overlapped.start
    svg = timelines([("long", "", sync), ("short", "", overlapped)], window=(1000, 2000))
    assert end < 2000 < sync.end
    assert f"done after {end:,.0f} s" in svg
    assert "less time" not in svg


def test_a_window_after_the_end_of_a_run_is_empty(sync, overlapped):
    window = (overlapped.end + 10, overlapped.end + 60)
    svg = timelines([("sync", "", sync), ("short", "", overlapped)], window=window)
    ElementTree.fromstring(svg)
    alone = timelines([("short", "", overlapped)], window=window)
    assert widths(alone) == 0


def test_a_title_stands_above_the_panels(sync):
    plain, titled = (timelines([("sync", "", sync)], title=title) for title in ("", "Look & see"))
    root = ElementTree.fromstring(titled)
    heads = [t.text for t in root.iter(f"{SVG}text") if t.get("class") == "title"]
    assert heads == ["Look & see", "sync"]
    assert float(root.get("height")) == float(ElementTree.fromstring(plain).get("height")) + 30


def test_a_fixed_scheme_asks_for_no_theme(sync):
    assert "@media" not in timelines([("sync", "", sync)], scheme="dark")


def events_of(simulation: Simulation) -> list[Event]:
    events: list[Event] = []
    simulate(simulation, record=events.append)
    return events


def small(schedule: Schedule) -> Simulation:
    """The paper's costs, with interrupts and weight syncs that take time, on few prompts."""
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


def test_a_bar_has_the_version_of_the_last_weight_sync_before_it(log, run):
    version, versions = 0, {}
    for event in log:
        if isinstance(event, SyncWeights):
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


def test_tokens_of_an_engine_with_an_order_of_its_own_are_all_shown():
    """The third answer wrote before the second, which a first-come queue cannot know."""
    run = lanes(
        [
            BEGIN,
            *(start(0, prompt=prompt, running=prompt + 1) for prompt in range(3)),
            finish(3, prompt=2, tokens=3, running=2),
            finish(5, prompt=0, tokens=5, running=1),
            finish(9, prompt=1, tokens=4, running=0),
        ]
    )
    assert [(bar.prompt, bar.slot, bar.start, bar.end, bar.decoded) for bar in run.bars] == [
        (0, 0, 0, 5, 5),
        (2, 1, 0, 3, 3),
        (1, 1, 3, 9, 4),
    ]


def test_tokens_dropped_at_the_start_count_as_discarded_before_the_answer_ends():
    stopped = Interrupt(seconds=2, prompt=0, sample=0, tokens=4, decoded=4, kept=4, running=0)
    again = replace(start(3, prompt=0, running=1), dropped=4)
    run = lanes([BEGIN, start(0, prompt=0, running=1), stopped, again])
    assert [(bar.decoded, bar.discarded) for bar in run.bars] == [(4, 4), (0, 0)]


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
    with pytest.raises(ValueError, match="must start with 'begin'"):
        lanes([start(0, prompt=0, running=1)])
    with pytest.raises(ValueError, match="empty"):
        lanes([])


def test_a_conversation_leaves_its_slot_while_it_waits_for_its_environment():
    events = []
    simulation = PRESETS["agents"]()
    simulate(replace(simulation, groups=1), record=events.append)
    assert any(isinstance(event, Pause) for event in events)
    run = lanes(events)
    busy = sum(bar.end - bar.start for bar in run.bars)
    assert busy == pytest.approx(measure(events).run.busy_slot_seconds)
