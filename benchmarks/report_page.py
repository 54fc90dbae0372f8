"""Cost of the page of a large run: building, opening, panning and zooming.

    python benchmarks/report_page.py                   100,352 answers, a minute; needs Chromium
    python benchmarks/report_page.py --groups 20       a smaller run

A simulated run of the preset `paper` with lookahead 2 is logged, read, and rendered as a page. The
page is opened from disk in headless Chromium; at several zoom levels the timeline is dragged, and
frame times are measured.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from playwright.sync_api import Page, sync_playwright

from sortedrl.core.events import EventFile
from sortedrl.report.page import runs_page
from sortedrl.report.record import read_run
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.settings import PRESETS

GAPS = """
() => new Promise((done) => {
  const gaps = [];
  let before = performance.now();
  function frame(now) {
    gaps.push(now - before);
    before = now;
    if (gaps.length < 60) requestAnimationFrame(frame); else done(gaps.slice(1));
  }
  requestAnimationFrame(frame);
})
"""
DRAG = """
() => {
  const canvas = document.querySelector(".slots-lanes");
  const lanes = canvas.getBoundingClientRect();
  let x = lanes.left + lanes.width / 2;
  let way = 4;
  const send = (kind) => canvas.dispatchEvent(new PointerEvent(kind, {
    bubbles: true, pointerId: 1, isPrimary: true, button: 0, buttons: 1,
    clientX: x, clientY: lanes.top + lanes.height / 2,
  }));
  send("pointerdown");
  window.dragging = setInterval(() => {
    x += way;
    if (x > lanes.right - 20 || x < lanes.left + 20) way = -way;
    send("pointermove");
  }, 8);
}
"""


def write_log(path: Path, groups: int) -> int:
    """Write the log of a simulated run; returns its number of answers."""
    paper = PRESETS["paper"]()
    schedule = replace(paper.schedule, lookahead=2)
    file = EventFile(path)
    outcome = simulate(replace(paper, groups=groups, schedule=schedule), record=file)
    file.close()
    return outcome.metrics.run.trajectories


def opened(page: Page, path: Path) -> float:
    """Seconds until the timeline is drawn."""
    began = time.monotonic()
    page.goto(path.as_uri())
    page.wait_for_selector("[data-drawn]")
    return time.monotonic() - began


def panned(page: Page) -> list[float]:
    """Milliseconds between frames while the timeline is dragged."""
    page.mouse.move(640, 0)
    page.evaluate(DRAG)
    gaps: list[float] = page.evaluate(GAPS)
    page.evaluate("() => clearInterval(window.dragging)")
    return gaps


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=196, help="groups of 512 answers (196)")
    given = parser.parse_args()
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        log, path = Path(folder) / "large.jsonl", Path(folder) / "large.html"
        answers = write_log(log, given.groups)
        began = time.process_time()
        path.write_text(runs_page([read_run(log)], title="large"), encoding="utf-8")
        made = time.process_time() - began
        print(
            f"{answers:,} answers, a log of {log.stat().st_size / 1e6:.0f} MB: a page of "
            f"{path.stat().st_size / 1e6:.1f} MB, made in {made:.1f} s of CPU time"
        )
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        print("opened in", ", ".join(f"{opened(page, path):.2f} s" for _ in range(5)))
        page.locator(".slots-lanes").scroll_into_view_if_needed()
        for zoom in range(5):
            drawn = page.eval_on_selector("[data-drawn]", "box => ({...box.dataset})")
            gaps = sorted(panned(page))
            now = page.eval_on_selector("[data-drawn]", "box => box.dataset.from")
            assert zoom == 0 or now != drawn["from"], "the timeline was not moved"
            print(
                f"{drawn['drawn']:>6}, {int(drawn['bars']):>9,} in view: from frame to frame "
                f"{median(gaps):.1f} ms, one in twenty more than {gaps[int(0.95 * len(gaps))]:.1f}"
            )
            for _ in range(2):
                page.get_by_role("button", name="zoom in").click()
                page.wait_for_timeout(100)
        browser.close()


if __name__ == "__main__":
    main()
