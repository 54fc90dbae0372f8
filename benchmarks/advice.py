"""Predictions of the advice, compared with real runs of the advised schedules.

    python benchmarks/advice.py                        on the CPU, some minutes
    python benchmarks/advice.py --device cuda          on a GPU, with a larger model
    python benchmarks/advice.py --json                 for a script

The same model is trained on the same prompts under several schedules. From the log of each run the
simulator predicts the speed of every other schedule, as `sortedrl report` does for its advice; the
measured speed is shown next to it. Speed is trained tokens per second of the whole run.

The model has random weights, and its answers end at random, one token in a few hundred, so lengths
have a long tail; the learning rate is too small to change them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sortedrl.config.algorithm import Optimisation
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.config.train import PassSettings, Saving, TrainSettings
from sortedrl.core.events import Event, read_events
from sortedrl.core.meter import measure
from sortedrl.models.tiny import TinySettings, tiny_model, tiny_tokenizer
from sortedrl.report.advice.diagnosis import diagnose
from sortedrl.report.advice.simulation import fitted_run, observed_answers, simulated
from sortedrl.runs.start import train
from sortedrl.simulate.fit import fit

REWARD = '''"""Any reward will do."""


def length(prompt, response):
    return len(response) % 2
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Sizes of model and runs."""

    hidden: int
    layers: int
    slots: int
    max_tokens: int
    groups: int


SIZES = {
    "cpu": Size(hidden=128, layers=2, slots=32, max_tokens=512, groups=2),
    "cuda": Size(hidden=1024, layers=12, slots=128, max_tokens=2048, groups=2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A prediction from the log of one schedule for another, and the measured result."""

    seen: str
    asked: str
    predicted: float
    """Speedup of the asked schedule over the seen one, both simulated."""
    measured: float


def schedules(size: Size) -> list[Schedule]:
    """The schedules to compare."""
    sync = Schedule(
        strategy="sync",
        mode="on_policy",
        group_prompts=4 * size.slots,
        update_batch=size.slots,
    )
    partial = replace(sync, strategy="sorted", mode="partial")
    return [sync, partial, replace(partial, lookahead=1), replace(partial, mode="coupled")]


def write_world(folder: Path, size: Size) -> None:
    """Write a model whose answers end at random, and a reward."""
    shape = TinySettings(
        hidden=size.hidden, layers=size.layers, heads=size.hidden // 64, context=4 * size.max_tokens
    )
    model, tokenizer = tiny_model(shape), tiny_tokenizer()
    model.save_pretrained(folder / "begun")
    tokenizer.save_pretrained(folder / "begun")
    (folder / "reward.py").write_text(REWARD)


def trained(folder: Path, schedule: Schedule, *, size: Size, device: str) -> list[Event]:
    """Train with the schedule; returns the log."""
    out = folder / schedule.name.replace("/", "-").replace(" ", "")
    count = size.groups * schedule.group_prompts
    settings = TrainSettings(
        model=str(folder / "begun"),
        task=f"knights_knaves:people=4-6,count={count}",
        reward=f"{folder / 'reward.py'}:length",
        out=out,
        device=device,
        threads=1 if device == "cpu" else None,
        schedule=schedule,
        engine=EngineSettings(slots=size.slots, max_tokens=size.max_tokens),
        optimiser=Optimisation(learning_rate=1e-9),
        passes=PassSettings(compiled=False),
        saving=Saving(every=10**6, keep_best=False, answers=0),
    )
    began = time.monotonic()
    train(settings)
    print(f"{schedule.name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return list(read_events(out / "events.jsonl"))


def claims(logs: dict[Schedule, list[Event]], engine: EngineSettings) -> list[Claim]:
    """Predict every schedule from the log of every other one."""
    speeds = {s: measure(log).run.trained_per_second for s, log in logs.items()}
    found = []
    for seen, log in logs.items():
        observed, costs = observed_answers(log), fit(log).costs
        speeds_predicted: dict[Schedule, float] = {}
        for asked in logs:
            world = fitted_run(log, observed, schedule=asked, engine=engine, costs=costs, seed=0)
            forecast = simulated(
                world.simulation, trajectories=observed.num_trained, stop_after=None
            )
            speeds_predicted[asked] = forecast.trained_per_second
        found += [
            Claim(
                seen=seen.name,
                asked=asked.name,
                predicted=speeds_predicted[asked] / speeds_predicted[seen],
                measured=speeds[asked] / speeds[seen],
            )
            for asked in logs
            if asked != seen
        ]
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=tuple(SIZES), default="cpu")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    given = parser.parse_args()
    size = SIZES[given.device]
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        write_world(folder, size)
        logs = {s: trained(folder, s, size=size, device=given.device) for s in schedules(size)}
    found = claims(logs, EngineSettings(slots=size.slots, max_tokens=size.max_tokens))
    if given.json:
        print(json.dumps([asdict(claim) for claim in found], indent=2))
        return
    for schedule, log in logs.items():
        run, advice = measure(log).run, diagnose(log, schedule=schedule)
        print(
            f"{schedule.name}: bubble {run.bubble:.1%}, {run.trained_per_second:,.0f} trained "
            f"tokens/s, mean length {run.mean_length:.0f}\n  {advice.summary}\n  {advice.trust}"
        )
    print(f"\n{'seen':<20}{'asked':<20}{'predicted':>10}{'measured':>10}")
    for claim in found:
        print(f"{claim.seen:<20}{claim.asked:<20}{claim.predicted:>10.2f}{claim.measured:>10.2f}")


if __name__ == "__main__":
    main()
