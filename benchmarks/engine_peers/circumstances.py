"""Where and how a run was made: a number without it is worth nothing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from engine_peers.peer import Workload
from engine_peers.settings import Settings


def circumstances(settings: Settings, workload: Workload) -> dict[str, Any]:
    """What a reader needs to repeat the run."""
    packages = ("torch", "transformers", "triton", "vllm")
    versions = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    changes = _git("status", "--short")
    return {
        "command": sys.argv,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": None if changes is None else changes.splitlines(),
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if settings.device.startswith("cuda") else None,
        },
        "versions": versions,
        "settings": asdict(settings),
        "workload": {
            "requests": len(workload.lengths),
            "tokens": workload.tokens,
            "mean_length": mean(workload.lengths),
            "max_length": max(workload.lengths),
            "prompt_tokens": sum(map(len, workload.prompts)),
        },
    }


def _processor() -> str:
    source = Path("/proc/cpuinfo")
    lines = source.read_text().splitlines() if source.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _git(*arguments: str) -> str | None:
    here = Path(__file__).parents[2]
    command = ["git", *arguments]
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.rstrip()
