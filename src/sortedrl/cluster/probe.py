"""What is asked of a machine before a run: its versions, its memory, and whether ranks can meet."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Literal

from sortedrl import __version__
from sortedrl.cluster.nodes import own_place
from sortedrl.engines.installed import Device, devices
from sortedrl.engines.versions import package_version

Backend = Literal["gloo", "nccl"]
_MEETING_BYTES = 4 << 20
_MEETING_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a machine says of itself."""

    host: str
    versions: Mapping[str, str | None]
    """Of sortedrl, python, ray, torch; `None` for what is not installed."""
    free_bytes: int | None
    """Memory that processes can still take; `None` where the system does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where and how ranks meet."""

    address: str
    port: int
    size: int
    backend: Backend


def machine() -> Machine:
    """This machine."""
    return Machine(
        host=socket.gethostname(),
        versions={
            "sortedrl": __version__,
            "python": platform.python_version(),
            "ray": package_version("ray"),
            "torch": package_version("torch"),
        },
        free_bytes=_free_bytes(Path("/proc/meminfo")),
    )


class Probe:
    """An actor in one bundle of a run, with the resources that a worker or a rank would have."""

    def host(self) -> str:
        """Where it was placed."""
        return socket.gethostname()

    def devices(self) -> list[Device]:
        """The CPU, and the GPUs that were given to it."""
        return devices()

    def place(self) -> tuple[str, int]:
        """An address of this machine that others reach, and a port that is free now."""
        return own_place()

    def meet(self, rank: int, meeting: Meeting) -> float:
        """Sum an array over all ranks; gives the seconds of one all-reduce after the first."""
        import torch
        from torch import distributed

        is_gpu = meeting.backend == "nccl"
        # Ranks on one machine would take a thread for every core, each of them.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        distributed.init_process_group(
            meeting.backend,
            init_method=f"tcp://{meeting.address}:{meeting.port}",
            rank=rank,
            world_size=meeting.size,
            timeout=timedelta(seconds=_MEETING_SECONDS),
        )
        try:
            values = torch.full((_MEETING_BYTES // 4,), rank + 1.0)
            values = values.cuda() if is_gpu else values
            distributed.all_reduce(values)
            expected = meeting.size * (meeting.size + 1) / 2
            if not bool((values == expected).all()):
                raise ArithmeticError(
                    f"the sum over {meeting.size} ranks must be {expected}, got {values[0].item()}"
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
