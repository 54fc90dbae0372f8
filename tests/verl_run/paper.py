"""The overrides on the command line of a shell script that starts verl."""

import os
import subprocess
from pathlib import Path


def overrides_of(script: Path) -> list[str]:
    """What the script gives to verl, as its shell expands it; verl itself is not started."""
    found = subprocess.run(
        ["bash", str(script)],
        env={**os.environ, "PYTHON": "printf %s\\n"},
        capture_output=True,
        text=True,
        check=True,
    )
    words = found.stdout.splitlines()
    assert words[:2] == ["-m", "verl.trainer.main_ppo"], words[:3]
    return words[2:]
