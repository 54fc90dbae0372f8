"""Time of a weight sync from the trainer to the rollout workers, for each of the three transports.

    python benchmarks/weight_sync.py                            64 and 512 MB, 2 workers
    python benchmarks/weight_sync.py --megabytes 64 --repeats 9 --json weight_sync.json

Worker pool, workers and Ray are the real ones; the engine only copies the weights into its own
tensors, as engines do. The trainer is in the controller's process, as without ranks. Transports
alternate, so that noise affects all of them. The first sync of each is not counted: it forms the
process group, and warms up the object store. All seconds are measured on one machine, where workers
read the object store and files from its memory, without a network.
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
from sortedrl.cluster.placement import BundlePlacement, placement_plan
from sortedrl.cluster.weight_sync import SyncReport
from sortedrl.cluster.weight_transport import LocalSource
from sortedrl.cluster.worker_pool import WorkerPool
from sortedrl.config.cluster import Cluster, WeightTransport
from sortedrl.engines.generation import RolloutEngine
from sortedrl.types import Weights

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from simulated_worker import SimulatedFactory

_MEGABYTE = 1 << 20
_TENSOR_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyingFactory:
    """An engine that has weights but generates nothing."""

    def engine(self) -> RolloutEngine:
        """A simulated engine with its own tensors."""
        torch.set_num_threads(1)
        engine = SimulatedFactory(slots=1, max_tokens=1).engine()
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
    """The weight syncs of one size with one transport."""

    megabytes: int
    transport: WeightTransport
    buckets: int
    samples: Sequence[SyncReport]

    def seconds(self, field: str) -> list[float]:
        """One of the times, over all syncs."""
        return [asdict(sample)[field] for sample in self.samples]


def weights_of(megabytes: int) -> Mapping[str, torch.Tensor]:
    """bfloat16 tensors of 16 MB each."""
    count = max(1, megabytes * _MEGABYTE // _TENSOR_BYTES)
    each = megabytes * _MEGABYTE // count // 2
    return {f"layer.{number}": torch.randn(each).bfloat16() for number in range(count)}


@contextmanager
def pool_of(cluster: Cluster, folder: Path, reports: list[SyncReport]) -> Iterator[WorkerPool]:
    """Workers that receive weights through one transport."""

    def refuse(reason: str) -> None:
        raise SystemExit(f"a transport failed, so nothing is compared: {reason}")

    placement = BundlePlacement(placement_plan(cluster), seconds=cluster.start_seconds)
    pool = WorkerPool(
        cluster,
        CopyingFactory(),
        placement=placement,
        source=LocalSource(),
        tell=refuse,
        report=reports.append,
        weight_sync_folder=folder,
    )
    try:
        yield pool
    finally:
        pool.close()
        placement.remove()


def measured(cluster: Cluster, sizes: Sequence[int], *, repeats: int) -> list[Result]:
    """All transports and sizes, alternating transports."""
    results = []
    version = 0
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        reports: list[SyncReport] = []
        pools = {
            transport: opened.enter_context(
                pool_of(replace(cluster, weight_sync=transport), folder, reports)
            )
            for transport in get_args(WeightTransport)
        }
        for megabytes in sizes:
            tensors = weights_of(megabytes)
            taken: dict[WeightTransport, list[SyncReport]] = {name: [] for name in pools}
            for _ in range(1 + repeats):
                version += 1
                for transport, pool in pools.items():
                    pool.load_weights(Weights(version, tensors))
                    taken[transport].append(reports[-1])
            results += [
                Result(
                    megabytes=megabytes,
                    transport=transport,
                    buckets=samples[0].buckets,
                    samples=samples[1:],
                )
                for transport, samples in taken.items()
            ]
    return results


def table(results: Sequence[Result]) -> str:
    """Medians, with minimum and maximum; the rate is that of one copy of the weights."""
    lines = [
        "   MB  transport buckets  seconds in all        source  worker: fetch   load     MB/s",
    ]
    for result in results:
        every = result.seconds("seconds")
        lines.append(
            f"{result.megabytes:5d}  {result.transport:9s} {result.buckets:7d}  "
            f"{median(every):6.3f} ({min(every):.3f} to {max(every):.3f})  "
            f"{median(result.seconds('put_seconds')):6.3f}         "
            f"{median(result.seconds('fetch_seconds')):6.3f} "
            f"{median(result.seconds('load_seconds')):6.3f}  "
            f"{result.megabytes / median(every):7.0f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
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
        # Two copies: the next weights are stored before Ray has released the last ones.
        object_store_gib=max(0.25, 3 * max(given.megabytes) / 1024),
    )
    # Workers import the factory from this file, and get its folder only through the environment.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    # Room for the workers of all three transports.
    with connected(replace(cluster, rollout_workers=3 * given.workers), tell=print):
        import weight_sync

        results = weight_sync.measured(cluster, given.megabytes, repeats=given.repeats)
    print(
        f"{given.workers} workers, {given.repeats} weight syncs each, {os.cpu_count()} CPUs, torch "
        f"{torch.__version__}, python {platform.python_version()}; median (fastest to slowest)"
    )
    print(table(results))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
