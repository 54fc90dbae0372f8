"""The slot timeline in a real browser: what is drawn, what the tip says, and every way to zoom."""

from dataclasses import replace
from functools import cache

import pytest

from browser import NARROW, WIDE, is_too_wide, keep_screenshot, open_text, set_scheme, set_width
from sortedrl.report.charts.svg import stylesheet
from sortedrl.report.html import asset, data_script, page
from sortedrl.report.page import SCRIPTS
from sortedrl.report.record import Run, RunRecord, measured
from sortedrl.report.sections.slots import slots_data, slots_section
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.settings import PRESETS

MOST_BARS = 15_000
"""Bars up to which slots.js draws each of them."""

START = """
const data = JSON.parse(document.getElementById("data").textContent);
const state = {};
const show = () => slotsView(document.getElementById("slots"), data, state);
document.addEventListener("again", show);
show();

function shares(cells, from, to) {
  const run = slotsRun(data.runs[0]);
  const { names, classes } = slotsClasses([run], "outcome");
  const spans = Int32Array.of(0, run.start.length);
  const part = { from, to, cells, spans };
  const exact = slotsCells(run, classes[0], names, part);
  const binned = slotsBinned(slotsBins(run, classes[0], names), run, part);
  return [exact, binned].map((rows) => rows.map((row) => [...row]));
}
window.shares = shares;
"""


@cache
def picture(mode: str, strategy: str = "sorted") -> Run:
    """A small run, with rewards of 0 and 1."""
    events: list = []
    preset = PRESETS["picture"]()
    schedule = replace(preset.schedule, strategy=strategy, mode=mode)
    simulate(replace(preset, schedule=schedule), record=events.append)
    run = measured(RunRecord(name=f"{strategy} {mode}", events=events))
    keys = [key for key, _, _ in run.metrics.trained_lengths]
    return replace(run, rewards={key: float(sum(key) % 2) for key in keys})


@cache
def large() -> Run:
    """More bars than are drawn one by one."""
    events: list = []
    paper = PRESETS["paper"]()
    schedule = replace(paper.schedule, update_batch=64)
    simulate(replace(paper, groups=14, schedule=schedule), record=events.append)
    return measured(RunRecord(name="large", events=events))


def text(*runs: Run) -> str:
    scripts = [name for name in SCRIPTS if name.startswith(("browse", "slots"))]
    script = "\n".join([*map(asset, scripts), START])
    return page(
        title="slots",
        body=f"<main>{slots_section(runs)}</main>{data_script('data', slots_data(runs))}",
        style=stylesheet() + asset("page.css") + asset("run.css") + asset("slots.css"),
        script=f'"use strict"; (() => {{ {script} }})();',
    )


@pytest.fixture
def show(browser_page, tmp_path):
    """Opens the page of some runs."""

    def opened(*runs: Run):
        open_text(browser_page, text(*runs), tmp_path)
        browser_page.wait_for_selector("#slots[data-drawn]")
        return browser_page

    return opened


def told(page, name: str) -> str:
    settle(page)
    return page.locator("#slots").get_attribute(f"data-{name}")


def words(page) -> str:
    settle(page)
    return page.locator(".slots-summary").text_content()


