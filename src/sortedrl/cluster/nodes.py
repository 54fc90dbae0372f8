"""The nodes of the Ray that this process is connected to, and what they have."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

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


def free_resources() -> Resources:
    """What no actor of any run has taken, on all nodes together."""
    import ray

    free: Resources = ray.available_resources()  # type: ignore[no-untyped-call]
    return free
