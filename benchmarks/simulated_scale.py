"""Simulated pools of 8 to 1,024 engines: bubble, goodput, weight sync and the controller's load.

    python benchmarks/simulated_scale.py --json scale.json                 all runs, twelve minutes
    python benchmarks/simulated_scale.py --engines 2 4 --seeds 1 --answers 0    a quick look
    python benchmarks/simulated_scale.py --tables scale.json         what docs/scale-tables.md shows
    python benchmarks/simulated_scale.py --tables scale.json --pictures docs/img

Everything here is simulated: controller, buffer and loop are the real ones, engines and trainer are
arithmetic, and the controller takes no time. Groups have four answers per slot of the pool, except
the `fixed` ones, which are always those of eight engines. Runs of up to 100,000 answers are
repeated with other seeds; tables have their mean, with minimum and maximum in brackets.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

from provenance import markdown_table
from sortedrl.config.schedule import EngineSettings, Schedule, StrategyName
from sortedrl.report.charts.curves import Series
from sortedrl.report.charts.svg import Canvas, PlotArea, series_class
from sortedrl.simulate.compare import row, simulate
from sortedrl.simulate.costs import CostSettings
from sortedrl.simulate.settings import Broadcast, PoolSettings, Simulation

Row = dict[str, Any]
"""The results of one run, by name."""

SLOTS_PER_ENGINE = 32
ANSWERS_PER_SLOT = 4
FIXED_ENGINES = 8
REPEATED_ANSWERS = 100_000
SPEEDS = ("equal", "sigma 0.1", "2 % at half speed")
EQUAL, SPREAD, SLOW = SPEEDS
SCHEDULES: tuple[tuple[StrategyName, int], ...] = (("sync", 0), ("sorted", 0), ("sorted", 2))
MEASURED_EVENTS = (7_200, 19_200)
"""Events per second of one controller with Ray, measured by benchmarks/controller_load.py."""
LOADS = {
    "grown": f"{SLOTS_PER_ENGINE} slots per engine, no lookahead",
    "slots": "more slots per engine",
    "strategies": "lookahead 2",
    "batches 0.5": "half an answer per slot in an update",
    "batches 2": "two answers per slot in an update",
}
ROUND_RATE = 10_000
"""Events per second, rounded from the measurements."""
HARVEST = f"harvest at {ROUND_RATE:,} events per second, seconds"
POOL = PoolSettings(weights_gigabytes=3.1, network_latency_seconds=0.001)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One simulated run and the table it belongs to."""

    table: str
    simulation: Simulation
    speeds: str = EQUAL


def pool_of(engines: int, speeds: str = EQUAL) -> PoolSettings:
    """Machines of one GPU each, connected by a network."""
    return replace(
        POOL,
        engines=engines,
        straggler_sigma=0.1 if speeds == SPREAD else 0.0,
        slow_share=0.02 if speeds == SLOW else 0.0,
    )


