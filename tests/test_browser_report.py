"""The page of runs in a real browser: it says what was measured, and can be zoomed and browsed."""

import re
import time
from dataclasses import asdict, replace
from functools import cache

import pytest

from browser import (
    NARROW,
    PATIENCE_SECONDS,
    WIDE,
    is_too_wide,
    keep_screenshot,
    open_text,
    set_scheme,
    set_width,
)
from report_worlds import NASTY, SHOWN
from sortedrl.core.events import Score, Scored, Update
from sortedrl.core.files import LoggedAnswer
from sortedrl.core.meter import measure
from sortedrl.report.page import runs_page
from sortedrl.report.record import RunRecord
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.settings import PRESETS

OPENING_BUDGET_SECONDS = 10
"""For a page of 100,000 answers, on a slow and busy machine."""


def simulation_of(preset, mode, *, strategy="sorted", groups=None, lookahead=0):
    simulation = PRESETS[preset]()
    schedule = replace(simulation.schedule, strategy=strategy, mode=mode, lookahead=lookahead)
    return replace(simulation, schedule=schedule, groups=groups or simulation.groups)


@cache
def events_of(preset, mode, **changes):
    """The log of a simulated run whose answers are worth as much as their key says."""
    simulation = simulation_of(preset, mode, **changes)
    events = []

    def record(event):
        if isinstance(event, Update):
            events.append(score(event))
        events.append(event)

    simulate(simulation, record=record)
    return tuple(events)


def reward_of(prompt, sample):
    return (prompt * 7 + sample) % 5 / 4


def score(update):
    scored = [
        Scored(t.prompt, t.sample, reward_of(t.prompt, t.sample), 0, 0.0, 0.0)
        for t in update.trained
    ]
    return Score(
        seconds=update.seconds - update.took_seconds,
        round=update.round,
        waited_seconds=0.0,
        scored=tuple(scored),
    )


def rows_of(events, gain):
    rows = [{"update": 0, "evaluation/score": 0.25}]
    samples = tokens = 0
    for number, update in enumerate((e for e in events if isinstance(e, Update)), start=1):
        samples += len(update.trained)
        tokens += sum(t.tokens for t in update.trained)
        totals = {"total/seconds": update.seconds, "total/samples": samples}
        rows.append(
            {"update": number, **totals, "total/trained_tokens": tokens, "reward/mean": 0.1}
        )
        rows.append({"update": number, "evaluation/score": min(1.0, 0.25 + gain * number)})
    return rows


def answers_of(events, count=60):
    trained = [t for e in events if isinstance(e, Update) for t in e.trained]
    return [
        LoggedAnswer(
            update=1 + place // 4,
            prompt=t.prompt,
            sample=t.sample,
            group=t.group,
            versions=(0, 1),
            tokens=t.tokens,
            is_truncated=False,
            reward=reward_of(t.prompt, t.sample),
            parts={"right": 1.0},
            question=f"question {t.prompt} {NASTY}",
            response=f"answer {t.prompt} {NASTY}",
        )
        for place, t in enumerate(trained[:count])
    ]


def record(name, mode="partial", *, seed=0, gain=0.05, **changes):
    events = events_of("picture", mode, **changes)
    simulation = simulation_of("picture", mode, **changes)
    schedule = {k: v for k, v in asdict(simulation.schedule).items() if v is not None}
    config = {"seed": seed, "schedule": schedule, "engine": asdict(simulation.engine)}
    return RunRecord(
        name=name,
        events=events,
        rows=rows_of(events, gain),
        config=config,
        answers=answers_of(events),
    )


def drawn(page):
    """What the timeline says it shows."""
    page.wait_for_selector("[data-drawn]")
    found = page.eval_on_selector("[data-drawn]", "box => ({...box.dataset})")
    return {
        "from": float(found["from"]),
        "to": float(found["to"]),
        "drawn": found["drawn"],
        "bars": int(found["bars"]),
    }


