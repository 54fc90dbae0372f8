import json
import os
import re
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

from browser import NARROW, expect, is_too_wide, keep_screenshot, set_scheme, set_width
from report_worlds import NASTY, SHOWN
from sortedrl.core.files import LoggedAnswer
from sortedrl.report.record import read_run
from watched_runs import first_updates, served, whole_log, write_run

TWO_FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def picture(updates):
    return first_updates(updates, preset="picture")


def answers(number, *, question="What is two and two?"):
    rows = [
        LoggedAnswer(
            update=place + 1,
            prompt=place,
            sample=0,
            group=0,
            versions=(place, place),
            tokens=10 + place,
            is_truncated=False,
            reward=place / 10,
            parts={"right": place / 10},
            question=f"{question} ({place})",
            response=f"It is {place}. {question}",
        )
        for place in range(number)
    ]
    return "".join(json.dumps(asdict(row)) + "\n" for row in rows)


@contextmanager
def watched(page, *paths, **given):
    """The runs, served and opened in the page; it is left before the server stops."""
    with served(*paths, **given) as server:
        page.goto(server.url)
        yield
        page.goto("about:blank")


def status(page):
    return page.locator(".watch")


def mark_page(page):
    """A mark that a page which is loaded anew does not have."""
    page.evaluate("window.mark = 'not reloaded'")


def is_same_page(page):
    return page.evaluate("window.mark === 'not reloaded'")


def version(page):
    return page.locator('meta[name="sortedrl-version"]').get_attribute("content")


def wait_for_news(page, before):
    expect(page.locator(f'meta[name="sortedrl-version"][content="{before}"]')).to_have_count(0)
    return version(page)


def test_a_run_that_grows_is_shown_without_reloading_and_the_reader_keeps_their_place(
    browser_page, tmp_path
):
    folder = write_run(tmp_path / "mine", picture(2))
    (folder / "answers.jsonl").write_text(answers(3))
    with watched(browser_page, folder):
        expect(status(browser_page)).to_contain_text("The run is in progress")
        mark_page(browser_page)
        slots = browser_page.locator("#slots")
        browser_page.get_by_role("button", name="zoom in").click()
        expect(slots.locator(".slots-summary")).not_to_contain_text("All")
        zoom = [slots.get_attribute(name) for name in ("data-from", "data-to")]
        search = browser_page.locator('#answers input[type="search"]')
        search.fill("It is 2")
        browser_page.evaluate("scrollBy(0, 40)")
        # the search field stays where it is, with the writing mark in it
        place = search.bounding_box()["y"]
        before = version(browser_page)

        (folder / "answers.jsonl").write_text(answers(30))
        write_run(folder, picture(5))
        seconds = round(read_run(folder).events[-1].seconds)
        expect(status(browser_page)).to_contain_text(f"{seconds:,} s of training")
        assert version(browser_page) != before
        assert is_same_page(browser_page)
        expect(slots).to_have_attribute("data-from", zoom[0])
        expect(slots).to_have_attribute("data-to", zoom[1])
        expect(search).to_have_value("It is 2")
        expect(search).to_be_focused()
        expect(browser_page.locator("#answers [role=status]")).to_have_text("11 answers")
        browser_page.evaluate(TWO_FRAMES)
        assert abs(search.bounding_box()["y"] - place) < 3
        browser_page.keyboard.type("9")
        expect(browser_page.locator("#answers [role=status]")).to_have_text("1 answer")
        expect(search).to_have_value("It is 29")

        write_run(folder, whole_log(preset="picture"))
        expect(status(browser_page)).to_contain_text("The run has finished")
        assert is_same_page(browser_page)
        expect(slots).to_have_attribute("data-from", zoom[0])
        expect(slots).to_have_attribute("data-to", zoom[1])


def test_drawers_that_were_opened_stay_open(browser_page, tmp_path):
    folder = write_run(tmp_path / "mine", picture(2))
    with watched(browser_page, folder):
        drawers = browser_page.locator("main details:not(#slots details, #answers details)")
        assert drawers.count() > 1
        states = [bool(place % 2) for place in range(drawers.count())]
        for place, is_open in enumerate(states):
            drawers.nth(place).evaluate("(drawer, isOpen) => { drawer.open = isOpen; }", is_open)
        before = version(browser_page)
        write_run(folder, picture(3))
        wait_for_news(browser_page, before)
        assert drawers.evaluate_all("all => all.map((drawer) => drawer.open)") == states


def test_what_others_wrote_shows_as_text(browser_page, tmp_path):
    folder = write_run(tmp_path / "a <b>run", picture(2))
    (folder / "answers.jsonl").write_text(answers(2, question=NASTY))
    (folder / "config.toml").write_text(f"task = {json.dumps(NASTY.replace(chr(0xD800), ''))}\n")
    with watched(browser_page, folder):
        first = browser_page.locator("#answers details").first
        first.locator("summary").click()
        expect(first).to_contain_text(SHOWN)
        before = version(browser_page)
        (folder / "answers.jsonl").write_text(answers(4, question=NASTY))
        write_run(folder, picture(3))
        wait_for_news(browser_page, before)
        expect(browser_page.locator("#answers details").nth(3)).to_contain_text("onerror=")
        assert browser_page.evaluate("window.hacked === undefined")
        assert browser_page.locator("img, main b").count() == 0
        assert "a <b>run" in browser_page.title()


