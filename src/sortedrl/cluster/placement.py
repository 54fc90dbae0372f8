"""Which resources each rollout worker and each trainer rank gets: a Ray placement group.

All bundles of a run are placed together or not at all, so no run begins with half its workers. The
resources of the nodes, and how much of them is free, are read here too.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sortedrl.config.cluster import Cluster
from sortedrl.errors import EngineError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


# Of the resource that every node has under its own address.
_HERE = 0.001
Resources = Mapping[str, float]
"""Amounts by Ray's names: CPU, GPU, and others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A Ray node: one machine, or a part of one."""

    id: str
    host: str
    address: str
    resources: Resources


def living_nodes() -> list[Node]:
    """All nodes that are alive, in the order of their addresses."""
    import ray

    # Ray leaves the function without types.
    rows = ray.nodes()  # type: ignore[no-untyped-call]
    nodes = [
        Node(
            id=row["NodeID"],
            host=row["NodeManagerHostname"],
            address=row["NodeManagerAddress"],
            resources=row["Resources"],
        )
        for row in rows
        if row["Alive"]
    ]
    return sorted(nodes, key=lambda node: (node.address, node.id))


def free_address() -> tuple[str, int]:
    """An address of this machine that others reach, and a port that is free now."""
    import ray

    with socket.socket() as listener:
        listener.bind(("", 0))
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return address, listener.getsockname()[1]


def controller_node() -> str | None:
    """The address of the node that this process is on; `None` if it is on none of them."""
    address, _ = free_address()
    return address if any(node.address == address for node in living_nodes()) else None


def free_resources() -> Resources:
    """The resources that no actor has reserved, over all nodes."""
    import ray

    free: Resources = ray.available_resources()  # type: ignore[no-untyped-call]
    return free


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleShare:
    """The part of a bundle that one actor reserves."""

    bundle: int
    cpus: float
    gpus: float
    shared_gpus: int = 0
    """GPUs that it shares with the trainer ranks of its bundle, in turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """The bundles of a run, and the share of each actor in them."""

    bundles: tuple[Resources, ...]
    workers: tuple[BundleShare, ...]
    ranks: tuple[BundleShare, ...]
    controller: BundleShare | None = None
    """Of a trainer in the process of the controller, on the machine of that process."""

    @property
    def total(self) -> Resources:
        """The resources of all bundles."""
        total: Counter[str] = Counter()
        for bundle in self.bundles:
            total.update(bundle)
        return dict(total)


def placement_plan(cluster: Cluster, *, controller: str | None = None) -> PlacementPlan:
    """The plan of a run; `controller` is the address of the node that the controller is on.

    >>> from dataclasses import replace
    >>> two = Cluster(rollout_workers=2, trainer_ranks=2, gpus_per_worker=1)
    >>> placement_plan(two).total
    {'CPU': 4, 'GPU': 4}
    >>> placement_plan(replace(two, kind="colocated")).total
    {'CPU': 4, 'GPU': 2}
    >>> placement_plan(replace(two, trainer_ranks=0), controller="10.0.0.7").bundles[-1]
    {'GPU': 1, 'node:10.0.0.7': 0.001}
    """
    if cluster.kind == "colocated":
        return _colocated(cluster)
    workers = tuple(
        BundleShare(bundle=number, cpus=cluster.cpus_per_worker, gpus=cluster.gpus_per_worker)
        for number in range(cluster.num_workers)
    )
    ranks = tuple(
        BundleShare(bundle=len(workers) + number, cpus=1, gpus=cluster.gpus_per_rank)
        for number in range(cluster.trainer_ranks)
    )
    bundles = tuple(_bundle(claim.cpus, claim.gpus) for claim in (*workers, *ranks))
    if cluster.trainer_ranks or not cluster.gpus_per_worker or controller is None:
        return PlacementPlan(bundles=bundles, workers=workers, ranks=ranks)
    # Ray would give the GPU of a trainer in the controller's process to a worker.
    own = BundleShare(bundle=len(bundles), cpus=0, gpus=1)
    return PlacementPlan(
        bundles=(*bundles, {**_bundle(own.cpus, own.gpus), f"node:{controller}": _HERE}),
        workers=workers,
        ranks=ranks,
        controller=own,
    )


def plan_of_one_worker(cluster: Cluster) -> PlacementPlan:
    """The plan of one more rollout worker, which joins during a run."""
    claim = BundleShare(bundle=0, cpus=cluster.cpus_per_worker, gpus=cluster.gpus_per_worker)
    return PlacementPlan(bundles=(_bundle(claim.cpus, claim.gpus),), workers=(claim,), ranks=())


def refuse_too_small(wanted: PlacementPlan, nodes: Sequence[Resources]) -> None:
    """Raise what is missing if the bundles cannot be placed on these nodes, even if all is free.

    >>> refuse_too_small(placement_plan(Cluster(rollout_workers=4)), [{"CPU": 4.0}])
    Traceback (most recent call last):
        ...
    sortedrl.errors.EngineError: the cluster must have 5 CPU for this run, it has 4 CPU on 1 \
