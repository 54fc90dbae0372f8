"""The load of one controller: trajectory events per second, and memory.

    python benchmarks/controller_load.py                      two workers, a minute
    python benchmarks/controller_load.py --workers 8 --slots 256 --answers 100000
    python benchmarks/controller_load.py --alone              the same loop without Ray
    python benchmarks/controller_load.py --held 1000000       memory of this many trajectories

Loop, buffer, controller, pool and Ray actors are the real ones. Engines inside the actors are
simulated and take no time, so the controller is the bottleneck; with --pause each engine finishes
one answer per that many seconds, reported one by one. A trajectory event is a start, a finish or
an interruption. CPU seconds are those of the controller's process including Ray's threads: on a
busy machine they are more reliable than wall time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from sortedrl.cluster.connection import connected
from sortedrl.cluster.placement import BundlePlacement, placement_plan
from sortedrl.config.cluster import Cluster
from sortedrl.config.schedule import Schedule
from sortedrl.core.buffer import Buffer, open_group
from sortedrl.core.clock import WallClock
from sortedrl.core.controller import Controller
from sortedrl.core.events import Event
from sortedrl.core.loop import Loop
from sortedrl.core.protocols import Engine
from sortedrl.core.recorder import Journal
from sortedrl.simulate.engine import SimulatedPrompts, SimulatedScorer
from sortedrl.simulate.lengths import LengthSettings
from sortedrl.types import TrainBatch, Weights

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from simulated_worker import SimulatedFactory

_EVENTS = ("start", "finish", "interrupt")
_MAX_TOKENS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load of the controller in one run."""

    workers: int
    slots: int
    answers: int
    events: int
    updates: int
    wall_seconds: float
    controller_cpu_seconds: float
    resident_mib: float

    @property
    def events_per_second(self) -> float:
        """Trajectory events per second of wall time."""
        return self.events / self.wall_seconds

    @property
    def events_per_cpu_second(self) -> float:
        """Trajectory events per CPU second of the controller."""
        return self.events / self.controller_cpu_seconds


class CountingTrainer:
    """Only counts versions: updates are not measured."""

    def __init__(self) -> None:
        """At version 0."""
        self.version = 0

    def update(self, batch: TrainBatch) -> None:
        """Increment the version."""
        self.version += 1

    def weights(self) -> Weights:
        """A version without tensors."""
        return Weights(self.version)


def run(engine: Engine, given: argparse.Namespace) -> Load:
    """Train on all answers once, and count events."""
    kinds: Counter[str] = Counter()

    def record(event: Event) -> None:
        kinds[event.kind] += 1

    schedule = Schedule(group_prompts=given.group, update_batch=given.batch)
    loop = Loop(
        prompts=SimulatedPrompts(given.answers, prompt_tokens=256),
        buffer=Buffer(unit_size=schedule.unit_size),
        controller=Controller(schedule),
        engine=engine,
        scorer=SimulatedScorer(),
        trainer=CountingTrainer(),
        journal=Journal(record, clock=WallClock()),
        seed=0,
        queue=given.spare * given.workers,
    )
    wall, processor = time.perf_counter(), time.process_time()
    trained = sum(len(batch.trajectories) for batch in loop.run())
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    assert trained == given.answers
    return Load(
        workers=given.workers,
        slots=given.slots,
        answers=given.answers,
        events=sum(kinds[kind] for kind in _EVENTS),
        updates=kinds["update"],
        wall_seconds=wall,
        controller_cpu_seconds=processor,
        resident_mib=resident_bytes() / (1 << 20),
    )


@contextlib.contextmanager
def opened(given: argparse.Namespace) -> Iterator[Engine]:
    """The workers behind one engine, or one engine in this process."""
    factory = SimulatedFactory(
        slots=given.slots,
        max_tokens=_MAX_TOKENS,
        lengths=LengthSettings(median=given.median, sigma=1.0),
        pause_seconds=given.pause,
    )
    if given.alone:
        yield factory.engine()
        return
    cluster = Cluster(
        rollout_workers=given.workers, trainer_ranks=0, dashboard=False, object_store_gib=0.2
    )
    from sortedrl.cluster.worker_pool import WorkerPool

    # Workers import the simulated engine and get its folder only through the environment.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with connected(cluster, tell=tell):
        placement = BundlePlacement(placement_plan(cluster), seconds=120)
        pool = WorkerPool(
            cluster,
            factory,
            placement=placement,
            source=None,
            tell=tell,
            report=lambda _: None,
            spare=given.spare,
        )
        try:
            yield pool
        finally:
            pool.close()


def hold(count: int, *, samples_per_prompt: int) -> dict[str, float]:
    """Memory and build time of a buffer with this many waiting trajectories."""
    buffer, before, start = Buffer(unit_size=1), resident_bytes(), time.perf_counter()
    prompts = SimulatedPrompts(count // samples_per_prompt, prompt_tokens=256)
    while not prompts.is_exhausted:
        buffer.load(
            open_group(
                prompts.take(4096),
                group=buffer.next_group,
                samples_per_prompt=samples_per_prompt,
                seed=0,
            )
        )
    seconds, grown = time.perf_counter() - start, resident_bytes() - before
    return {
        "trajectories": buffer.num_waiting,
        "mib": grown / (1 << 20),
        "bytes_each": grown / buffer.num_waiting,
        "seconds": seconds,
    }


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def tell(line: str) -> None:
    """Print a status line to standard error."""
    print(line, file=sys.stderr, flush=True)


def parsed() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slots", type=int, default=256, help="slots of each worker")
    parser.add_argument("--answers", type=int, default=20_000)
    parser.add_argument("--group", type=int, default=4096, help="prompts of a group")
    parser.add_argument("--batch", type=int, default=1024, help="answers of an update")
    parser.add_argument("--median", type=float, default=1000.0, help="tokens of an answer")
    parser.add_argument("--spare", type=int, default=0, help="answers that queue inside a worker")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of an engine step")
    parser.add_argument("--alone", action="store_true", help="one engine in this process, no Ray")
    parser.add_argument("--held", type=int, default=0, help="trajectories in a buffer, no loop")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    given = parsed()
    about = {
        "command": sys.argv,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
    }
    rows: list[dict[str, object]] = []
    if given.held:
        rows.append({**hold(given.held, samples_per_prompt=8)})
        print(rows[-1])
    else:
        with opened(given) as engine:
            for _ in range(given.repeats):
                engine.load_weights(Weights(0))
                load = run(engine, given)
                rows.append(asdict(load))
                print(
                    f"{load.events:,} events in {load.wall_seconds:.1f} s: "
                    f"{load.events_per_second:,.0f}/s of wall time, "
                    f"{load.events_per_cpu_second:,.0f} per CPU second of the controller; "
                    f"{load.resident_mib:,.0f} MiB"
                )
    if given.json is not None:
        given.json.write_text(json.dumps(about | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
