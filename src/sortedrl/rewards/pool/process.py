"""Worker processes of the pools of rewards and of environments, and the thread that runs them.

    caller --wake--> Supervisor thread --Setup, work--> WorkerProcess (its own process group)
       ^                    |          <--Ready or Refused, results--
       +---- `changed` -----+

A worker is spoken to over a socket and killed with its process tree. Messages are Python objects of
ours.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, TypeVar

from sortedrl.errors import ConfigError, SortedRLError
from sortedrl.rewards.functions import RewardSource
from sortedrl.rewards.pool.limits import (
    IS_GUARDED,
    ProcessTree,
    guarded,
    kill_descendants,
    limit_memory,
)

_SEND_SECONDS = 5
_END_SECONDS = 5.0
_BOOT = "import sys; sys.path[:] = {path!r}; from {module} import main; main({socket})"
LOAD_SECONDS = 300.0
"""How long a worker may take to load the user's module."""
MEASURE_SECONDS = 0.2
"""How often the memory of busy workers is measured."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a worker; the sources of rewards and of environments look alike."""

    source: RewardSource
    memory_bytes: int | None
    time_limit_seconds: float | None = None
    """Of one call, where the worker itself enforces it."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The source cannot be loaded; `is_setting` if the address is wrong, not the code."""

    message: str
    is_setting: bool


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


class Supervisor:
    """The thread that runs the workers of a pool, and what it shares with the pool's callers.

    The first error ends the thread and is raised in every caller.
    """

    def __init__(
        self, supervise: Callable[[], None], *, name: str, failure: Callable[[str], SortedRLError]
    ) -> None:
        """Not started yet; `failure` makes the error of an unexpected exception in the thread."""
        self.changed = threading.Condition()
        """Guards the pool's state; notified of every change that a caller may wait for."""
        self.error: SortedRLError | None = None
        self.is_closing = False
        self._supervise = supervise
        self._name = name
        self._failure = failure
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._wake_reader = Connection(reader, writable=False)
        self._wake_writer = Connection(writer, readable=False)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread should go on."""
        return not self.is_closing and self.error is None

    def wake(self) -> None:
        """Let the thread look at what has changed; never blocks."""
        try:
            os.write(self._wake_writer.fileno(), b".")
        except (BlockingIOError, OSError):
            return  # it is awake, or has ended

    def wait(self, connections: Iterable[Connection], seconds: float | None) -> list[Connection]:
        """Wait in the thread for a message, a call of `wake` or the time; returns who has news."""
        found = wait([self._wake_reader, *connections], seconds)
        while self._wake_reader.poll():
            os.read(self._wake_reader.fileno(), 4096)
        return [c for c in found if isinstance(c, Connection) and c is not self._wake_reader]

    def raise_error(self) -> None:
        """Raise the error that ended the thread, if any."""
        if self.error is not None:
            raise self.error

    def stop(self, error: SortedRLError) -> None:
        """End the thread; the first error counts."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def close(self) -> None:
        """End the thread and wait for it."""
        self.is_closing = True
        self.wake()
        self._thread.join()
        self._wake_reader.close()
        self._wake_writer.close()

    def _run(self) -> None:
        try:
            self._supervise()
        except SortedRLError as error:
            self.stop(error)
        except Exception as error:  # noqa: BLE001  callers that wait must be released
            broken = self._failure(f"the pool of {self._name} failed: {error!r}")
            broken.__cause__ = error
            self.stop(broken)


@dataclass(frozen=True, slots=True)
class Loading:
    """What the workers of a pool load: how to set it up, and the errors if that fails."""

    what: str
    """reward or environment."""
    source: RewardSource
    failure: Callable[[str], SortedRLError]

    def setup(self, memory_gib: float | None, *, time_limit_seconds: float | None = None) -> Setup:
        """The first message to a worker."""
        return Setup(
            replace(self.source, options=dict(self.source.options)),
            None if memory_gib is None else int(memory_gib * (1 << 30)),
            time_limit_seconds,
        )

    def refused(self, said: Refused) -> SortedRLError:
        """The error of a source that cannot be loaded."""
        if said.is_setting:
            return ConfigError(said.message)
        return self.failure(f"the {self._name} cannot be loaded:\n{said.message}")

    def ended(self, status: int) -> SortedRLError:
        """The error of a worker that ended while it loaded."""
        return self.failure(
            f"a worker ended with status {status} while it loaded the {self._name}; the module "
            "must not end the process"
        )

    def overdue(self) -> SortedRLError:
        """The error of a worker that has not loaded in time."""
        return self.failure(f"the {self._name} took more than {LOAD_SECONDS:.0f} seconds to load")

    @property
    def _name(self) -> str:
        return f"{self.what} {self.source.function!r}"


@dataclass(frozen=True, slots=True)
class Served(Generic[T]):
    """A worker that has loaded its source: its end of the socket, and the work that arrives."""

    connection: Connection
    setup: Setup
    loaded: T
    works: queue.SimpleQueue[Any]


def served(descriptor: int, load: Callable[[RewardSource], T]) -> Served[T] | None:
    """Load the source that the parent names, in the worker; `None` if that failed.

    A guard watches the process where there are guards. When the socket closes, the worker exits at
    once, with all processes it started.
    """
    if IS_GUARDED:
        guarded(descriptor)
    connection = Connection(descriptor)
    setup: Setup = connection.recv()
    try:
        loaded = load(setup.source)
    except ConfigError as error:
        connection.send(Refused(str(error), is_setting=True))
        return None
    except (Exception, SystemExit):  # noqa: BLE001  what the user's module does when imported
        connection.send(Refused(traceback.format_exc(), is_setting=False))
        return None
    if setup.memory_bytes is not None:
        limit_memory(setup.memory_bytes)
    works: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, works), daemon=True).start()
    return Served(connection, setup, loaded, works)


def _receive(connection: Connection, works: queue.SimpleQueue[Any]) -> None:
    while True:
        try:
            works.put(connection.recv())
        except (EOFError, OSError):
            if os.getpgrp() == os.getpid():  # without a guard
                os.killpg(os.getpid(), signal.SIGKILL)
            os._exit(0)
