"""Speed of the scheduler: buffer, controller, loop, journal and meter, on one core.

    python benchmarks/scheduler.py                 everything, about three minutes
    python benchmarks/scheduler.py --quick         a hundredth of it
    python benchmarks/scheduler.py --json          for a script

Three questions. How long do 100,000 and 1,000,000 trajectories take from load to training
(sorted/partial, the paper's lengths, 128 slots, measured with its meter on)? What does one event
cost when 10^3 to 10^6 trajectories wait? How much memory does a waiting trajectory take?
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import tracemalloc
from dataclasses import dataclass, replace

from sortedrl.config.schedule import Schedule
from sortedrl.core.buffer import Buffer, Feed, open_group
from sortedrl.core.controller import Controller
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.settings import PRESETS
from sortedrl.types import Prompt, Segment, Trajectory

SLOTS = 128
EVENTS = 60_000
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Run:
    """A whole simulated run."""

    trajectories: int
    seconds: float

    @property
    def microseconds_each(self) -> float:
        """Per trajectory."""
        return self.seconds / self.trajectories * 1e6


def whole_run(trajectories: int) -> Run:
    """Seconds for that many trajectories through sorted/partial."""
    simulation = replace(PRESETS["paper"](), prompts=trajectories)
    total, began = 0, time.perf_counter()

    def show(done: int) -> None:
        nonlocal total
        if done - total >= trajectories // 10:
            total = done
            print(f"  {done:,} of {trajectories:,}", file=sys.stderr)

    simulate(simulation, on_update=show)
    return Run(trajectories, time.perf_counter() - began)


def waiting(count: int) -> list[Trajectory]:
    """A group of fresh trajectories."""
    prompts = [Prompt(id=number, tokens=range(256)) for number in range(count)]
    return open_group(prompts, group=0, samples_per_prompt=1, seed=0)


def event_microseconds(count: int) -> float:
    """Mean cost of an event (start, finish, interrupt) with about `count` waiting trajectories.

    One in four is interrupted and put back, so that the heap of returned trajectories is used too.
    """
    schedule = Schedule(group_prompts=count + EVENTS, update_batch=SLOTS)
    buffer, controller = Buffer(), Controller(schedule)
    buffer.load(waiting(count + EVENTS))
    tokens = Segment(range(1000), range(1000), 0)
    half = buffer.start(count // 2, feed=Feed.FRESH_ONLY)
    for trajectory in half:
        buffer.put_back(controller.mode.interrupted(replace(trajectory, segments=(tokens,))))
    events, began = 0, time.perf_counter()
    while events < EVENTS:
        plan = controller.plan(buffer, is_exhausted=True)
        free = SLOTS - buffer.num_running
        started = buffer.start(controller.to_start(buffer, plan, free_slots=free), feed=plan.feed)
        for place, trajectory in enumerate(started):
            if place % 4:
                done = replace(trajectory, segments=(tokens,), finish_reason="stop")
                buffer.finish(done)
            else:
                buffer.put_back(controller.mode.interrupted(trajectory))
            controller.should_harvest(buffer, plan, is_exhausted=True)
        events += 2 * len(started)
        if controller.should_harvest(buffer, plan, is_exhausted=True):
            for keys in controller.batches(buffer):
                events += len(buffer.take(keys))
    return (time.perf_counter() - began) / events * 1e6


def waiting_bytes(count: int) -> float:
    """Memory of one waiting trajectory, prompt included (its tokens shared)."""
    tracemalloc.start()
    buffer = Buffer()
    buffer.load(waiting(count))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / count


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a hundredth of the trajectories")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    shrink = 100 if arguments.quick else 1
    runs = [whole_run(count // shrink) for count in (100_000, 1_000_000)]
    costs = {
        10**power: min(event_microseconds(10**power) for _ in range(REPEATS))
        for power in ((3, 4) if arguments.quick else (3, 4, 5, 6))
    }
    memory = waiting_bytes(100_000 // shrink)
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    if arguments.json:
        result = {
            "machine": machine,
            "runs": [{"trajectories": r.trajectories, "seconds": r.seconds} for r in runs],
            "event_microseconds": costs,
            "waiting_bytes": memory,
        }
        print(json.dumps(result, indent=2))
        return
    print(f"machine: {machine}")
    for run in runs:
        print(
            f"{run.trajectories:>9,} trajectories, sorted/partial: {run.seconds:6.1f} s, "
            f"{run.microseconds_each:.0f} us each"
        )
    for count, cost in costs.items():
        print(f"{count:>9,} waiting: {cost:5.2f} us per event (best of {REPEATS})")
    print(f"memory per waiting trajectory: {memory:.0f} bytes")


if __name__ == "__main__":
    main()
