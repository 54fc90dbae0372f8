"""Worker processes of the pools of rewards and of environments, and the thread that runs them.

    caller --wake--> Supervisor thread --Setup, work--> WorkerProcess (its own process group)
       ^                    |          <--ready or Refused, results--
       +---- `changed` -----+

A pool has one `Supervisor`, and in its thread one `Workers`, which starts, limits and replaces the
processes; the calls and their results are the pool's own. Messages are Python objects of ours, over
a socket. All processes that a worker starts are tracked and killed with it:

    pool ── guard ── worker ── what the reward starts
               └──── what it leaves behind: daemons, processes in sessions of their own

On Linux every worker has a guard, a subreaper process that adopts orphaned descendants. So all
processes of a worker stay under its guard, and are killed when the worker ends, the pool releases
it, or the pool's process is killed. The guard runs no code of the reward.

A worker that kills its guard escapes: the reward is trusted, the answers it scores are not.
"""

from __future__ import annotations

import ctypes
import os
import queue
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from sortedrl.errors import ConfigError, SortedRLError
from sortedrl.rewards.functions import RewardSource

IS_GUARDED = sys.platform == "linux"
"""Whether this system supports guards."""

_PR_SET_CHILD_SUBREAPER = 36
_SHARED_MEMORY = "/dev/shm/"
_PROC = Path("/proc")
_KILL_ROUNDS = 1000
_MOMENTS = 20
_LISTS_CHILDREN = (_PROC / "self" / "task" / str(os.getpid()) / "children").exists()


def guarded(descriptor: int) -> None:
    """Fork; the child returns, and this process becomes its guard and never returns.

    `descriptor` is the socket to the pool. When the pool closes it, the guard kills all
    descendants.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if child == 0:
        return
    watch = select.poll()
    watch.register(descriptor, 0)  # only that it is closed
    worker = os.pidfd_open(child)
    watch.register(worker, select.POLLIN)
    if worker in dict(watch.poll()):
        _wait_for_descendants(os.getpid())
    status = kill_descendants(os.getpid()).get(child, 0)
    if os.WIFSIGNALED(status):
        with suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _wait_for_descendants(root: int) -> None:
    """Give processes that end with their parent a moment, such as Python's resource tracker."""
    for _ in range(_MOMENTS):
        if not any(map(_is_alive, _descendants(root))):
            return
        time.sleep(0.01)


def kill_descendants(root: int) -> dict[int, int]:
    """Kill all descendants of a process; returns the statuses of our own children.

    All are stopped before any is killed, so that none can start another one.
    """
    statuses: dict[int, int] = {}
    stopped: set[int] = set()
    quiet_rounds = 0
    for _ in range(_KILL_ROUNDS):
        found = set(_descendants(root))
        for pid in found - stopped:
            _signal(pid, signal.SIGSTOP)
        if found <= stopped:
            for pid in found:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.001)
        stopped |= found
        with suppress(ChildProcessError):
            while root == os.getpid():
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                statuses[pid] = status
        # Checked twice, since a process that is being reparented can be missed once.
        quiet_rounds = 0 if any(map(_is_alive, found)) else quiet_rounds + 1
        if quiet_rounds == 2:
            break
    return statuses


