"""Where and how the study was made: a number without it is worth nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from coupling_study.settings import Settings


def facts(settings: Settings, *, device: str, seconds: float) -> dict[str, object]:
    """What a reader needs to repeat it."""
    packages = ("torch", "transformers")
    changes = _git("status", "--short")
    return {
        "command": sys.argv,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": None if changes is None else changes.splitlines(),
        "machine": {
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        },
        "versions": {name: importlib.metadata.version(name) for name in packages}
        | {"python": platform.python_version()},
        "settings": asdict(settings),
        "seconds": seconds,
    }


def _git(*arguments: str) -> str | None:
    command = ["git", *arguments]
    here = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.rstrip()
