"""Runs the self-test in a process of its own, so an engine that hangs or crashes harms nothing.

The process gets a session of its own, and when it is over nothing of that session is left, neither
the engine's children nor theirs. What they print goes to a file, whose end is shown on failure. The
verdict is passed, or failed for a reason that fits one line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sortedrl.engines.installed import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome, with the figures as far as they are known."""

    reason: str | None
    """Why it failed; `None` if it passed."""
    seconds: float = 0.0
    """From the start of the engine's process to its end."""
    name: str | None = None
    """What the engine says it is."""
    slots: int | None = None
    """Answers it wrote at the same time."""
    largest_gap: float | None = None
    """Nats between its log-probabilities and a plain forward pass, for the worst token."""
    tokens_per_second: float | None = None
    """With a model so tiny that it says little of any other."""
    log: tuple[str, ...] = ()
    """The last lines that the engine printed, if it failed."""

    @property
    def passed(self) -> bool:
        """Whether the engine can be relied on."""
        return self.reason is None


def to_line(verdict: Verdict) -> str:
    """One line of JSON."""
    return json.dumps(asdict(verdict))


def from_line(line: str) -> Verdict:
    """The verdict that such a line holds."""
    told = json.loads(line)
    return Verdict(**(told | {"log": tuple(told["log"])}))


STAGE = "self-test: "
"""Begins the lines by which the process tells in its log how far it is."""
_LOG_LINES = 12
_REASON_LETTERS = 400


def self_test(kind: Kind, *, seconds: float) -> Verdict:
    """The verdict on an engine that is installed here."""
    # All it needs is made on the spot; without a network it must not wait for one.
    return watched(_command(kind), seconds=seconds, environment={"HF_HUB_OFFLINE": "1"})


def server_self_test(url: str, *, seconds: float) -> Verdict:
    """The verdict on a running server; its weights stay as they are."""
    return watched(_command("server", url), seconds=seconds)


def watched(
    command: Sequence[str], *, seconds: float, environment: dict[str, str] | None = None
) -> Verdict:
    """The verdict that a command prints as its only line, or why there is none."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sortedrl-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "log"
        with log.open("wb") as log_file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
                env=os.environ | {"TMPDIR": folder} | (environment or {}),
                start_new_session=True,
            )
            printed: str | None = None
            try:
                with suppress(subprocess.TimeoutExpired):
                    printed, _ = process.communicate(timeout=seconds)
            finally:
                _end_session(process)
        lines = log.read_text(errors="replace").splitlines()
    if printed is None:
        verdict = Verdict(reason=f"no result within {seconds:g} s{_stage(lines)}")
    else:
        verdict = _read(printed, code=process.returncode, log=lines)
    return replace(
        verdict,
        reason=None if verdict.reason is None else _one_line(verdict.reason),
        seconds=time.monotonic() - began,
        log=() if verdict.passed else tuple(_told(lines)[-_LOG_LINES:]),
    )


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "sortedrl.engines.self_test", *words]


def _end_session(process: subprocess.Popen[str]) -> None:
    """End whatever is left; the engine's own children may have outlived the process."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _read(printed: str, *, code: int, log: Sequence[str]) -> Verdict:
    try:
        return from_line(printed)
    except (json.JSONDecodeError, KeyError, TypeError):
        told = _told(log)
        last = f": {told[-1].strip()}" if told else ""
        return Verdict(reason=f"its process ended with code {code} and no result{last}")


def _told(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if line.strip() and not line.startswith(STAGE)]


def _stage(lines: Sequence[str]) -> str:
    stages = [line.removeprefix(STAGE) for line in lines if line.startswith(STAGE)]
    return f"; it was still busy: {stages[-1]}" if stages else ""


def _one_line(reason: str) -> str:
    words = " ".join(reason.split())
    return words if len(words) <= _REASON_LETTERS else words[:_REASON_LETTERS] + " ..."
