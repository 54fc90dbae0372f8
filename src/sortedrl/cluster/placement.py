"""Which resources each rollout worker and each trainer rank gets: a Ray placement group.

All bundles of a run are placed together or not at all, so no run begins with half its workers. What
the living nodes have and what is free on them is read here too.
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
    """One machine, or what counts as one."""

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


def own_place() -> tuple[str, int]:
    """An address of this machine that others reach, and a port that is free now."""
    import ray

    with socket.socket() as listener:
        listener.bind(("", 0))
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return address, listener.getsockname()[1]


def controller_node() -> str | None:
    """The address of the node that this process is on; `None` if it is on none of them."""
    address, _ = own_place()
    return address if any(node.address == address for node in living_nodes()) else None


def free_resources() -> Resources:
    """What no actor of any run has taken, on all nodes together."""
    import ray

    free: Resources = ray.available_resources()  # type: ignore[no-untyped-call]
    return free


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one actor takes of its bundle."""

    bundle: int
    cpus: float
    gpus: float
    shared_gpus: int = 0
    """GPUs of the trainer ranks in its bundle, which it uses in turns with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """The bundles of a run, and who takes what of them."""

    bundles: tuple[Resources, ...]
    workers: tuple[Claim, ...]
    ranks: tuple[Claim, ...]
    controller: Claim | None = None
    """Of a trainer in the process of the controller, on the machine of that process."""

    @property
    def total(self) -> Resources:
        """The resources of all bundles."""
        total: Counter[str] = Counter()
        for bundle in self.bundles:
            total.update(bundle)
        return dict(total)


def blueprint(cluster: Cluster, *, controller: str | None = None) -> Blueprint:
    """What a run places; `controller` is the address of the node that the controller is on.

    >>> from dataclasses import replace
    >>> two = Cluster(rollout_workers=2, trainer_ranks=2, gpus_per_worker=1)
    >>> blueprint(two).total
    {'CPU': 4, 'GPU': 4}
    >>> blueprint(replace(two, kind="colocated")).total
    {'CPU': 4, 'GPU': 2}
    >>> blueprint(replace(two, trainer_ranks=0), controller="10.0.0.7").bundles[-1]
    {'GPU': 1, 'node:10.0.0.7': 0.001}
    """
    if cluster.kind == "colocated":
        return _colocated(cluster)
    workers = tuple(
        Claim(bundle=number, cpus=cluster.cpus_per_worker, gpus=cluster.gpus_per_worker)
        for number in range(cluster.num_workers)
    )
    ranks = tuple(
        Claim(bundle=len(workers) + number, cpus=1, gpus=cluster.gpus_per_rank)
        for number in range(cluster.trainer_ranks)
    )
    bundles = tuple(_bundle(claim.cpus, claim.gpus) for claim in (*workers, *ranks))
    if cluster.trainer_ranks or not cluster.gpus_per_worker or controller is None:
        return Blueprint(bundles=bundles, workers=workers, ranks=ranks)
    # Ray would give the GPU of a trainer in the controller's process to a worker.
    own = Claim(bundle=len(bundles), cpus=0, gpus=1)
    return Blueprint(
        bundles=(*bundles, {**_bundle(own.cpus, own.gpus), f"node:{controller}": _HERE}),
        workers=workers,
        ranks=ranks,
        controller=own,
    )


def joining(cluster: Cluster) -> Blueprint:
    """What one more rollout worker takes, which joins during a run."""
    claim = Claim(bundle=0, cpus=cluster.cpus_per_worker, gpus=cluster.gpus_per_worker)
    return Blueprint(bundles=(_bundle(claim.cpus, claim.gpus),), workers=(claim,), ranks=())


def refuse_too_small(wanted: Blueprint, nodes: Sequence[Resources]) -> None:
    """Raise what is missing if the bundles cannot be placed on these nodes, even if all is free.

    >>> refuse_too_small(blueprint(Cluster(rollout_workers=4)), [{"CPU": 4.0}])
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
            f"the cluster must have {words(wanted.total)} for this run, it has {words(has)} on "
            f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}: {words(missing)} missing; lower "
            "cluster.rollout_workers or cluster.trainer_ranks, or add nodes"
        )
    for bundle in wanted.bundles:
        if not any(_fits(bundle, node) for node in nodes):
            raise EngineError(
                f"one node must have {words(bundle)} for a single worker, but the nodes have "
                f"{'; '.join(map(words, nodes))}; lower cluster.cpus_per_worker or "
                "cluster.gpus_per_worker"
            )


class BundlePlacement:
    """A placement group that is there; `remove` gives its resources back."""

    def __init__(self, wanted: Blueprint, *, seconds: float) -> None:
        """Wait until all bundles are placed."""
        from ray.util.placement_group import placement_group

        refuse_too_small(wanted, [node.resources for node in living_nodes()])
        self.blueprint = wanted
        self.group: PlacementGroup = placement_group(
            [dict(bundle) for bundle in wanted.bundles], strategy="PACK"
        )
        if not self.group.wait(timeout_seconds=seconds):
            free = free_resources()
            self.remove()
            raise EngineError(
                f"{words(wanted.total)} in {len(wanted.bundles)} bundles must be free within "
                f"{seconds:g} s, but other runs hold them: {words(free)} are free; stop other "
                "runs, or lower cluster.rollout_workers or cluster.trainer_ranks"
            )

    def strategy(self, claim: Claim) -> PlacementGroupSchedulingStrategy:
        """How an actor is told its bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=claim.bundle
        )

    @property
    def is_whole(self) -> bool:
        """Whether every bundle has a node; for one whose node is gone Ray looks for another."""
        from ray.util.placement_group import placement_group_table

        return bool(placement_group_table(self.group)["state"] == "CREATED")

    def remove(self) -> None:
        """Give the resources back; actors that still hold some of them end."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)


@contextmanager
def reserved_gpu(placement: BundlePlacement) -> Iterator[str | None]:
    """The GPU of this machine that is reserved for the controller's own trainer, if there is one.

    An actor holds it meanwhile, so that Ray gives it to nobody else.
    """
    claim = placement.blueprint.controller
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
    """An actor that has a GPU and does not use it."""

    def gpus(self) -> list[str]:
        """Its GPUs, by their names on this machine."""
        import ray

        return [str(gpu) for gpu in ray.get_gpu_ids()]


def _colocated(cluster: Cluster) -> Blueprint:
    """One bundle for each worker, with the ranks that it shares its GPUs with.

    A worker may have several GPUs, and Ray cannot give an actor a half of each: the ranks take
    them, and the worker is given their indices.
    """
    gpus = cluster.gpus_per_worker
    ranks_each = max(1, gpus)
    numbers = range(cluster.num_workers)
    bundle = _bundle(cluster.cpus_per_worker + ranks_each, gpus)
    return Blueprint(
        bundles=tuple(bundle for _ in numbers),
        workers=tuple(
            Claim(bundle=n, cpus=cluster.cpus_per_worker, gpus=0, shared_gpus=gpus) for n in numbers
        ),
        ranks=tuple(
            Claim(bundle=n, cpus=1, gpus=cluster.gpus_per_rank)
            for n in numbers
            for _ in range(ranks_each)
        ),
    )


def _bundle(cpus: float, gpus: float) -> Resources:
    return {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}


def _fits(bundle: Resources, node: Resources) -> bool:
    return all(node.get(name, 0) >= amount for name, amount in bundle.items())


def words(resources: Resources) -> str:
    """Resources as a person reads them."""
    named = [f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if resources.get(name)]
    return " and ".join(named) or "nothing"
