"""Cost of the live view: the same training run with and without it, and a single frame.

    python benchmarks/live_view.py                 both, about ten minutes on one core
    python benchmarks/live_view.py --quick         short runs, once each
    python benchmarks/live_view.py --json          for a script
    python benchmarks/live_view.py -- --device cuda --model tiny:hidden=512,layers=8,heads=8
                                                   arguments after -- change settings of the runs

Runs: a tiny model is trained on the CPU with one thread, from the same seed, so the work is
identical to the token. With: standard error is a pseudo-terminal of 100 x 30 that the view draws
on. Without: standard error is a file with plain lines. The two alternate, and the first of a pair
alternates too. Seconds are those of the run's own clock, without loading; CPU seconds are those of
the whole process including loading, and are less affected by other processes.

Accounted: in one more run with the view, the CPU time of every call into it is summed, from the
run's thread and its own; two equal runs differ by more than the view costs.

Frames: CPU time to draw one frame, from state to terminal, during a simulated run; and the cost of
one event for the run.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from rich.console import Console, ConsoleDimensions

from sortedrl.core.events import Event, Finish, Harvest
from sortedrl.core.files import read_metrics
from sortedrl.core.meter import Meter
from sortedrl.report.live import LiveView
from sortedrl.report.live_state import Source
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.settings import PRESETS

WIDTH, HEIGHT = 100, 30
FRAMES_PER_SECOND = 2
EVENTS_PER_FRAME = 50


ACCOUNTED = """
import json, sys, time
from pathlib import Path
from sortedrl.cli import main
from sortedrl.report.live import LiveView

spent = dict.fromkeys(("__call__", "updated", "advance", "refresh"), 0.0)

def timed(name, method):
    def call(*arguments):
        began = time.thread_time()
        try:
            return method(*arguments)
        finally:
            spent[name] += time.thread_time() - began
    return call

for name in spent:
    setattr(LiveView, name, timed(name, getattr(LiveView, name)))
code = main(sys.argv[2:])
Path(sys.argv[1]).write_text(json.dumps(spent))
sys.exit(code)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The times of one training run."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """The cost of the view for a number of slots."""

    slots: int
    frame_milliseconds: float
    frame_milliseconds_most: float
    event_microseconds: float

    @property
    def share(self) -> float:
        """Of a core, for frames only."""
        return self.frame_milliseconds * FRAMES_PER_SECOND / 1000


@contextmanager
def terminal() -> Iterator[int]:
    """A pseudo-terminal with a reader; yields the end to write to."""
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    thread = threading.Thread(target=_read_all, args=(reader,))
    thread.start()
    try:
        yield writer
    finally:
        os.close(writer)
        thread.join()
        os.close(reader)


def _read_all(reader: int) -> None:
    while True:
        try:
            if not os.read(reader, 1 << 16):
                return
        except OSError:  # Linux raises this when the other end is closed
            return


def train(
    folder: Path,
    *,
    updates: int,
    with_view: bool,
    changes: list[str],
    account: Path | None = None,
) -> Run:
    """One training run in its own process; `account` is where the view's time is written."""
    program = ["-m", "sortedrl"] if account is None else ["-c", ACCOUNTED, str(account)]
    words = [
        *(sys.executable, *program, "train", "--model", "tiny:seed=0", "--threads", "1"),
        *("--task", "knights_knaves:people=3,style=compact,count=4000,seed=1"),
        *("--out", str(folder), "--max-updates", str(updates)),
        *("--schedule.group-prompts", "256", "--schedule.update-batch", "64"),
        *("--engine.slots", "64", "--engine.max-tokens", "128"),
        *("--saving.every", "100000", *changes),
    ]
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    with terminal() as writer, (folder.parent / "plain.txt").open("w") as plain:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=writer if with_view else plain,
            env=environment,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the run failed: {' '.join(words)}")
    seconds = read_metrics(folder / "metrics.jsonl")[-1]["total/seconds"]
    assert isinstance(seconds, float)
    return Run(seconds=seconds, cpu_seconds=usage.ru_utime + usage.ru_stime)


def pairs(repeats: int, *, updates: int, changes: list[str]) -> list[tuple[Run, Run]]:
    """Runs with and without the view, alternating."""
    found = []
    with tempfile.TemporaryDirectory() as root:
        for number in range(repeats):
            runs = {}
            for with_view in (True, False) if number % 2 else (False, True):
                folder = Path(root) / f"{number}-{with_view}"
                runs[with_view] = train(
                    folder, updates=updates, with_view=with_view, changes=changes
                )
                print(f"  with view: {with_view!s:5}  {runs[with_view]}", file=sys.stderr)
            found.append((runs[True], runs[False]))
    return found


