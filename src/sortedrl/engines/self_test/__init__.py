"""The self-test of a rollout engine with a tiny model.

It runs in its own process, `__main__`, so an engine that hangs or crashes does no harm. This module
has its start, its timeout and its verdict, without torch.

The process gets its own session, all of whose processes are killed at the end. Their output goes to
a file, whose end is shown on failure. A failure has a reason of one line.
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
    """The result of a self-test, with its measurements."""

    reason: str | None
    """Why it failed; `None` if it passed."""
    seconds: float = 0.0
    """From the start of the process to its end."""
    name: str | None = None
    """Name and version of the engine."""
    slots: int | None = None
    """Slots of the engine."""
    largest_gap: float | None = None
    """Largest log-probability difference to a plain forward pass, in nats."""
    tokens_per_second: float | None = None
    """With a tiny model: not representative of others."""
    log: tuple[str, ...] = ()
    """The last lines that the engine printed, if it failed."""

    @property
    def passed(self) -> bool:
        """Whether the engine passed."""
        return self.reason is None


def to_line(verdict: Verdict) -> str:
    """One line of JSON."""
    return json.dumps(asdict(verdict))


def from_line(line: str) -> Verdict:
    """The verdict in such a line."""
    values = json.loads(line)
    return Verdict(**(values | {"log": tuple(values["log"])}))


STAGE = "self-test: "
"""The prefix of log lines that name the current stage."""
_LOG_LINES = 12
_REASON_LETTERS = 400


def self_test(kind: Kind, *, seconds: float) -> Verdict:
    """Test an installed engine."""
    # It downloads nothing, and must not wait for the network.
    return watched(_command(kind), seconds=seconds, environment={"HF_HUB_OFFLINE": "1"})


def server_self_test(url: str, *, seconds: float) -> Verdict:
    """Test a running server; its weights are not changed."""
    return watched(_command("server", url), seconds=seconds)


def watched(
    command: Sequence[str], *, seconds: float, environment: dict[str, str] | None = None
) -> Verdict:
    """The verdict printed by a command, or why there is none."""
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
        log=() if verdict.passed else tuple(_output(lines)[-_LOG_LINES:]),
    )


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sortedrl.engines.self_test", *arguments]


def _end_session(process: subprocess.Popen[str]) -> None:
    """Kill the session: children of the engine may outlive the process."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _read(printed: str, *, code: int, log: Sequence[str]) -> Verdict:
    try:
        return from_line(printed)
    except (json.JSONDecodeError, KeyError, TypeError):
        output = _output(log)
        last = f": {output[-1].strip()}" if output else ""
        return Verdict(reason=f"its process exited with code {code} without a result{last}")


def _output(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if line.strip() and not line.startswith(STAGE)]


def _stage(lines: Sequence[str]) -> str:
    stages = [line.removeprefix(STAGE) for line in lines if line.startswith(STAGE)]
    return f"; last stage: {stages[-1]}" if stages else ""


def _one_line(reason: str) -> str:
    text = " ".join(reason.split())
    return text if len(text) <= _REASON_LETTERS else text[:_REASON_LETTERS] + " ..."