def until(page, is_so):
    """Wait for what the browser is about to do; its policy allows no waiting inside the page."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "the page does not get there"
        page.wait_for_timeout(30)


def numbers(page):
    """The table of numbers: name to cells."""
    rows = page.eval_on_selector_all(
        "#numbers tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return {name: cells for name, *cells in rows}


def test_the_numbers_in_the_browser_are_those_of_the_log(browser_page, tmp_path):
    runs = [record("ours"), record("base", "on_policy", strategy="sync", gain=0.01)]
    open_text(browser_page, runs_page(runs, title="Two"), tmp_path)
    told = numbers(browser_page)
    for place, run in enumerate(runs):
        figures = measure(run.events).run
        assert told["bubble"][place] == f"{100 * figures.bubble:.1f}\xa0%"
        assert told["tokens trained on"][place] == f"{figures.ledger.trained:,}"
        assert told["tokens discarded"][place] == f"{figures.ledger.discarded:,}"
        assert told["answers trained on"][place] == f"{figures.trajectories:,}"
    lead = browser_page.inner_text("header .lead")
    for run in runs:
        assert f"{100 * measure(run.events).run.bubble:.1f}\xa0%" in lead
    assert browser_page.inner_text("h1").startswith("ours: accuracy goes from 25.0\xa0% to ")


_CUT = """() => [...document.querySelectorAll("figure svg, svg text, table")].filter(part => {
  const box = part.getBoundingClientRect();
  const around = (part.ownerSVGElement || document.documentElement).getBoundingClientRect();
  return box.width && (box.left < around.left - 1 || box.right > around.right + 1);
}).map(part => part.textContent.slice(0, 80))"""
"""Pictures and tables that stick out of the page, and texts that stick out of their picture."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_every_part_shows_in_both_schemes_and_widths(browser_page, tmp_path, scheme, width):
    set_scheme(browser_page, scheme)
    set_width(browser_page, width)
    open_text(browser_page, runs_page([record("ours")], title="One"), tmp_path)
    drawn(browser_page)
    browser_page.wait_for_selector("#answers summary")
    sections = browser_page.eval_on_selector_all(
        "section", "all => all.map(one => [one.id, one.getBoundingClientRect().height])"
    )
    assert [name for name, _ in sections] == [
        *("slots", "advice", "numbers", "bubbles", "ledger", "lengths", "staleness"),
        *("learning", "answers", "settings", "reading"),
    ]
    assert all(height > 60 for _, height in sections)
    assert not is_too_wide(browser_page)
    assert browser_page.evaluate(_CUT) == []
    paper = browser_page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    keep_screenshot(browser_page, f"report-{scheme}-{width}")


def test_pointing_at_a_bar_tells_whose_it_is(browser_page, tmp_path):
    run = record("ours", "on_policy")
    open_text(browser_page, runs_page([run], title="One"), tmp_path)
    drawn(browser_page)
    browser_page.locator(".slots-panel").scroll_into_view_if_needed()
    box = browser_page.locator(".slots-panel").bounding_box()
    browser_page.mouse.move(box["x"] + 0.02 * box["width"], box["y"] + 0.5 * box["height"])
    tip = browser_page.locator(".slots-tip")
    tip.get_by_text("prompt").first.wait_for()
    words = tip.inner_text()
    prompt, sample = map(int, re.search(r"prompt (\d+), sample (\d+)", words).groups())
    lengths = {key: tokens for key, _, tokens in measure(run.events).trained_lengths}
    assert re.search(rf"\b{lengths[prompt, sample]:,}\b", words)
    for part in ("group", "reward", "version"):
        assert part in words
    assert f"{reward_of(prompt, sample):.4g}" in words
    keep_screenshot(browser_page, "report-hover", is_whole=False)


def test_zooming_in_shows_less_and_zooming_out_everything_again(browser_page, tmp_path):
    open_text(browser_page, runs_page([record("ours")], title="One"), tmp_path)
    whole = drawn(browser_page)
    assert whole["drawn"] == "bars"
    browser_page.get_by_role("button", name="zoom in").click()
    until(browser_page, lambda: drawn(browser_page)["bars"] < whole["bars"])
    closer = drawn(browser_page)
    assert closer["to"] - closer["from"] < whole["to"] - whole["from"]
    keep_screenshot(browser_page, "report-zoomed", is_whole=False)
    browser_page.get_by_role("button", name="show the whole run").click()
    until(browser_page, lambda: drawn(browser_page) == whole)