node: 1 CPU missing; lower cluster.rollout_workers or cluster.trainer_ranks, or add nodes
    """
    has: Counter[str] = Counter()
    for node in nodes:
        has.update(node)
    missing = {
        name: amount - has[name] for name, amount in wanted.total.items() if amount > has[name]
    }
    if missing:
        raise EngineError(
            f"the cluster must have {listed(wanted.total)} for this run, it has {listed(has)} on "
            f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}: {listed(missing)} missing; lower "
            "cluster.rollout_workers or cluster.trainer_ranks, or add nodes"
        )
    for bundle in wanted.bundles:
        if not any(_fits(bundle, node) for node in nodes):
            raise EngineError(
                f"one node must have {listed(bundle)} for a single worker, but the nodes have "
                f"{'; '.join(map(listed, nodes))}; lower cluster.cpus_per_worker or "
                "cluster.gpus_per_worker"
            )


class BundlePlacement:
    """A placement group whose bundles are reserved; `remove` releases them."""

    def __init__(self, wanted: PlacementPlan, *, seconds: float) -> None:
        """Wait until all bundles are placed."""
        from ray.util.placement_group import placement_group

        refuse_too_small(wanted, [node.resources for node in living_nodes()])
        self.plan = wanted
        self.group: PlacementGroup = placement_group(
            [dict(bundle) for bundle in wanted.bundles], strategy="PACK"
        )
        if not self.group.wait(timeout_seconds=seconds):
            free = free_resources()
            self.remove()
            raise EngineError(
                f"{listed(wanted.total)} in {len(wanted.bundles)} bundles must be free within "
                f"{seconds:g} s, but other runs hold them: {listed(free)} are free; stop other "
                "runs, or lower cluster.rollout_workers or cluster.trainer_ranks"
            )

    def strategy(self, claim: BundleShare) -> PlacementGroupSchedulingStrategy:
        """The scheduling strategy of an actor, which names its bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=claim.bundle
        )

    @property
    def is_whole(self) -> bool:
        """Whether every bundle has a node; Ray moves a bundle whose node was lost."""
        from ray.util.placement_group import placement_group_table

        return bool(placement_group_table(self.group)["state"] == "CREATED")

    def remove(self) -> None:
        """Release the resources; actors that still use some of them are ended."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)


@contextmanager
def reserved_gpu(placement: BundlePlacement) -> Iterator[str | None]:
    """The GPU of this machine that is reserved for the controller's own trainer, if there is one.

    An actor holds it meanwhile, so that Ray does not assign it to another one.
    """
    claim = placement.plan.controller
    if claim is None:
        yield None
        return
    import ray

    # Ray's types know the bare decorator only.
    remote: Any = ray.remote
    options = {"num_cpus": claim.cpus, "num_gpus": claim.gpus}
    holder = (
        remote(_GpuHolder)
        .options(scheduling_strategy=placement.strategy(claim), **options)
        .remote()
    )
    try:
        gpus: list[str] = ray.get(holder.gpus.remote())
        yield gpus[0]
    finally:
        ray.kill(holder)


def device_of_gpu(gpu: str) -> str:
    """A GPU by the name that Ray has for it, as torch counts those that this process sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return f"cuda:{gpu}"
    names = [name.strip() for name in visible.split(",")]
    if gpu not in names:
        raise EngineError(
            f"GPU {gpu}, which Ray has reserved for the trainer, must be visible to this process, "
            f"but CUDA_VISIBLE_DEVICES is {visible!r}; start Ray and the run with the same value"
        )
    return f"cuda:{names.index(gpu)}"


class _GpuHolder:
    """An actor that only reserves a GPU."""

    def gpus(self) -> list[str]:
        """Its GPUs, by their names on this machine."""
        import ray

        return [str(gpu) for gpu in ray.get_gpu_ids()]


def _colocated(cluster: Cluster) -> PlacementPlan:
    """One bundle for each worker, with the ranks that it shares its GPUs with.

    A worker may have several GPUs, and Ray cannot give an actor a half of each: the ranks take
    them, and the worker is given their indices.
    """
    gpus = cluster.gpus_per_worker
    ranks_each = max(1, gpus)
    numbers = range(cluster.num_workers)
    bundle = _bundle(cluster.cpus_per_worker + ranks_each, gpus)
    return PlacementPlan(
        bundles=tuple(bundle for _ in numbers),
        workers=tuple(
            BundleShare(bundle=n, cpus=cluster.cpus_per_worker, gpus=0, shared_gpus=gpus)
            for n in numbers
        ),
        ranks=tuple(
            BundleShare(bundle=n, cpus=1, gpus=cluster.gpus_per_rank)
            for n in numbers
            for _ in range(ranks_each)
        ),
    )


def _bundle(cpus: float, gpus: float) -> Resources:
    return {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}


def _fits(bundle: Resources, node: Resources) -> bool:
    return all(node.get(name, 0) >= amount for name, amount in bundle.items())


def listed(resources: Resources) -> str:
    """Resources as text, such as `4 CPU and 2 GPU`."""
    named = [f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if resources.get(name)]
    return " and ".join(named) or "nothing"
