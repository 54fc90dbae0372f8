"""TRL in a process of its own, which never outlives the one that started it.

The jobs go in as lines, an answer per job comes out. The process watches the pipe its jobs come
through: it ends as soon as nobody holds the other end, in whatever way its parent ended.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from pathlib import Path

from experiments.peer_job import Job
from experiments.pieces import ROOT


class TrlProcess:
    """A process that trains one job after the other with TRL; it starts with the first."""

    def __init__(self, log: Path, *, python: str) -> None:
        """Nothing is started yet; what TRL says goes to `log`, a line for each update."""
        self._log = log
        self._python = python
        self._process: subprocess.Popen[str] | None = None

    def train(self, job: Job) -> dict[str, str]:
        """Do a job, and say with which versions of which libraries; raises if TRL fails."""
        answer = self._answer(job)
        if not answer:
            self.close()
            raise RuntimeError(
                f"TRL must be importable by {self._python} and do its job, but it failed: see "
                f"{self._log}; SORTEDRL_TRL_PYTHON names another interpreter"
            )
        versions: dict[str, str] = json.loads(answer)
        return versions

    def close(self) -> None:
        """Let the process end; the next job starts another."""
        if self._process is None:
            return
        self._process.communicate()
        self._process = None

    def _answer(self, job: Job) -> str:
        """What the process says when the job is done; nothing if it ended before."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{job.to_json()}\n")
            process.stdin.flush()
        except BrokenPipeError:
            return ""
        return process.stdout.readline()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
            with self._log.open("ab") as log:
                now = datetime.datetime.now(datetime.UTC).strftime("%H:%M:%S")
                log.write(f"{now} {self._python} starts\n".encode())
                log.flush()
                self._process = subprocess.Popen(
                    [self._python, "-m", "experiments.peer_trl"],
                    cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
        return self._process