def test_the_wheel_scrolls_the_page_unless_a_key_is_held(browser_page, tmp_path):
    open_text(browser_page, runs_page([record("ours")], title="One"), tmp_path)
    whole = drawn(browser_page)
    browser_page.locator(".slots-panel").scroll_into_view_if_needed()
    box = browser_page.locator(".slots-panel").bounding_box()
    browser_page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    before = browser_page.evaluate("scrollY")
    browser_page.mouse.wheel(0, 60)
    until(browser_page, lambda: browser_page.evaluate("scrollY") != before)
    assert drawn(browser_page) == whole
    browser_page.keyboard.down("Control")
    browser_page.mouse.wheel(0, -240)
    browser_page.keyboard.up("Control")
    until(browser_page, lambda: drawn(browser_page)["bars"] < whole["bars"])


def test_several_runs_stand_side_by_side_and_seeds_share_a_line(browser_page, tmp_path):
    runs = [
        record("ours-0", seed=0, gain=0.05),
        record("ours-1", seed=1, gain=0.04),
        record("base", "on_policy", strategy="sync", gain=0.01),
    ]
    open_text(browser_page, runs_page(runs, title="Three"), tmp_path)
    drawn(browser_page)
    assert browser_page.locator(".slots-panel").count() == 3
    assert len(numbers(browser_page)["bubble"]) == 3
    learning = browser_page.inner_text("#learning")
    assert "2 seeds" in learning
    differing = browser_page.inner_text("#settings")
    assert "schedule.mode" in differing
    assert browser_page.locator("#advice .advice").count() == 3
    keep_screenshot(browser_page, "report-comparison")


def test_answers_are_text_and_can_be_filtered_by_reward_and_length(browser_page, tmp_path):
    run = record("ours")
    open_text(browser_page, runs_page([run], title=NASTY), tmp_path)
    browser_page.wait_for_selector("#answers summary")
    browser_page.locator("#answers summary").first.click()
    text = browser_page.locator("#answers details[open]").inner_text()
    assert SHOWN in text
    assert browser_page.evaluate("window.hacked") is None
    assert browser_page.locator("main img").count() == 0
    for field, values in (
        ("reward", [a.reward for a in run.answers]),
        ("tokens", [a.tokens for a in run.answers]),
    ):
        most = sorted(values)[len(values) // 3]
        box = browser_page.locator(f'#answers input[name="{field}_most"]')
        box.fill(str(most))
        wanted = sum(value <= most for value in values)
        assert 0 < wanted < len(values)
        browser_page.locator("#answers [role=status]").get_by_text(f"{wanted} ").wait_for()
        box.fill("")
    keep_screenshot(browser_page, "report-answers", is_whole=False)


def test_a_page_of_100_000_answers_opens_within_its_budget_and_zooms(browser_page, tmp_path):
    groups = 196
    events = events_of("paper", "partial", groups=groups, lookahead=2)
    trained = measure(events).run.trajectories
    assert trained >= 100_000
    path = tmp_path / "large.html"
    path.write_text(runs_page([RunRecord(name="large", events=events)], title="Large"))
    assert path.stat().st_size < 8_000_000
    took = []
    while not took or (min(took) >= OPENING_BUDGET_SECONDS and len(took) < 3):
        began = time.monotonic()  # again if something else kept the machine busy
        browser_page.goto(path.as_uri())
        whole = drawn(browser_page)
        took.append(time.monotonic() - began)
    assert min(took) < OPENING_BUDGET_SECONDS
    assert whole["drawn"] == "shares"
    assert whole["bars"] > trained
    keep_screenshot(browser_page, "report-large", is_whole=False)
    for _ in range(12):
        browser_page.get_by_role("button", name="zoom in").click()
    until(browser_page, lambda: drawn(browser_page)["drawn"] == "bars")
    keep_screenshot(browser_page, "report-large-zoomed", is_whole=False)


def test_a_cut_off_log_shows_as_far_as_it_came(browser_page, tmp_path):
    whole = record("cut")
    run = replace(whole, events=whole.events[: len(whole.events) // 3], rows=[], answers=[])
    open_text(browser_page, runs_page([run], title="Cut"), tmp_path)
    drawn(browser_page)
    assert "is in progress" in browser_page.inner_text("header .notes")
