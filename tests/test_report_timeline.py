import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from sortedrl.compare import simulate
from sortedrl.report.density import density
from sortedrl.report.lanes import Lanes, lanes
from sortedrl.report.timeline import timelines
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
    assert "thrown away" not in timelines([("sync", "", sync)])
    svg = timelines([("", "", run_of("picture", strategy="sorted", mode="on_policy"))])
    assert 'class="hatched"' in svg
    assert "thrown away later" in svg


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
