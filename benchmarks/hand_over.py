"""How long weights take from the trainer to the rollout workers, by each of the three ways.

    python benchmarks/hand_over.py                            64 and 512 MB, 2 workers
    python benchmarks/hand_over.py --megabytes 64 --repeats 9 --json hand_over.json

Fleet, workers and Ray are the real ones; in place of an engine there is one that only copies the
weights into tensors of its own, as engines do. The trainer is in the process of the controller, as
without ranks. The ways take turns, so that noise hits all of them. The first hand-over by each way
is not counted: it forms the group, and warms the object store. All seconds are measured, on one
machine, where workers read the object store and files from its memory; a network is not in them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import get_args

import torch

from sortedrl.cluster.connection import connected
from sortedrl.cluster.fleet import Fleet
from sortedrl.cluster.placement import Placement, blueprint
from sortedrl.cluster.weight_sync import HandOver
from sortedrl.cluster.worker import SimulatedRecipe
from sortedrl.config.cluster import Cluster, HandOverWay
from sortedrl.engines.generation import RolloutEngine
from sortedrl.types import Weights

_MEGABYTE = 1 << 20
_TENSOR_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyingRecipe:
    """An engine that has weights, and writes nothing."""

    @property
    def has_weights(self) -> bool:
        """It is given them."""
        return True

    def engine(self) -> RolloutEngine:
        """A simulated engine with tensors of its own."""
        torch.set_num_threads(1)
        engine = SimulatedRecipe(slots=1, max_tokens=1).engine()
        own: dict[str, torch.Tensor] = {}
        take_over = engine.load_weights

        def load_weights(weights: Weights) -> None:
            take_over(weights)
            for name, tensor in (weights.tensors or {}).items():
                assert isinstance(tensor, torch.Tensor), "weights are tensors"
                if name not in own or own[name].shape != tensor.shape:
                    own[name] = torch.empty_like(tensor)
                own[name].copy_(tensor)

        engine.load_weights = load_weights  # type: ignore[method-assign]
        return engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The hand-overs of one size by one way."""

    megabytes: int
    way: HandOverWay
    buckets: int
    samples: Sequence[HandOver]

    def seconds(self, field: str) -> list[float]:
        """One of the times, of all hand-overs."""
        return [asdict(sample)[field] for sample in self.samples]


def weights_of(megabytes: int) -> Mapping[str, torch.Tensor]:
    """Tensors of bfloat16, of 16 MB each."""
    count = max(1, megabytes * _MEGABYTE // _TENSOR_BYTES)
    each = megabytes * _MEGABYTE // count // 2
    return {f"layer.{number}": torch.randn(each).bfloat16() for number in range(count)}


@contextmanager
def fleet_of(cluster: Cluster, folder: Path, told: list[HandOver]) -> Iterator[Fleet]:
    """Workers that take weights by one way."""

    def warn(words: str) -> None:
        raise SystemExit(f"a way failed, so nothing is compared: {words}")

    placement = Placement(blueprint(cluster), seconds=cluster.start_seconds)
    fleet = Fleet(
        cluster,
        CopyingRecipe(),
        placement=placement,
        warn=warn,
        report=told.append,
        hand_over_folder=folder,
    )
    try:
        yield fleet
    finally:
        fleet.close()
        placement.remove()


def measured(cluster: Cluster, sizes: Sequence[int], *, repeats: int) -> list[Result]:
    """All ways and sizes; the ways take turns."""
    results = []
    version = 0
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        told: list[HandOver] = []
        fleets = {
            way: opened.enter_context(fleet_of(replace(cluster, hand_over=way), folder, told))
            for way in get_args(HandOverWay)
        }
        for megabytes in sizes:
            tensors = weights_of(megabytes)
            taken: dict[HandOverWay, list[HandOver]] = {way: [] for way in fleets}
            for _ in range(1 + repeats):
                version += 1
                for way, fleet in fleets.items():
                    fleet.pool.load_weights(Weights(version, tensors))
                    taken[way].append(told[-1])
            results += [
                Result(
                    megabytes=megabytes, way=way, buckets=samples[0].buckets, samples=samples[1:]
                )
                for way, samples in taken.items()
            ]
    return results


def table(results: Sequence[Result]) -> str:
    """Medians, with the fastest and the slowest; the rate is that of one copy of the weights."""
    lines = [
        "   MB  way      buckets  seconds in all        source  worker: fetch   load     MB/s",
    ]
    for result in results:
        every = result.seconds("seconds")
        lines.append(
            f"{result.megabytes:5d}  {result.way:8s} {result.buckets:6d}  "
            f"{median(every):6.3f} ({min(every):.3f} to {max(every):.3f})  "
            f"{median(result.seconds('put_seconds')):6.3f}         "
            f"{median(result.seconds('fetch_seconds')):6.3f} "
            f"{median(result.seconds('load_seconds')):6.3f}  "
            f"{result.megabytes / median(every):7.0f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, and print what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    cluster = Cluster(
        rollout_workers=given.workers,
        trainer_ranks=0,
        dashboard=False,
        # Two copies: the next weights are put before Ray has let go of the last ones.
        object_store_gib=max(0.25, 3 * max(given.megabytes) / 1024),
    )
    # Workers import the recipe of this file, and know its folder only from the environment.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    # Room for the workers of all three ways.
    with connected(replace(cluster, rollout_workers=3 * given.workers), tell=print):
        import hand_over

        results = hand_over.measured(cluster, given.megabytes, repeats=given.repeats)
    print(
        f"{given.workers} workers, {given.repeats} hand-overs each, {os.cpu_count()} CPUs, torch "
        f"{torch.__version__}, python {platform.python_version()}; median (fastest to slowest)"
    )
    print(table(results))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