@dataclass(slots=True)
class ProcessTree:
    """A process with its descendants, and the shared-memory files that they created."""

    root: int
    _files_before: frozenset[str] = field(default_factory=lambda: frozenset(_shared_files()))
    _files: dict[str, int] = field(default_factory=dict)

    def memory_bytes(self) -> int:
        """Their private and shared memory; a shared page counts once.

        Shared-memory files count even if no process has them open any more.
        """
        private = shared = 0
        open_files: dict[tuple[int, int], int] = {}
        for pid in [self.root, *_descendants(self.root)]:
            for name, size in _memory_of(pid):
                if name in ("Pss_Anon", "SwapPss"):
                    private += size
                elif name == "Pss_Shmem":
                    shared += size
            open_files |= self._open_files(pid)
        for path in list(self._files):
            with suppress(OSError):
                found = Path(path).stat()
                open_files[found.st_dev, found.st_ino] = found.st_blocks * 512
        return private + max(shared, sum(open_files.values()))

    def remove_files(self) -> None:
        """Remove the shared-memory files that they were seen to create."""
        for path, inode in self._files.items():
            with suppress(OSError):
                found = Path(path).stat()
                if found.st_ino == inode and found.st_uid == os.getuid():
                    Path(path).unlink()

    def _open_files(self, pid: int) -> dict[tuple[int, int], int]:
        """The sizes of the files in memory that a process has open."""
        sizes: dict[tuple[int, int], int] = {}
        with suppress(OSError):
            for place in (_PROC / str(pid) / "fd").iterdir():
                with suppress(OSError):
                    path = str(place.readlink())
                    if path.startswith((_SHARED_MEMORY, "/memfd:")):
                        found = place.stat()
                        sizes[found.st_dev, found.st_ino] = found.st_blocks * 512
                        if path.startswith(_SHARED_MEMORY) and path not in self._files_before:
                            self._files[path] = found.st_ino
        return sizes


def _shared_files() -> Iterator[str]:
    with suppress(OSError):
        for path in Path(_SHARED_MEMORY).iterdir():
            yield str(path)


def _descendants(root: int) -> Iterator[int]:
    """The descendants of a process, parents first."""
    waiting = [root]
    while waiting:
        for child in children_of(waiting.pop()):
            yield child
            waiting.append(child)


def children_of(pid: int) -> list[int]:
    """The children of all threads of a process."""
    if not _LISTS_CHILDREN:
        pids = (int(path.name) for path in _PROC.glob("[0-9]*"))
        return [child for child in pids if _stat(child)[1:2] == [str(pid)]]
    children: list[int] = []
    with suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            with suppress(OSError):
                children += map(int, (task / "children").read_text().split())
    return children


def _memory_of(pid: int) -> Iterator[tuple[str, int]]:
    """The memory counters of a process, in bytes."""
    with suppress(OSError):
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()[1:]:
            name, _, size = line.partition(":")
            yield name, int(size.split()[0]) * 1024


def _is_alive(pid: int) -> bool:
    return _stat(pid)[:1] not in ([], ["Z"], ["X"])


def _stat(pid: int) -> list[str]:
    """State, parent and so on; empty for a process that has ended."""
    with suppress(OSError):
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return []


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def limit_memory(extra_bytes: int) -> None:
    """Limit the memory that the process may allocate beyond what it uses now."""
    for used in _data_bytes():
        most = used + extra_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard == resource.RLIM_INFINITY or most < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _data_bytes() -> Iterator[int]:
    """The private memory of this process, if the system reports it."""
    status = _PROC / "self" / "status"
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmData:"):
                yield int(line.split()[1]) * 1024


_SEND_SECONDS = 5
_END_SECONDS = 5.0
_BOOT = "import sys; sys.path[:] = {path!r}; from {module} import main; main({socket})"
_LOAD_SECONDS = 300.0
_MEASURE_SECONDS = 0.2
_GIB = 1 << 30
T = TypeVar("T")
Wait = Callable[[Iterable[Connection], float | None], Sequence[Connection]]
"""Waits for one of these to have a message, at most so many seconds; returns those that have."""


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


@dataclass(frozen=True, slots=True)
class Lost:
    """In place of a message: the process has ended."""

    status: int