def settle(page) -> None:
    """Wait until what was asked for is drawn."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def window(page) -> tuple[float, float]:
    return float(told(page, "from")), float(told(page, "to"))


def place(page, run: Run, *, slot: float, seconds: float, panel: int = 0) -> tuple[float, float]:
    """Where on the screen a second of a slot is; lanes lie at the bottom of their canvas."""
    lanes = page.locator(".slots-lanes").nth(panel)
    lanes.scroll_into_view_if_needed()
    box = lanes.bounding_box()
    first, last = window(page)
    head = 17
    pitch = (box["height"] - head) / run.lanes.slots
    x = box["x"] + box["width"] * (seconds - run.lanes.start - first) / (last - first)
    return x, box["y"] + head + (slot + 0.5) * pitch


def point(page, run: Run, *, slot: float, seconds: float, panel: int = 0) -> dict[str, str]:
    """Move the mouse there; what the tip says, by row."""
    page.mouse.move(*place(page, run, slot=slot, seconds=seconds, panel=panel))
    return tip(page)


def tip(page) -> dict[str, str]:
    box = page.locator(".slots-tip")
    names, values = box.locator("dt").all_text_contents(), box.locator("dd").all_text_contents()
    heads = box.locator("strong").all_text_contents()
    return dict(zip(names, values, strict=True)) | {"head": "".join(heads)}


def colour_at(page, x: float, y: float, *, panel: int = 0) -> tuple[int, ...]:
    """The colour of a pixel of a panel's lanes, from the page's coordinates."""
    script = """([panel, x, y]) => {
      const canvas = document.querySelectorAll(".slots-lanes")[panel];
      const box = canvas.getBoundingClientRect();
      const scale = canvas.width / box.width;
      const at = [(x - box.left) * scale, (y - box.top) * scale].map(Math.floor);
      return [...canvas.getContext("2d").getImageData(...at, 1, 1).data];
    }"""
    return tuple(page.evaluate(script, [panel, x, y]))


TRAINED, IDLE, UPDATE = (0, 0x72, 0xB2, 255), (0xFC, 0xE5, 0xC8, 255), (0x59, 0x63, 0x6E, 255)


def test_the_tip_tells_everything_about_the_bar_under_the_mouse(show):
    run = picture("coupled")
    page = show(run)
    bars = run.lanes.bars
    bar = max((b for b in bars if b.discarded and b.kept), key=lambda b: b.end - b.start)
    said = point(page, run, slot=bar.slot, seconds=(bar.start + bar.end) / 2)
    stretches = [b for b in bars if (b.prompt, b.sample) == (bar.prompt, bar.sample)]
    writers = [b.version for b in stretches if b.decoded > b.discarded]
    trained_at = {key: version for key, version, _ in run.metrics.trained_lengths}
    key = (bar.prompt, bar.sample)
    assert said["head"] == f"prompt {bar.prompt}, sample {bar.sample}"
    assert said["group"] == str(bar.group)
    assert said["length"] == f"{bar.length} tokens"
    assert said["reward"] == f"{run.rewards[key]:.0f}"
    order = sorted(b.start for b in stretches).index(bar.start) + 1
    assert said["interval"] == f"{order} of {len(stretches)}, in slot {bar.slot}"
    assert said["decoded here"] == f"{bar.decoded} tokens"
    assert said["kept from earlier intervals"] == str(bar.kept)
    assert said["discarded later"] == str(bar.discarded)
    assert said["generated by"] == f"version {bar.version}"
    span = (min(writers), max(writers))
    by = f"version {span[0]}" if span[0] == span[1] else f"versions {span[0]} to {span[1]}"
    assert said["whole answer generated by"] == by
    assert said["trained at"] == f"version {trained_at[key]}"
    start, end = (float(word.split()[0]) for word in said["time"].split(" to "))
    assert (start, end) == pytest.approx((bar.start, bar.end), abs=0.6)


def test_bars_bands_and_idle_slots_have_their_colours(show):
    run = picture("partial", "sync")
    page = show(run)
    bar = max((b for b in run.lanes.bars if b.end - b.start > 20), key=lambda b: b.start)
    x, y = place(page, run, slot=bar.slot, seconds=(bar.start + bar.end) / 2)
    assert colour_at(page, x, y) == TRAINED
    rollout = max(
        (b for b in run.lanes.bands if b.kind == "rollout"), key=lambda b: b.end - b.start
    )
    inside = [b for b in run.lanes.bars if rollout.start <= b.start and b.end <= rollout.end]
    last = {b.slot: max(c.end for c in inside if c.slot == b.slot) for b in inside}
    slot = min(last, key=lambda slot: last[slot])
    x, y = place(page, run, slot=slot, seconds=(last[slot] + rollout.end) / 2)
    assert colour_at(page, x, y) == IDLE
    page.mouse.move(x, y)
    assert tip(page) == {"head": ""}
    update = max((b for b in run.lanes.bands if b.kind == "update"), key=lambda b: b.end - b.start)
    x, y = place(page, run, slot=0, seconds=(update.start + update.end) / 2)
    assert colour_at(page, x, y) == UPDATE
    page.mouse.move(x, y)
    assert tip(page)["head"] == "update"


def test_several_runs_share_the_axis_and_the_zoom(show):
    first, second = picture("partial"), picture("partial", "sync")
    page = show(first, second)
    longest = max(run.lanes.end - run.lanes.start for run in (first, second))
    assert window(page) == (0, pytest.approx(longest))
    assert page.locator(".slots-title strong").all_text_contents() == [first.name, second.name]
    assert words(page).startswith("All ")
    for panel, run in enumerate((first, second)):
        bar = max(run.lanes.lanes[3], key=lambda bar: bar.end - bar.start)
        said = point(page, run, slot=3, seconds=(bar.start + bar.end) / 2, panel=panel)
        assert said["head"] == f"prompt {bar.prompt}, sample {bar.sample}"
    page.get_by_role("button", name="zoom in").click()
    before, after = window(page)
    assert (before, after) == pytest.approx((longest / 4, longest * 3 / 4))
    for panel, run in enumerate((first, second)):
        middle = (before + after) / 2
        bar = min(run.lanes.bars, key=lambda b: abs((b.start + b.end) / 2 - middle))
        said = point(page, run, slot=bar.slot, seconds=(bar.start + bar.end) / 2, panel=panel)
        assert said["head"] == f"prompt {bar.prompt}, sample {bar.sample}"


def test_wheel_with_control_zooms_around_the_pointer_and_a_plain_wheel_does_not(show):
    run = picture("partial")
    page = show(run)
    x, y = place(page, run, slot=2, seconds=run.lanes.start + 40)
    page.mouse.move(x, y)
    whole = window(page)
    page.mouse.wheel(0, -200)
    assert window(page) == whole
    x, y = place(page, run, slot=2, seconds=run.lanes.start + 40)
    page.mouse.move(x, y)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    page.wait_for_function("document.getElementById('slots').dataset.from > 0")
    first, last = window(page)
    assert last - first == pytest.approx((whole[1] - whole[0]) / 2)
    share = 40 / (whole[1] - whole[0])
    assert first + share * (last - first) == pytest.approx(40, abs=0.01 * whole[1])


def test_drag_moves_and_shift_drag_and_double_click_zoom(show):
    run = picture("partial")
    page = show(run)
    total = window(page)[1]
    start = place(page, run, slot=1, seconds=run.lanes.start + 0.25 * total)
    end = place(page, run, slot=1, seconds=run.lanes.start + 0.5 * total)
    page.keyboard.down("Shift")
    page.mouse.move(*start)
    page.mouse.down()
    page.mouse.move(*end, steps=4)
    page.mouse.up()
    page.keyboard.up("Shift")
    assert window(page) == pytest.approx((0.25 * total, 0.5 * total), abs=0.01 * total)
    before = window(page)
    page.mouse.move(*start)
    page.mouse.down()
    page.mouse.move(start[0] - 100, start[1], steps=4)
    page.mouse.up()
    after = window(page)
    width = page.locator(".slots-lanes").bounding_box()["width"]
    shift = 100 / width * (before[1] - before[0])
    assert after == pytest.approx((before[0] + shift, before[1] + shift), abs=0.005 * total)
    page.mouse.dblclick(*start)
    first, last = window(page)
    assert last - first == pytest.approx((after[1] - after[0]) / 3)


def test_the_keyboard_zooms_moves_and_walks_from_bar_to_bar(show):
    run = picture("partial")
    page = show(run)
    total = window(page)[1]
    page.locator(".slots-lanes").focus()
    page.keyboard.press("+")
    page.keyboard.press("+")
    first, last = window(page)
    assert last - first == pytest.approx(total / 4)
    page.keyboard.press("ArrowRight")
    assert window(page)[0] == pytest.approx(first + 0.2 * (last - first))
    page.keyboard.press("-")
    assert window(page)[1] - window(page)[0] == pytest.approx(total / 2)
    page.keyboard.press("0")
    assert window(page) == (0, pytest.approx(total))
    lane = run.lanes.lanes[0]
    for bar in lane[:3]:
        page.keyboard.press("Shift+ArrowRight")
        assert tip(page)["head"] == f"prompt {bar.prompt}, sample {bar.sample}"
    page.keyboard.press("Shift+ArrowDown")
    assert tip(page)["interval"].endswith("in slot 1")
    page.keyboard.press("Escape")
    assert tip(page) == {"head": ""}


def test_the_strip_of_the_whole_run_makes_moves_and_resizes_the_window(show):
    page = show(picture("partial"))
    total = window(page)[1]
    box = page.locator(".slots-whole").bounding_box()

    def drag(start: float, end: float) -> tuple[float, float]:
        y = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + start * box["width"], y)
        page.mouse.down()
        page.mouse.move(box["x"] + end * box["width"], y, steps=5)
        page.mouse.up()
        first, last = window(page)
        return first / total, last / total

    assert drag(0.2, 0.4) == pytest.approx((0.2, 0.4), abs=0.01)
    assert drag(0.3, 0.5) == pytest.approx((0.4, 0.6), abs=0.01)
    assert drag(0.6, 0.9) == pytest.approx((0.4, 0.9), abs=0.01)
    assert drag(0.4, 0.5) == pytest.approx((0.5, 0.9), abs=0.01)


def test_a_large_run_is_shares_first_and_bars_when_zoomed(show):
    run = large()
    assert len(run.lanes.bars) > MOST_BARS
    page = show(run)
    assert told(page, "drawn") == "shares"
    assert told(page, "bars") == str(len(run.lanes.bars))
    middle = (run.lanes.start + run.lanes.end) / 2
    said = point(page, run, slot=64, seconds=middle)
    assert said.pop("head").startswith("slots at")
    shares = [float(value.split()[0]) for value in said.values()]
    assert sum(shares) == pytest.approx(100, abs=2)
    page.locator(".slots-lanes").focus()
    while told(page, "drawn") == "shares":
        page.keyboard.press("+")
    first, last = window(page)
    shown = [b for b in run.lanes.bars if b.end > first and b.start < last]
    assert 0 < int(told(page, "bars")) <= MOST_BARS
    assert int(told(page, "bars")) == pytest.approx(len(shown), abs=2)


def test_shares_are_the_slot_seconds_of_the_bars_in_each_cell(show):
    """Both ways to them, bar by bar and from sums over fine bins."""
    run = picture("coupled")
    page = show(run)
    first, last, cells = 100.0, 1300.0, 37
    exact, binned = page.evaluate("(at) => shares(...at)", [cells, first, last])
    width = (last - first) / cells
    rows = {name: [0.0] * cells for name in ("trained", "resumed", "open", "discarded")}
    for bar in run.lanes.bars:
        kept = "trained" if bar.is_finished else "resumed"
        middle = bar.discarded_from
        for name, start, end in ((kept, bar.start, middle), ("discarded", middle, bar.end)):
            for cell in range(cells):
                left = run.lanes.start + first + cell * width
                rows[name][cell] += max(0.0, min(end, left + width) - max(start, left)) / width
    assert sum(rows["discarded"]) > 0
    for name, row, sums in zip(rows, exact, binned, strict=True):
        assert row == pytest.approx(rows[name], abs=1e-3), name
        assert sums == pytest.approx(rows[name], abs=5e-2), name


def test_the_warm_tint_covers_what_was_idle(show):
    run = large()
    page = show(run)
    assert told(page, "drawn") == "shares"
    found = page.evaluate(
        """() => {
          const canvas = document.querySelector(".slots-lanes");
          const [width, height] = [canvas.width, canvas.height - 17];
          const { data } = canvas.getContext("2d").getImageData(0, 17, width, height);
          const idle = [0xfc, 0xe5, 0xc8];
          const pixels = Array.from({ length: width * height }, (_, place) => 4 * place);
          return pixels.filter((at) => idle.every((part, i) => data[at + i] === part)).length
            / pixels.length;
        }"""
    )
    figures = run.metrics.run
    idle = figures.bubble * figures.rollout_seconds / figures.seconds
    assert found == pytest.approx(idle, abs=0.02)


def test_slots_that_are_tall_enough_have_no_buttons_for_fewer(show):
    page = show(picture("partial"))
    assert not page.get_by_role("button", name="show fewer slots").is_visible()


def test_fewer_slots_are_taller(show):
    run = large()
    page = show(run)
    page.get_by_role("button", name="show fewer slots").click()
    page.get_by_role("button", name="show fewer slots").click()
    assert "slots 48 to 79 of 128" in words(page)
    page.get_by_role("button", name="show more slots").click()
    assert "slots 32 to 95 of 128" in words(page)
    page.get_by_role("button", name="show the whole run").click()
    assert "slots 32" not in words(page)


@pytest.mark.parametrize(
    ("colour", "title"),
    [
        ("outcome", "trained on"),
        ("length", "Tokens of the answer:"),
        ("reward", "Reward:"),
        ("age", "Updates between generation and training:"),
    ],
)
def test_the_legend_says_what_the_chosen_colours_mean(show, colour, title):
    page = show(picture("coupled"))
    page.locator("#slots select").select_option(colour)
    items = page.locator(".slots-key li").all_text_contents()
    assert title in items
    assert {"discarded later", "idle slot", "update"} <= set(items)
    assert told(page, "drawn") == "bars"


def test_a_renewed_view_keeps_its_window_and_colours_and_leaves_nothing_behind(show):
    page = show(picture("partial"))
    page.locator("#slots select").select_option("length")
    page.locator(".slots-lanes").focus()
    page.keyboard.press("+")
    before = window(page)
    assert before[0] > 0
    # as when a page is served: new elements take the place of the old ones
    page.evaluate("""() => {
      const old = document.getElementById("slots");
      const fresh = old.cloneNode(true);
      old.replaceWith(fresh);
      document.dispatchEvent(new Event("again"));
    }""")
    assert window(page) == before
    page.keyboard.press("+")
    assert window(page)[0] > before[0]
    assert page.locator("#slots select").input_value() == "length"
    assert page.locator(".slots-lanes").count() == 1


def test_a_log_cut_short_shows_what_was_still_being_written(show):
    run = picture("partial")
    harvests = [at for at, event in enumerate(run.record.events) if event.kind == "harvest"]
    cut = measured(replace(run.record, events=run.record.events[: harvests[4]]))
    open_bars = [b for b in cut.lanes.bars if b.length is None and not b.decoded]
    page = show(cut)
    assert open_bars
    bar = max(open_bars, key=lambda bar: bar.end - bar.start)
    said = point(page, cut, slot=bar.slot, seconds=(bar.start + bar.end) / 2)
    assert said["outcome"] == "still being generated when the log ends"
    assert "not trained on when the log ends" in page.locator(".slots-key").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_it_fits_and_follows_the_colour_scheme(show, scheme, width):
    run = picture("coupled")
    page = show(run, picture("partial", "sync"))
    set_width(page, width)
    set_scheme(page, scheme)
    page.get_by_role("button", name="zoom in").click()
    assert not is_too_wide(page)
    first, last = window(page)
    whole = [b for b in run.lanes.bars if first < b.start and b.end < last and b.is_finished]
    bar = max((b for b in whole if not b.discarded), key=lambda b: b.end - b.start)
    x, y = place(page, run, slot=bar.slot, seconds=(bar.start + bar.end) / 2)
    assert colour_at(page, x, y) == (TRAINED if scheme == "light" else (0x2F, 0x86, 0xC8, 255))
    page.mouse.move(x, y)
    assert tip(page)["head"] == f"prompt {bar.prompt}, sample {bar.sample}"
    shown = page.locator(".slots-tip").bounding_box()
    assert shown["x"] >= 0
    assert shown["y"] >= 0
    assert shown["x"] + shown["width"] <= width
    assert shown["y"] + shown["height"] <= page.viewport_size["height"]
    keep_screenshot(page, f"slots-{scheme}-{width}", is_whole=False)
