"""Process limits of rewards: all processes that a worker starts are tracked and killed with it.

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
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

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
        for child in _children(waiting.pop()):
            yield child
            waiting.append(child)


def _children(pid: int) -> list[int]:
    """The children of all threads of a process."""
    if not _LISTS_CHILDREN:
        everybody = (int(path.name) for path in _PROC.glob("[0-9]*"))
        return [child for child in everybody if _stat(child)[1:2] == [str(pid)]]
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
