"""A worker process: started in a group of its own, spoken to over a socket, killed with its tree.

Used by the pools of rewards and of environments. Messages are Python objects of ours.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sortedrl.rewards.pool.limits import IS_GUARDED, ProcessTree, guarded, kill_descendants

_SEND_SECONDS = 5
_END_SECONDS = 5.0
_BOOT = "import sys; sys.path[:] = {path!r}; from {module} import main; main({socket})"


class WorkerLostError(Exception):
    """The process has ended, or does not receive."""


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """A process and our end of the socket to it."""

    process: subprocess.Popen[bytes]
    """The worker, or its guard."""
    connection: Connection
    tree: ProcessTree

    @classmethod
    def start(cls, setup: object, *, module: str) -> WorkerProcess:
        """A new process, in its own process group, that runs `main(socket)` of a module.

        `setup` is the first message to it.
        """
        ours, theirs = socket.socketpair()
        # A worker whose socket stays full no longer receives: do not block on it.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))
        path = [part or str(Path.cwd()) for part in sys.path]
        # One thread each: the engine needs the other cores.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        with theirs:
            boot = _BOOT.format(path=path, module=module, socket=theirs.fileno())
            process = subprocess.Popen(
                [sys.executable, "-c", boot],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # output of a worker must not mix with the output of a command
                start_new_session=True,
                env=environment,
            )
        worker = cls(process, Connection(ours.detach()), ProcessTree(process.pid))
        worker.connection.send(setup)
        return worker

    def send(self, message: object) -> None:
        """Send a message; raises `WorkerLostError` if that fails."""
        try:
            self.connection.send(message)
        except OSError as error:
            raise WorkerLostError from error

    def said(self) -> Sequence[Any]:
        """All messages received since; raises `WorkerLostError` once it has ended."""
        heard: list[Any] = []
        try:
            while self.connection.poll():
                heard.append(self.connection.recv())
        except (EOFError, OSError) as error:
            if not heard:
                raise WorkerLostError from error
        return heard

    def memory_bytes(self) -> int:
        """Memory of the process tree; 0 where this system does not tell."""
        return self.tree.memory_bytes() if IS_GUARDED else 0

    def hang_up(self) -> None:
        """Close the socket: the guard kills the process tree and exits."""
        self.memory_bytes()  # the last look at its files in shared memory
        self.connection.close()

    def end(self) -> int:
        """Kill the process tree; returns the exit status."""
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


def served(descriptor: int) -> Connection:
    """The worker's end of the socket, in a process that a guard watches where there are guards."""
    if IS_GUARDED:
        guarded(descriptor)
    return Connection(descriptor)


def leave() -> None:
    """End this worker at once, with all processes it started: its socket was closed."""
    if os.getpgrp() == os.getpid():  # without a guard
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)
