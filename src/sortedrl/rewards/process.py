"""One worker process as its parent sees it: started, spoken to, measured, and killed whole."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from sortedrl.rewards.limits import IS_GUARDED, ProcessTree, kill_descendants
from sortedrl.rewards.source import CallStyle
from sortedrl.rewards.worker import Ready, Refused, Report, Setup, Work

_SEND_SECONDS = 5
_END_SECONDS = 5.0
_BOOT = (
    "import sys; sys.path[:] = {path!r}; from sortedrl.rewards.worker import main; main({socket})"
)

Said = Ready | Refused | Report


class WorkerLostError(Exception):
    """The process is gone, or does not listen."""


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """A process and our end of the socket to it."""

    number: int
    process: subprocess.Popen[bytes]
    """The worker, or its guard."""
    connection: Connection
    tree: ProcessTree
    under_way: list[int] = field(default_factory=list)
    """Tickets of the answers it is scoring."""
    style: CallStyle | None = None
    """How its function is called; `None` until it is loaded."""
    is_ending: bool = False
    """It ran out of memory and ends by itself: it is given no more work."""
    loaded_bytes: int = 0
    """The memory it took to load it."""
    began: float = 0.0
    """When it was started, or given the oldest of its present work."""

    @classmethod
    def start(cls, setup: Setup, *, number: int, now: float) -> WorkerProcess:
        """A new process, in a group of its own, that loads the function."""
        ours, theirs = socket.socketpair()
        # A worker whose socket stays full does not listen any more: do not wait for it for ever.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))
        path = [part or str(Path.cwd()) for part in sys.path]
        # One thread each: the engine needs the other cores.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        with theirs:
            boot = _BOOT.format(path=path, socket=theirs.fileno())
            process = subprocess.Popen(
                [sys.executable, "-c", boot],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward prints must not get between the results of a command
                start_new_session=True,
                env=environment,
            )
        tree = ProcessTree(process.pid)
        worker = cls(number, process, Connection(ours.detach()), tree, began=now)
        worker.connection.send(setup)
        return worker

    def send(self, work: Work) -> None:
        """Give it work; `WorkerLostError` if it cannot take it."""
        try:
            self.connection.send(work)
        except OSError as error:
            raise WorkerLostError from error

    def said(self) -> Sequence[Said]:
        """Everything it said since; `WorkerLostError` once it is gone."""
        heard: list[Said] = []
        try:
            while self.connection.poll():
                heard.append(self.connection.recv())
        except (EOFError, OSError) as error:
            if not heard:
                raise WorkerLostError from error
        return heard

    def grown_bytes(self) -> int:
        """The memory it takes with everything it started, beyond what loading the function took."""
        return self.tree.memory_bytes() - self.loaded_bytes if IS_GUARDED else 0

    def hang_up(self) -> None:
        """Close the socket: the guard kills everything, and ends."""
        if IS_GUARDED:
            self.tree.memory_bytes()  # the last look at its files in shared memory
        self.connection.close()

    def end(self) -> int:
        """Kill it with everything it started, and give its exit status."""
        self.hang_up()
        if IS_GUARDED:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_SECONDS)
            if self.process.returncode is None:
                kill_descendants(self.process.pid)
        with suppress(ProcessLookupError):  # it may have gone by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.tree.remove_files()
        return self.process.wait()
