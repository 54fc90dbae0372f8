import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from sortedrl.compare import simulate
from sortedrl.report.charts.timeline import density, timelines, timelines_inline
from sortedrl.report.lanes import Lanes, lanes
from sortedrl.simulate.presets import PRESETS


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
    inline = timelines_inline(panels)
    assert "<style" not in inline
    assert inline.count('id="hatch"') == 1
    assert "<defs>" not in timelines_inline([("sync", "", sync)])
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