def test_a_run_that_has_not_started_is_waited_for(browser_page, tmp_path):
    folder = tmp_path / "mine"
    with watched(browser_page, folder):
        expect(browser_page.locator("main")).to_contain_text("does not exist yet")
        expect(status(browser_page)).to_contain_text("Waiting for the run")
        keep_screenshot(browser_page, "watch-waiting-light")
        folder.mkdir()
        expect(browser_page.locator("main")).to_contain_text("waiting for the run's first update")
        write_run(folder, picture(1))
        expect(browser_page.locator("#slots")).to_be_visible()
        expect(status(browser_page)).to_contain_text("The run is in progress")


def test_a_server_that_stops_is_told_quietly_and_found_again(browser_page, browser_log, tmp_path):
    browser_log.excuse("Failed to load resource: net::ERR_")
    folder = write_run(tmp_path / "mine", picture(1))
    with ExitStack() as stack:
        server = stack.enter_context(served(folder))
        browser_page.goto(server.url)
        mark_page(browser_page)
        expect(status(browser_page)).to_contain_text("The run is in progress")
        port = server.server_address[1]
        stack.close()
        expect(status(browser_page)).to_contain_text(
            re.compile(r"The server has stopped; the page shows the run at \d\d:\d\d:\d\d\.")
        )
        write_run(folder, whole_log(preset="picture"))
        stack.enter_context(served(folder, port=port))
        expect(status(browser_page)).to_contain_text("The run has finished")
        assert is_same_page(browser_page)
        browser_page.goto("about:blank")


def test_nothing_changes_under_the_readers_hands_while_text_is_marked(browser_page, tmp_path):
    folder = write_run(tmp_path / "mine", picture(1))
    with watched(browser_page, folder):
        expect(status(browser_page)).to_contain_text("The run is in progress")
        before = version(browser_page)
        browser_page.evaluate("getSelection().selectAllChildren(document.querySelector('h1'))")
        write_run(folder, picture(2))
        expect(status(browser_page)).to_contain_text("New data is available")
        assert version(browser_page) == before
        browser_page.evaluate("getSelection().removeAllRanges()")
        wait_for_news(browser_page, before)


def test_a_run_that_was_killed_long_ago_is_not_said_to_go_on(browser_page, tmp_path):
    folder = write_run(tmp_path / "mine", picture(1)[:-10])
    os.utime(folder / "events.jsonl", (1e9, 1e9))
    with watched(browser_page, folder):
        expect(status(browser_page)).to_contain_text("No new data for a while")
        expect(status(browser_page)).to_contain_text("last written at 09/09/2001")


def test_what_keeps_the_page_from_being_newer_is_told(browser_page, tmp_path):
    folder = write_run(tmp_path / "mine", picture(1))
    with watched(browser_page, folder):
        expect(status(browser_page)).to_contain_text("The run is in progress")
        (folder / "metrics.jsonl").write_text("[]\n")
        expect(status(browser_page)).to_contain_text("metrics.jsonl:1: expected a JSON object")


def test_the_dot_of_a_run_that_goes_on_can_be_seen(browser_page, tmp_path):
    folder = write_run(tmp_path / "mine", picture(1))
    with watched(browser_page, folder):
        expect(status(browser_page)).to_contain_text("The run is in progress")
        for scheme in ("light", "dark"):
            set_scheme(browser_page, scheme)
            colour = browser_page.eval_on_selector(
                ".watch-mark", "mark => getComputedStyle(mark).backgroundColor"
            )
            assert colour not in ("rgba(0, 0, 0, 0)", "transparent")


def test_several_runs_are_watched_together(browser_page, tmp_path):
    one = write_run(tmp_path / "one", whole_log(preset="picture"))
    other = write_run(tmp_path / "other", picture(1))
    with watched(browser_page, one, other):
        expect(status(browser_page)).to_contain_text("The runs are in progress")
        write_run(other, whole_log(preset="picture", seed=1))
        expect(status(browser_page)).to_contain_text("The runs have finished")


def test_the_watched_page_is_readable_wide_and_narrow_in_both_schemes(browser_page, tmp_path):
    folder = write_run(tmp_path / "mine", picture(4))
    (folder / "answers.jsonl").write_text(answers(12))
    with watched(browser_page, folder, refresh_seconds=2):
        expect(status(browser_page)).to_contain_text("The run is in progress")
        for scheme in ("light", "dark"):
            set_scheme(browser_page, scheme)
            for name, width in (("wide", 1280), ("narrow", NARROW)):
                set_width(browser_page, width)
                assert not is_too_wide(browser_page)
                keep_screenshot(browser_page, f"watch-{scheme}-{name}", is_whole=False)