def accounted(*, updates: int, changes: list[str]) -> tuple[float, Run]:
    """CPU seconds spent in the view during a run, and the run."""
    with tempfile.TemporaryDirectory() as root:
        account = Path(root) / "account.json"
        run = train(
            Path(root) / "run", updates=updates, with_view=True, changes=changes, account=account
        )
        return sum(json.loads(account.read_text()).values()), run


def frames(slots: int, *, most_events: int) -> Frames:
    """The view of a simulated run with this many slots, drawn after every few events."""
    paper = PRESETS["paper"]()
    schedule = replace(paper.schedule, group_prompts=4 * slots, update_batch=slots)
    engine = replace(paper.engine, slots=slots)
    log: list[Event] = []
    simulate(replace(paper, groups=2, schedule=schedule, engine=engine), record=log.append)
    events, decoded, meter = log[:most_events], 0, Meter()
    source = Source(
        schedule=schedule.name,
        slots=slots,
        update_batch=slots,
        max_tokens=engine.max_tokens,
        device="cpu",
        decoded=lambda: decoded,
        seconds=time.monotonic,
        figures=lambda: meter.run,
    )
    drawn = []
    with drawn_view(source) as view:
        for number, event in enumerate(events):
            if isinstance(event, Finish | Harvest):
                decoded = event.engine_decoded
            meter(event)
            view(event)
            if number % EVENTS_PER_FRAME == 0 and number > slots:
                view.advance(f"after {number} events", number / len(events))
                drawn.append(cpu_seconds(view.refresh))
    with drawn_view(source) as view:
        seconds = cpu_seconds(lambda: tell_all(view, events))
    return Frames(
        slots=slots,
        frame_milliseconds=median(drawn) * 1e3,
        frame_milliseconds_most=max(drawn) * 1e3,
        event_microseconds=seconds / len(events) * 1e6,
    )


@contextmanager
def drawn_view(source: Source) -> Iterator[LiveView]:
    """A view of the source that draws on demand."""
    with terminal() as writer, os.fdopen(os.dup(writer), "w") as file:
        console = Console(file=file, force_terminal=True, color_system="truecolor")
        console.size = ConsoleDimensions(WIDTH, HEIGHT)
        with LiveView(console, seconds_per_frame=None) as view:
            view.watch(source)
            yield view


def tell_all(view: LiveView, events: list[Event]) -> None:
    """The calls of a run to the view."""
    for event in events:
        view(event)


def cpu_seconds(work: Callable[[], None]) -> float:
    """CPU seconds of this thread."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def ratios(found: list[tuple[Run, Run]]) -> dict[str, list[float]]:
    """Ratios with over without the view, per pair."""
    return {
        "seconds": [with_view.seconds / without.seconds for with_view, without in found],
        "cpu_seconds": [w.cpu_seconds / without.cpu_seconds for w, without in found],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short runs, once each")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs (5); 0 for none")
    parser.add_argument("--updates", type=int, default=24, help="updates of each run (24)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("changes", nargs="*", help="other settings of the runs, after --")
    arguments = parser.parse_args()
    most_events = 2_000 if arguments.quick else 20_000
    drawn = [frames(slots, most_events=most_events) for slots in (4, 64, 1024)]
    repeats, updates = (1, 2) if arguments.quick else (arguments.repeats, arguments.updates)
    spent, run = accounted(updates=updates, changes=arguments.changes)
    found = pairs(repeats, updates=updates, changes=arguments.changes)
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    if arguments.json:
        result = {
            "machine": machine,
            "frames": [asdict(f) for f in drawn],
            "accounted": {"view_cpu_seconds": spent, **asdict(run)},
            "with_view": [asdict(run) for run, _ in found],
            "without_view": [asdict(run) for _, run in found],
            "ratios": ratios(found),
        }
        print(json.dumps(result, indent=2))
        return
    print(f"machine: {machine}")
    for f in drawn:
        print(
            f"{f.slots:>5,} slots: {f.frame_milliseconds:.2f} ms a frame (most "
            f"{f.frame_milliseconds_most:.2f}), {f.share:.2%} of a core at {FRAMES_PER_SECOND} "
            f"frames a second; {f.event_microseconds:.1f} us an event"
        )
    print(
        f"accounted: {spent:.2f} s of CPU in the view, {spent / run.seconds:.2%} of the "
        f"{run.seconds:.0f} s that the run took"
    )
    for name, values in ratios(found).items() if found else ():
        print(
            f"{name:<11} with / without the view, {len(values)} pairs: median {median(values):.4f}"
            f" ({min(values):.4f} to {max(values):.4f})"
        )


if __name__ == "__main__":
    main()
