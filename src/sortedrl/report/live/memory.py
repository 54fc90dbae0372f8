"""The memory that a run takes on its device.

torch is asked only where something else has loaded it: to look must not make the process larger.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes in use, of `total` where the device has a size of its own."""

    used: int
    total: int | None


def used_memory(device: str) -> Memory:
    """What is in use on the card, by everyone; or by this process where the device is a CPU."""
    torch = sys.modules.get("torch")
    if device.startswith("cuda") and torch is not None and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info(device)
        return Memory(used=total - free, total=total)
    return Memory(used=_resident_bytes(), total=None)


def _resident_bytes() -> int:
    """The memory of this process; where the system does not tell, the most it ever was."""
    try:
        pages = int(_STATM.read_text().split()[1])
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return pages * resource.getpagesize()
