"""A connection to Ray: a local one that we start, or a cluster that is already running.

The local one ends with the run; a running cluster is left as it was.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from time import monotonic
from typing import Any

from sortedrl.cluster.placement import living_nodes, placement_plan
from sortedrl.config.cluster import Cluster
from sortedrl.errors import EngineError

_GIB = 1 << 30
_NAMESPACE = "sortedrl"
_REACH_SECONDS = 10.0
# Ray's own minute is for a head that may come back; that of our own Ray does not.
_HEAD_SECONDS = 20
# Ray waits half a minute for its own processes; on a busy machine that is too short.
_SLOW_START = "timed out during startup"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The Ray that this process is connected to."""

    address: str
    is_own: bool
    """Whether it was started here, and ends with the run."""
    dashboard_url: str | None
    """`None` where it has no dashboard."""
    num_nodes: int

    @property
    def summary(self) -> str:
        """Address, nodes and dashboard, as a line of output."""
        whose = "a Ray of our own" if self.is_own else "the running Ray"
        nodes = "1 node" if self.num_nodes == 1 else f"{self.num_nodes} nodes"
        board = f"; dashboard: {self.dashboard_url}" if self.dashboard_url else ""
        return f"{whose} at {self.address}, {nodes}{board}"


def require_ray() -> None:
    """Refuse a Python without Ray; nothing is imported."""
    if find_spec("ray") is None:
        raise EngineError(
            "a cluster needs the package ray, which is not installed; install it with: "
            "pip install 'sortedrl[cluster]'"
        )


@contextmanager
def connected(cluster: Cluster, *, tell: Callable[[str], None]) -> Iterator[Connection]:
    """Start a Ray or connect to one, and disconnect at the end."""
    require_ray()
    import ray

    if ray.is_initialized():
        raise EngineError("this process is already connected to Ray; call ray.shutdown() first")
    # Ray sends usage statistics by default.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    context = _own(cluster) if cluster.address is None else _running(cluster.address)
    try:
        connection = Connection(
            address=context.address_info["address"] if cluster.address is None else cluster.address,
            is_own=cluster.address is None,
            dashboard_url=_link(context.dashboard_url),
            num_nodes=len(living_nodes()),
        )
        tell(connection.summary)
        yield connection
    finally:
        ray.shutdown()


def _own(cluster: Cluster) -> Any:  # noqa: ANN401  Ray's context has no public type
    """A new Ray; CPUs are only counted, so it has as many as the run needs."""
    import ray

    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(_HEAD_SECONDS))
    num_cpus = int(placement_plan(cluster).total.get("CPU", 0))
    store = cluster.object_store_gib
    until = monotonic() + cluster.start_seconds
    while True:
        try:
            return ray.init(
                address="local",
                namespace=_NAMESPACE,
                num_cpus=max(os.cpu_count() or 1, num_cpus),
                include_dashboard=None if cluster.dashboard else False,
                object_store_memory=None if store is None else int(store * _GIB),
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
        except Exception as error:  # Ray has no type for it
            if _SLOW_START not in str(error):
                raise
            ray.shutdown()
            if monotonic() >= until:
                raise EngineError(
                    f"Ray must start on this machine within {cluster.start_seconds:g} s, but its "
                    "own processes did not; stop other programs, or raise cluster.start_seconds"
                ) from error


def _running(address: str) -> Any:  # noqa: ANN401
    import ray

    _refuse_unreachable(address)
    try:
        return ray.init(
            address=address, namespace=_NAMESPACE, logging_level=logging.ERROR, log_to_driver=False
        )
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise _no_ray(address, error) from error


def _refuse_unreachable(address: str) -> None:
    """Refuse an address that accepts no connection; Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=_REACH_SECONDS).close()
        except OSError as error:
            raise _no_ray(address, error) from error


def _no_ray(address: str, error: Exception) -> EngineError:
    # The message says that Ray could not connect, and only its cause says why.
    if "AuthenticationError" in str(error.__cause__):
        return EngineError(
            f"the Ray at {address} requires a token, and this process has none or a different one; "
            "set RAY_AUTH_MODE=token and the same token for both (see ray get-auth-token), or "
            "start that Ray with RAY_AUTH_MODE=disabled if no other user can reach it"
        )
    reason = str(error).partition("\n")[0]
    return EngineError(
        f"cluster.address must be the address of a running Ray, got {address!r}: {reason}; start "
        "one with: ray start --head; or omit the address to start a local one"
    )


def _link(dashboard: str | None) -> str | None:
    if not dashboard:
        return None
    return dashboard if dashboard.startswith("http") else f"http://{dashboard}"
