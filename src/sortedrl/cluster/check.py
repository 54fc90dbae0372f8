"""Checks whether a cluster has what a run needs: placement, versions, free memory, an all-reduce.

Everything that a run would place is placed, tried, and released again. A probe on each machine
reports its versions and its memory.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sortedrl.cluster.placement import (
    BundlePlacement,
    BundleShare,
    Node,
    controller_node,
    free_address,
    listed,
    living_nodes,
    placement_plan,
)
from sortedrl.config.cluster import Cluster
from sortedrl.engines.installed import Device, devices, package_version
from sortedrl.errors import EngineError

Backend = Literal["gloo", "nccl"]
_TRIAL_BYTES = 4 << 20
_TRIAL_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The versions and the free memory of a machine."""

    host: str
    versions: Mapping[str, str | None]
    """Of sortedrl, python, ray, torch; `None` for what is not installed."""
    free_bytes: int | None
    """Memory available to processes; `None` where the system does not report it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialGroup:
    """The process group of the trial all-reduce."""

    address: str
    port: int
    size: int
    backend: Backend


def machine() -> Machine:
    """This machine."""
    return Machine(
        host=socket.gethostname(),
        versions={
            "sortedrl": import_module("sortedrl").__version__,
            "python": platform.python_version(),
            "ray": package_version("ray"),
            "torch": package_version("torch"),
        },
        free_bytes=_free_bytes(Path("/proc/meminfo")),
    )


class Probe:
    """An actor in one bundle of a run, with the resources that a worker or a rank would have."""

    def host(self) -> str:
        """The machine it was placed on."""
        return socket.gethostname()

    def devices(self) -> list[Device]:
        """The CPU, and the GPUs that were given to it."""
        return devices()

    def address(self) -> tuple[str, int]:
        """An address of this machine that others reach, and a port that is free now."""
        return free_address()

    def all_reduce(self, rank: int, group: TrialGroup) -> float:
        """Sum an array over all ranks; gives the seconds of one all-reduce after the first."""
        import torch
        from torch import distributed

        is_gpu = group.backend == "nccl"
        # Ranks on one machine would take a thread for every core, each of them.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        distributed.init_process_group(
            group.backend,
            init_method=f"tcp://{group.address}:{group.port}",
            rank=rank,
            world_size=group.size,
            timeout=timedelta(seconds=_TRIAL_SECONDS),
        )
        try:
            values = torch.full((_TRIAL_BYTES // 4,), rank + 1.0)
            values = values.cuda() if is_gpu else values
            distributed.all_reduce(values)
            expected = group.size * (group.size + 1) / 2
            if not bool((values == expected).all()):
                raise ArithmeticError(
                    f"the sum over {group.size} ranks must be {expected}, got {values[0].item()}"
                )
            start = perf_counter()
            distributed.all_reduce(values)
            if is_gpu:
                torch.cuda.synchronize()
            return perf_counter() - start
        finally:
            distributed.destroy_process_group()


def _free_bytes(path: Path) -> int | None:
    if not path.exists():
        return None
    rows = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    if "MemAvailable" not in rows:
        return None
    return int(rows["MemAvailable"].split()[0]) << 10


_GIB = 1 << 30
_LEAST_FREE_BYTES = _GIB
_ASK_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    name: str
    is_fine: bool
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """One node, and its answer."""

    address: str
    resources: str
    machine: Machine | None
    """`None` if it did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleReport:
    """One actor of a run: where it was placed, and with which devices."""

    holder: str
    host: str
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of all checks."""

    nodes: tuple[NodeReport, ...]
    bundles: tuple[BundleReport, ...] = ()
    findings: tuple[Finding, ...] = field(default=())

    @property
    def is_fine(self) -> bool:
        """Whether a run can begin."""
        return all(finding.is_fine for finding in self.findings)


def check(cluster: Cluster, *, seconds: float) -> Report:
    """Check the Ray that this process is connected to; placing may take `seconds`."""
    nodes = tuple(_node(node) for node in living_nodes())
    findings = [_versions(nodes), _memory(nodes)]
    bundles: tuple[BundleReport, ...] = ()
    try:
        wanted = placement_plan(cluster, controller=controller_node())
        placement = BundlePlacement(wanted, seconds=seconds)
    except EngineError as error:
        findings.insert(0, Finding(name="placement", is_fine=False, words=str(error)))
        return Report(nodes=nodes, findings=tuple(findings))
    try:
        bundles, found = _probed(cluster, placement)
    finally:
        placement.remove()
    return Report(nodes=nodes, bundles=bundles, findings=(found[0], *findings, *found[1:]))


def _node(node: Node) -> NodeReport:
    strategy = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
    remote: Any = ray.remote
    task = remote(num_cpus=0, max_retries=0)(machine).options(scheduling_strategy=strategy)
    try:
        answer: Machine | None = ray.get(task.remote(), timeout=_ASK_SECONDS)
    except RayError:
        answer = None
    return NodeReport(address=node.address, resources=listed(node.resources), machine=answer)


def _versions(nodes: Sequence[NodeReport]) -> Finding:
    """All nodes must have the versions of the controller."""
    here = machine().versions
    others = [
        f"{node.address} has {name} {version or 'missing'}, the controller {here[name] or 'none'}"
        for node in nodes
        for name, version in _versions_of(node).items()
        if version != here[name]
    ]
    silent = [f"{node.address} does not answer" for node in nodes if node.machine is None]
    same = ", ".join(f"{name} {version}" for name, version in here.items() if version)
    wrong = "; ".join((*silent, *others))
    return Finding(name="versions", is_fine=not wrong, words=wrong or f"{same} on every node")


def _versions_of(node: NodeReport) -> Mapping[str, str | None]:
    return {} if node.machine is None else node.machine.versions


def _memory(nodes: Sequence[NodeReport]) -> Finding:
    free = {
        node.address: node.machine.free_bytes
        for node in nodes
        if node.machine is not None and node.machine.free_bytes is not None
    }
    least = min(free.values(), default=None)
    by_node = ", ".join(f"{size / _GIB:.1f} GiB free on {name}" for name, size in free.items())
    return Finding(
        name="memory",
        is_fine=least is None or least >= _LEAST_FREE_BYTES,
        words=by_node or "no node reports its free memory",
    )


def _probed(
    cluster: Cluster, placement: BundlePlacement
) -> tuple[tuple[BundleReport, ...], list[Finding]]:
    """The bundles with a probe in each, and the results of the probes."""
    plan = placement.plan
    workers = [_probe(claim, placement) for claim in plan.workers]
    ranks = [_probe(claim, placement) for claim in plan.ranks]
    holders = [f"rollout worker {number}" for number in range(len(workers))]
    holders += [f"trainer rank {number}" for number in range(len(ranks))]
    probes = [*workers, *ranks]
    try:
        hosts = ray.get([probe.host.remote() for probe in probes], timeout=_ASK_SECONDS)
        found = ray.get([probe.devices.remote() for probe in probes], timeout=_ASK_SECONDS)
        bundles = tuple(
            BundleReport(holder=holder, host=host, devices=tuple(own))
            for holder, host, own in zip(holders, hosts, found, strict=True)
        )
        placed = Finding(
            name="placement",
            is_fine=True,
            words=f"{cluster.kind}: {listed(plan.total)} in {len(plan.bundles)} bundles placed",
        )
        return bundles, [
            placed,
            _gpu_finding(cluster, bundles),
            _all_reduce_finding(ranks or workers, found),
        ]
    except RayError as error:
        reason = str(error).partition("\n")[0]
        return (), [Finding(name="placement", is_fine=False, words=f"a probe failed: {reason}")]
    finally:
        for probe in probes:
            ray.kill(probe)


def _probe(claim: BundleShare, placement: BundlePlacement) -> Any:  # noqa: ANN401  an actor's handle
    remote: Any = ray.remote
    return (
        remote(Probe)
        .options(
            num_cpus=claim.cpus,
            num_gpus=claim.gpus,
            scheduling_strategy=placement.strategy(claim),
        )
        .remote()
    )


def _gpu_finding(cluster: Cluster, bundles: Sequence[BundleReport]) -> Finding:
    """Where GPUs are reserved, torch must see them."""
    blind = [
        bundle.holder
        for bundle in bundles
        if cluster.gpus_per_worker and not any(device.card for device in bundle.devices)
    ]
    is_cpu = not cluster.gpus_per_worker
    fine = "none requested: the run is on CPUs" if is_cpu else "torch sees those of every bundle"
    return Finding(
        name="GPUs",
        is_fine=not blind,
        words=f"torch sees no GPU in the bundle of {', '.join(blind)}" if blind else fine,
    )


def _all_reduce_finding(probes: Sequence[Any], found: Sequence[Sequence[Device]]) -> Finding:
    """An all-reduce over the ranks of the trainer, or over the workers if there are none."""
    name = "all-reduce"
    if machine().versions["torch"] is None:
        return Finding(name=name, is_fine=True, words="not tried: torch is not installed here")
    if len(probes) < 2:
        return Finding(name=name, is_fine=True, words="not tried: it takes two processes")
    has_gpus = all(any(device.card for device in own) for own in found)
    backend: Backend = "nccl" if has_gpus else "gloo"
    try:
        address, port = ray.get(probes[0].address.remote(), timeout=_ASK_SECONDS)
        group = TrialGroup(address=address, port=port, size=len(probes), backend=backend)
        seconds = ray.get(
            [probe.all_reduce.remote(rank, group) for rank, probe in enumerate(probes)],
            timeout=2 * _ASK_SECONDS,
        )
    except RayError as error:
        reason = str(error).strip().rpartition("\n")[2]
        return Finding(name=name, is_fine=False, words=f"{backend} failed: {reason}")
    slowest = 1e3 * max(seconds)
    return Finding(
        name=name,
        is_fine=True,
        words=f"{backend} over {len(probes)} processes: 4 MiB in {slowest:.1f} ms",
    )