class WorkerLostError(Exception):
    """The process has ended, or does not receive."""


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """A process and our end of the socket to it."""

    process: subprocess.Popen[bytes]
    """The worker, or its guard."""
    connection: Connection
    tree: ProcessTree
    number: int
    """That of its place in the pool; a replacement has the number of the worker it replaces."""
    started: float
    is_ready: bool = False
    """Whether it has loaded its source."""
    loaded_bytes: int = 0
    """Memory in use after loading."""

    @classmethod
    def start(cls, setup: Setup, *, module: str, number: int) -> WorkerProcess:
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
        worker = cls(
            process,
            Connection(ours.detach()),
            ProcessTree(process.pid),
            number=number,
            started=time.monotonic(),
        )
        worker.connection.send(setup)
        return worker

    def send(self, message: object) -> None:
        """Send a message; raises `WorkerLostError` if that fails."""
        try:
            self.connection.send(message)
        except OSError as error:
            raise WorkerLostError from error

    def received(self) -> Sequence[Any]:
        """All messages since the last call; raises `WorkerLostError` once it has ended."""
        messages: list[Any] = []
        try:
            while self.connection.poll():
                messages.append(self.connection.recv())
        except (EOFError, OSError) as error:
            if not messages:
                raise WorkerLostError from error
        return messages

    def grown_bytes(self) -> int:
        """Memory of the process tree beyond what loading took; 0 where it is not known."""
        return self.tree.memory_bytes() - self.loaded_bytes if IS_GUARDED else 0

    def disconnect(self) -> None:
        """Close the socket: the guard kills the process tree and exits."""
        self.grown_bytes()  # sees its files in shared memory once more
        self.connection.close()

    def end(self) -> int:
        """Kill the process tree; returns the exit status."""
        self.disconnect()
        if IS_GUARDED:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_SECONDS)
            if self.process.returncode is None:
                kill_descendants(self.process.pid)
        with suppress(ProcessLookupError):  # it may have ended already
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
        """Whether the thread should continue."""
        return not self.is_closing and self.error is None

    def wake(self) -> None:
        """Let the thread look at what has changed; never blocks."""
        try:
            os.write(self._wake_writer.fileno(), b".")
        except (BlockingIOError, OSError):
            return  # it is running, or has ended

    def wait(self, connections: Iterable[Connection], seconds: float | None) -> list[Connection]:
        """Wait in the thread for a message, a call of `wake` or the time.

        Returns the connections that have a message.
        """
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The workers of a pool: what they load and run, how many there are, and their limits."""

    what: str
    """reward or environment."""
    source: RewardSource
    failure: Callable[[str], SortedRLError]
    """Makes the error where loading fails."""
    module: str
    """Its `main` is the worker's side."""
    num_workers: int
    memory_gib: float | None
    """Of each process tree, beyond what loading took."""
    time_limit_seconds: float | None = None
    """Of one call, where the worker itself enforces it."""

    @property
    def setup(self) -> Setup:
        """The first message to a worker."""
        return Setup(
            replace(self.source, options=dict(self.source.options)),
            None if self.memory_gib is None else int(self.memory_gib * _GIB),
            self.time_limit_seconds,
        )

    def refused(self, refused: Refused) -> SortedRLError:
        """The error of a source that cannot be loaded."""
        if refused.is_setting:
            return ConfigError(refused.message)
        return self.failure(f"the {self._name} cannot be loaded:\n{refused.message}")

    def ended(self, status: int) -> SortedRLError:
        """The error of a worker that ended while it loaded."""
        return self.failure(
            f"a worker ended with status {status} while it loaded the {self._name}; the module "
            "must not end the process"
        )

    def overdue(self) -> SortedRLError:
        """The error of a worker that has not loaded in time."""
        return self.failure(f"the {self._name} took more than {_LOAD_SECONDS:.0f} seconds to load")

    @property
    def _name(self) -> str:
        return f"{self.what} {self.source.function!r}"


class Worker(Protocol):
    """What a pool keeps of one worker, with its process."""

    @property
    def process(self) -> WorkerProcess:
        """The process."""


W = TypeVar("W", bound=Worker)


