"""What a run ran on: the device by name, and the commit of the code."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from sortedrl import __version__


def run_facts(device: str) -> dict[str, str]:
    """When and on what a run starts, as `run.json` keeps it."""
    facts = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{device_name(device)}, {os.cpu_count()} CPU cores",
        "sortedrl": __version__,
    }
    found = commit(Path(__file__).parent)
    return facts | ({"commit": found} if found is not None else {})


def device_name(device: str) -> str:
    """The GPU or the processor by name."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()


def commit(folder: Path) -> str | None:
    """The commit of a folder that git tracks; `None` for any other, such as an installed package.

    `SORTEDRL_COMMIT` overrides it, for a copy without the history.
    """
    if given := os.environ.get("SORTEDRL_COMMIT"):
        return given
    if not _git(["ls-files", "."], folder):
        return None
    return _git(["describe", "--always", "--dirty", "--exclude=*"], folder)


def _git(arguments: Sequence[str], folder: Path) -> str | None:
    """What git prints; `None` where it is missing, or fails."""
    try:
        found = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip() or None