def world(
    pool: PoolSettings,
    *,
    answers: int = 0,
    groups: int = 3,
    slots: int = SLOTS_PER_ENGINE,
    is_fixed: bool = False,
) -> Simulation:
    """A run with about this many answers and at least this many groups."""
    unit = slots * (FIXED_ENGINES if is_fixed else pool.engines)
    group = ANSWERS_PER_SLOT * unit
    return Simulation(
        groups=max(groups, answers // group),
        schedule=Schedule(group_prompts=group, update_batch=unit),
        engine=EngineSettings(slots=slots * pool.engines),
        costs=CostSettings(hardware="h200-qwen-2.5-1.5b"),
        pool=pool,
    )


def cases(engines: Sequence[int], *, answers: int) -> Iterator[Case]:
    """Every run, with its first seed."""
    ways: tuple[Broadcast, ...] = get_args(Broadcast)
    for number, broadcast, gigabytes in product(engines, ways, (3.1, 140.0)):
        pool = replace(pool_of(number), broadcast=broadcast, weights_gigabytes=gigabytes)
        yield Case(table="broadcasts", simulation=world(pool, is_fixed=True))
    for number in sorted({*engines, 2 * engines[0], 4 * engines[0]}):
        simulation = world(pool_of(number), answers=answers // 2, is_fixed=True)
        yield Case(table="fixed", simulation=simulation)
    for slots in (128, 256):
        yield Case(table="slots", simulation=world(pool_of(engines[1]), slots=slots))
    for units in (0.5, 2.0):
        simulation = world(pool_of(engines[1]), answers=answers)
        batch = int(units * simulation.schedule.update_batch)
        schedule = replace(simulation.schedule, update_batch=batch)
        yield Case(table=f"batches {units:g}", simulation=replace(simulation, schedule=schedule))
    for number in engines[1::2]:
        rates = (0.1, 1.0, 10.0) if number == engines[1] else (1.0,)
        for rate, loses in product(rates, (False, True)):
            pool = replace(pool_of(number), failures_per_hour=rate, failures_lose_tokens=loses)
            yield Case(table="failures", simulation=world(pool, answers=answers))
    for number, (strategy, lookahead), speeds in product(engines[1:3], SCHEDULES, (EQUAL, SLOW)):
        simulation = world(pool_of(number, speeds), groups=6)
        schedule = replace(simulation.schedule, strategy=strategy, lookahead=lookahead)
        simulation = replace(simulation, schedule=schedule)
        yield Case(table="strategies", simulation=simulation, speeds=speeds)
    for number, speeds in product(engines, SPEEDS):
        simulation = world(pool_of(number, speeds), answers=answers)
        yield Case(table="grown", simulation=simulation, speeds=speeds)


def repeated(case: Case, *, seeds: int) -> Iterator[Case]:
    """The run with each seed, or only one if it is long."""
    simulation = case.simulation
    answers = simulation.groups * simulation.schedule.group_trajectories
    for seed in range(seeds if answers <= REPEATED_ANSWERS else 1):
        yield replace(case, simulation=replace(simulation, seed=seed))


def simulated(case: Case) -> Row:
    """The numbers of one run."""
    began = time.process_time()
    outcome = simulate(case.simulation)
    simulation, pool = case.simulation, case.simulation.pool
    figures, rounds = outcome.metrics.run, len(outcome.metrics.rounds)
    # Every start ends in a finish or in an interruption.
    interruptions = outcome.trajectory_events // 2 - figures.trajectories
    return row(outcome) | {
        "table": case.table,
        "speeds": case.speeds,
        "seed": simulation.seed,
        "slots": simulation.engine.slots,
        "mean_speed": sum(1 / s for s in pool.slowdowns(simulation.seed)) / pool.engines,
        "failures_per_hour": pool.failures_per_hour,
        "loses_tokens": pool.failures_lose_tokens,
        "broadcast": pool.broadcast,
        "gigabytes": pool.weights_gigabytes,
        "goodput_per_engine": figures.goodput / pool.engines,
        "discarded_share": figures.ledger.discarded / figures.ledger.decoded,
        "round_seconds": figures.seconds / rounds,
        "events_per_round": outcome.trajectory_events / rounds,
        "interruptions_per_round": interruptions / rounds,
        "processor_seconds": time.process_time() - began,
    }


class Results:
    """All rows of a study; numbers are means over the seeds."""

    def __init__(self, rows: Sequence[Row]) -> None:
        """The rows of one execution of this program."""
        self._rows = rows

    def every(self, key: str, **wanted: object) -> list[Any]:
        """A number from each matching run, in order."""
        return [
            found[key]
            for found in self._rows
            if all(found[name] == value for name, value in wanted.items())
        ]

    def mean(self, key: str, **wanted: object) -> float:
        """The mean of a number over matching runs."""
        values = self.every(key, **wanted)
        return float(sum(values) / len(values))

    def share(self, key: str, **wanted: object) -> str:
        """A mean as a percentage."""
        return f"{100 * self.mean(key, **wanted):.1f} %"

    def goodput(self, **wanted: object) -> str:
        """Goodput per GPU: mean, with minimum and maximum if there are several seeds."""
        values = self.every("goodput_per_engine", **wanted)
        spread = f" ({min(values):,.0f} - {max(values):,.0f})" if len(values) > 1 else ""
        return f"{sum(values) / len(values):,.0f}{spread}"

    def lost(self, base: dict[str, object], **wanted: object) -> str:
        """Loss of goodput per GPU relative to `base`."""
        ratio = self.mean("goodput_per_engine", **wanted) / self.mean("goodput_per_engine", **base)
        return f"{100 * (1 - ratio):.1f} %"

    def sizes(self, table: str) -> list[int]:
        """The pools of a table, smallest first."""
        return sorted(set(self.every("engines", table=table)))


def show_grown(results: Results) -> None:
    """Pools whose groups grow with them."""
    rows = []
    for number, speeds in product(results.sizes("grown"), SPEEDS):
        base = {"table": "grown", "engines": number, "speeds": EQUAL}
        of = base | {"speeds": speeds}
        speed = f"{results.mean('mean_speed', **of):.3f}"
        numbers = [results.share("bubble", **of), results.goodput(**of), results.lost(base, **of)]
        share = results.share("hand_over_share", **of)
        rows.append([f"{number:,}", speeds, speed, *numbers, share])
    heads = ["engines", "speeds", "mean speed", "bubble", "goodput per GPU", "goodput lost"]
    print(markdown_table([*heads, "weight sync"], rows), end="\n\n")


def show_fixed(results: Results) -> None:
    """Pools with fixed groups."""
    rows = []
    for number in results.sizes("fixed"):
        of = {"table": "fixed", "engines": number}
        pool = f"{results.mean('goodput', **of):,.0f}"
        shares = [results.share(key, **of) for key in ("bubble", "hand_over_share")]
        rows.append([f"{number:,}", shares[0], results.goodput(**of), pool, shares[1]])
    print(
        markdown_table(
            ["engines", "bubble", "goodput per GPU", "goodput of the pool", "weight sync"], rows
        ),
        end="\n\n",
    )


def show_strategies(results: Results) -> None:
    """The cost of slow GPUs under each schedule."""
    rows = []
    for number, (strategy, lookahead) in product(results.sizes("strategies"), SCHEDULES):
        of = dict(table="strategies", engines=number, strategy=strategy, lookahead=lookahead)
        equal, slow = of | {"speeds": EQUAL}, of | {"speeds": SLOW}
        name = results.every("name", **equal)[0]
        shares = [results.share("bubble", **one) for one in (equal, slow)]
        goodputs = [results.goodput(**one) for one in (equal, slow)]
        rows.append([f"{number:,}", name, *shares, *goodputs, results.lost(equal, **slow)])
    heads = [f"{what}, {speeds}" for what in ("bubble", "goodput") for speeds in (EQUAL, SLOW)]
    print(markdown_table(["engines", "schedule", *heads, "goodput lost"], rows), end="\n\n")


def show_failures(results: Results) -> None:
    """The cost of failures, with and without token loss."""
    rows = []
    for number in results.sizes("failures"):
        base = {"table": "grown", "engines": number, "speeds": EQUAL}
        rates = sorted(set(results.every("failures_per_hour", table="failures", engines=number)))
        for rate, loses in product(rates, (False, True)):
            of = dict(table="failures", engines=number, failures_per_hour=rate, loses_tokens=loses)
            shares = [results.share(key, **of) for key in ("bubble", "discarded_share")]
            tokens = "lost" if loses else "kept"
            numbers = [shares[0], results.goodput(**of), results.lost(base, **of), shares[1]]
            rows.append([f"{number:,}", f"{rate:g}", tokens, *numbers])
    heads = ["engines", "failures per engine and hour", "tokens of a failed engine", "bubble"]
    print(
        markdown_table([*heads, "goodput per GPU", "goodput lost", "discarded tokens"], rows),
        end="\n\n",
    )


def show_broadcasts(results: Results) -> None:
    """Share of the time spent in weight sync."""
    ways: tuple[Broadcast, ...] = get_args(Broadcast)
    pairs = list(product(sorted(set(results.every("gigabytes", table="broadcasts"))), ways))
    rows = []
    for number in results.sizes("broadcasts"):
        of = {"table": "broadcasts", "engines": number}
        shares = [
            results.share("hand_over_share", gigabytes=size, broadcast=way, **of)
            for size, way in pairs
        ]
        rows.append([f"{number:,}", *shares])
    print(
        markdown_table(["engines", *(f"{size:g} GB, {way}" for size, way in pairs)], rows),
        end="\n\n",
    )


def show_load(results: Results) -> None:
    """The load of the controller, by the slots of the pool."""
    rows = []
    for of in load_rows(results):
        number, slots = of["engines"], of["slots"]
        rate = results.mean("events_per_second", **of)
        interruptions = results.mean("interruptions_per_round", **of)
        # At a harvest all running answers are interrupted, and then started again.
        harvest = 2 * interruptions / ROUND_RATE
        seconds = f"{results.mean('round_seconds', **of):.1f}"
        load = [f"{rate:,.0f}", f"{rate / slots:.2f}", f"{interruptions:,.0f}"]
        names = [f"{number:,}", LOADS[of["table"]], f"{slots:,}", results.goodput(**of)]
        rows.append([*names, *load, seconds, f"{harvest:.2f}"])
    heads = ["engines", "runs", "slots", "goodput per GPU", "events per second"]
    more = ["per slot and second", "interruptions in a round", "seconds of a round", HARVEST]
    print(markdown_table([*heads, *more], rows), end="\n\n")


def load_rows(results: Results) -> list[Row]:
    """The runs with equal engines for the controller's load, table by table."""
    return [
        {"table": table, "engines": number, "slots": slots, "speeds": EQUAL, "lookahead": lookahead}
        for table, lookahead in ((name, 2 if name == "strategies" else 0) for name in LOADS)
        for number in results.sizes(table)
        for slots in sorted(set(results.every("slots", table=table, engines=number)))
    ]


def goodput_picture(results: Results) -> str:
    """Goodput per GPU by the size of the pool."""

    def line(name: str, **of: object) -> Series:
        sizes = sorted(set(results.every("engines", **of)))
        goodputs = [results.mean("goodput_per_engine", engines=size, **of) for size in sizes]
        return Series(name=name, points=tuple(zip(sizes, goodputs, strict=True)))

    ahead = {"table": "strategies", "strategy": "sorted", "lookahead": 2}
    lines = [
        line("equal speeds", table="grown", speeds=EQUAL),
        line(SPREAD, table="grown", speeds=SPREAD),
        line(SLOW, table="grown", speeds=SLOW),
        line("equal, lookahead 2", speeds=EQUAL, **ahead),
        line(f"{SLOW}, lookahead 2", speeds=SLOW, **ahead),
        line("equal, groups of 8 engines", table="fixed"),
    ]
    title = "Simulated goodput per GPU, tokens per second"
    return picture(lines, title=title, x_label="engines", heights=range(0, 8_001, 2_000))


def load_picture(results: Results) -> str:
    """Events per second by the slots of the pool, and the measured limit of one controller."""
    points: dict[str, list[tuple[float, float]]] = {}
    for of in load_rows(results):
        if of["table"].startswith("batches"):
            continue
        found = (of["slots"], results.mean("events_per_second", **of))
        points.setdefault(LOADS[of["table"]], []).append(found)
    lines = [Series(name=name, points=tuple(sorted(points[name]))) for name in points]
    return picture(
        lines,
        title="Events per second of a pool's controller (simulated)",
        x_label="slots of the pool",
        heights=[10**power for power in range(1, 6)],
        band=MEASURED_EVENTS,
    )


def picture(
    lines: Sequence[Series],
    *,
    title: str,
    x_label: str,
    heights: Sequence[int],
    band: tuple[int, int] | None = None,
) -> str:
    """Lines over doubling sizes; a y axis that starts at 0 is linear, otherwise logarithmic."""
    rows = (len(lines) + 2) // 3
    frame = PlotArea(left=78, right=780, top=58 + 20 * rows, floor=308 + 20 * rows)
    canvas = Canvas(860, frame.floor + 50, label=title)
    canvas.text(frame.left, 30, content=title, css="title")
    sizes = sorted({int(size) for line in lines for size, _ in line.points})

    def share(value: float, ends: Sequence[int]) -> float:
        low, high = ends[0], ends[-1]
        return math.log(value / low) / math.log(high / low) if low else value / high

    if band is not None:
        low, high = (frame.y(share(rate, heights)) for rate in band)
        canvas.rect(frame.left, high, width=frame.right - frame.left, height=low - high, css="idle")
        words = "measured limit of one controller process: {:,} to {:,}".format(*band)
        canvas.text(frame.left + 10, high - 6, content=words, css="small")
    frame.draw_heights(canvas, [(share(mark, heights), f"{mark:,}") for mark in heights])
    frame.draw_places(canvas, [(share(size, sizes), f"{size:,}") for size in sizes], label=x_label)
    for place, line in reversed(list(enumerate(lines))):
        left, base = frame.left + 260 * (place % 3), 54 + 20 * (place // 3)
        canvas.rect(left, base - 9, width=14, height=10, css=series_class(place))
        canvas.text(left + 20, base, content=line.name, css="muted")
        dots = [(frame.x(share(a, sizes)), frame.y(share(b, heights))) for a, b in line.points]
        canvas.path(dots, css=f"{series_class(place)} curve")
        for (x, y), (size, value) in zip(dots, line.points, strict=True):
            label = f"{line.name}: {value:,.0f} at {size:,.0f}"
            canvas.circle(x, y, radius=3.5, css=series_class(place), title=label)
        (x, y), (_, value) = dots[-1], line.points[-1]
        canvas.text(x + 9, y + 4, content=f"{value:,.0f}", css="head")
    return canvas.svg()


TABLES = (show_grown, show_fixed, show_strategies, show_failures, show_broadcasts, show_load)


def run_all(engines: Sequence[int], *, answers: int, seeds: int, file: Path | None) -> list[Row]:
    """Simulate everything; each row is written as soon as it is complete."""
    # Nothing here has cycles, and collecting a million trajectories takes a while.
    gc.disable()
    rows: list[Row] = []
    for case in cases(engines, answers=answers):
        for one in repeated(case, seeds=seeds):
            rows.append(simulated(one))
            if file is not None:
                file.write_text("".join(json.dumps(done) + "\n" for done in rows))
    return rows


def main() -> None:
    """Simulate, or read, and print."""
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--engines", nargs="+", type=int, default=[8, 64, 256, 1024])
    parser.add_argument("--answers", type=int, default=40_000, help="minimum answers of a run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the results of each run here")
    parser.add_argument("--tables", type=Path, help="print the tables of such a file")
    parser.add_argument("--pictures", type=Path, help="write the charts to this folder")
    given = parser.parse_args()
    if len(given.engines) < 2 or given.engines != sorted(set(given.engines)):
        parser.error(f"--engines must be two pools or more, smallest first, got {given.engines}")
    if given.tables is not None:
        rows = [json.loads(line) for line in given.tables.read_text().splitlines()]
    else:
        rows = run_all(given.engines, answers=given.answers, seeds=given.seeds, file=given.json)
    results = Results(rows)
    for table in TABLES:
        table(results)
    if given.pictures is not None:
        (given.pictures / "scale-goodput.svg").write_text(goodput_picture(results))
        (given.pictures / "scale-load.svg").write_text(load_picture(results))


if __name__ == "__main__":
    main()