class Workers(Generic[W]):
    """The worker processes of a pool: started, received from, limited and replaced; in one thread.

    The first message of a worker says that it has loaded its source.
    """

    def __init__(self, settings: WorkerSettings, worker: Callable[[WorkerProcess], W]) -> None:
        """None is started yet; `worker` makes what the pool keeps of a new process."""
        self._settings = settings
        self._worker = worker
        self._workers: dict[int, W] = {}
        self._next_measure = 0.0

    def __iter__(self) -> Iterator[W]:
        """Those that are alive, by number; they may be ended meanwhile."""
        return iter([self._workers[number] for number in sorted(self._workers)])

    def start_missing(self) -> int:
        """Start workers until there are as many as there should be; returns how many."""
        missing = sorted(set(range(self._settings.num_workers)) - self._workers.keys())
        for number in missing:
            process = WorkerProcess.start(
                self._settings.setup, module=self._settings.module, number=number
            )
            self._workers[number] = self._worker(process)
        return len(missing)

    def receive(self, wait: Wait, *, limits: Sequence[float]) -> Iterator[tuple[W, Any]]:
        """The workers that have sent something, with each message; `Lost` for one that has ended.

        Waits for a message, or until the earliest of the pool's own time limits: it has some
        whenever a worker is busy. Raises where a worker cannot load its source, or not in time.
        """
        times = [*limits]
        if limits and self._settings.memory_gib is not None:
            times.append(self._next_measure)
        times += [w.process.started + _LOAD_SECONDS for w in self if not w.process.is_ready]
        seconds = max(0.0, min(times) - time.monotonic()) if times else None
        by_connection = {worker.process.connection: worker for worker in self}
        for connection in wait(by_connection, seconds):
            worker = by_connection[connection]
            try:
                messages = worker.process.received()
            except WorkerLostError:
                status = self.end(worker)
                if not worker.process.is_ready:
                    raise self._settings.ended(status) from None
                yield worker, Lost(status)
                continue
            for message in messages:
                if isinstance(message, Refused):
                    raise self._settings.refused(message)
                if not worker.process.is_ready:
                    worker.process.is_ready = True
                    if self._settings.memory_gib is not None:
                        worker.process.loaded_bytes = worker.process.grown_bytes()
                yield worker, message
        latest_start = time.monotonic() - _LOAD_SECONDS
        if any(not w.process.is_ready and w.process.started < latest_start for w in self):
            raise self._settings.overdue()

    def over_memory_limit(self, workers: Iterable[W]) -> list[W]:
        """Those of these workers that exceed the memory limit; measured every so often."""
        limit, now = self._settings.memory_gib, time.monotonic()
        if limit is None or now < self._next_measure:
            return []
        self._next_measure = now + _MEASURE_SECONDS
        return [worker for worker in workers if worker.process.grown_bytes() > limit * _GIB]

    def end(self, worker: W) -> int:
        """Kill a worker, which `start_missing` replaces; returns its exit status."""
        del self._workers[worker.process.number]
        return worker.process.end()

    def close(self) -> None:
        """Kill all workers."""
        for worker in self:
            worker.process.disconnect()
        for worker in self:
            self.end(worker)


class PoolConnection(Connection):
    """The worker's end of the socket.

    When the pool closes its end, the worker exits at once, with all processes it started.
    """

    def send(self, obj: object) -> None:
        """Send a message to the pool."""
        try:
            super().send(obj)
        except OSError:
            _leave()

    def recv(self) -> Any:  # noqa: ANN401  any message of the pool
        """Wait for the pool's next message."""
        try:
            return super().recv()
        except (EOFError, OSError):
            _leave()


def _leave() -> NoReturn:
    if os.getpgrp() == os.getpid():  # without a guard
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


@dataclass(frozen=True, slots=True)
class Served(Generic[T]):
    """The worker's side once its source is loaded: its end of the socket, and the incoming work."""

    connection: PoolConnection
    setup: Setup
    loaded: T
    works: queue.SimpleQueue[Any]


def served(descriptor: int, load: Callable[[RewardSource], T]) -> Served[T] | None:
    """Load the source that the parent names, in the worker; `None` if that failed.

    A guard watches the process where there are guards.
    """
    if IS_GUARDED:
        guarded(descriptor)
    connection = PoolConnection(descriptor)
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


def _receive(connection: PoolConnection, works: queue.SimpleQueue[Any]) -> None:
    while True:
        works.put(connection.recv())
