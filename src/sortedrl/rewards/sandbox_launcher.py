"""The process of a sandbox: gives up what it can reach, then runs the program.

Run by `sandbox.run_python` with `python -I -S`; imports nothing beyond the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from contextlib import suppress
from pathlib import Path

_CLONE = {
    "user": 0x10000000,
    "mount": 0x00020000,
    "network": 0x40000000,
    "process": 0x20000000,
    "ipc": 0x08000000,
}
_PR_SET_NO_NEW_PRIVS, _PR_SET_PDEATHSIG, _PR_CAPBSET_DROP = 38, 1, 24
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEVICE = 1 << 14, 1 << 15
_RIGHTS_BY_VERSION = ((1, (1 << 13) - 1), (2, 1 << 13), (3, _TRUNCATE), (5, _IOCTL_DEVICE))
_NETWORK = 0b11  # bind and connect of TCP
_SCOPES = 0b11  # abstract sockets and signals
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_FOLDER = "/sandbox"
_MOST_FILES, _MOST_THREADS = 4096, 256


def main() -> None:
    """Set up everything, then run the program as `__main__`."""
    settings = json.loads(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    source = Path("program.py").read_text(encoding="utf-8", errors="surrogatepass")
    try:
        _separate(libc)
        _fork(libc, settings["report"])
        _enter(libc, settings)
        _limit(settings)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _drop_capabilities(libc)
        _landlock(libc, settings)
        _seccomp(libc)
    except OSError as error:
        if not settings["allow_weak"]:
            os.write(settings["report"], str(error).encode())
            os._exit(1)
        _limit(settings)
    os.close(settings["report"])  # the program must not write there
    with suppress(OSError):  # larger than its folder; only its tracebacks show less then
        Path("program.py").write_text(source, encoding="utf-8", errors="surrogatepass")
    sys.argv = ["program.py"]
    sys.path[:0] = [str(Path.cwd())]
    sys.path += settings["packages"]
    exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})


def _separate(libc: ctypes.CDLL) -> None:
    """Namespaces of its own for users, network, processes and shared memory."""
    uid, gid = os.getuid(), os.getgid()
    flags = 0
    for flag in _CLONE.values():
        flags |= flag
    if libc.unshare(flags) != 0:
        raise OSError(f"no namespaces of its own ({os.strerror(ctypes.get_errno())})")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        try:
            Path(f"/proc/self/{name}").write_text(text)
        except OSError as error:
            raise OSError(f"the user namespace cannot be set up ({error})") from error


def _fork(libc: ctypes.CDLL, report: int) -> None:
    """Fork; the child continues as the first process of the new namespace, and this one waits."""
    child = os.fork()
    if child:
        os.close(report)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(128 - code if code < 0 else code)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # A first process ignores signals that it does not handle; limits must end it all the same.
    for number in (signal.SIGXCPU, signal.SIGXFSZ):
        signal.signal(number, lambda number, _: os._exit(128 + number))


_READ_ONLY, _NO_SETUID, _NO_DEVICES = 1, 2, 4
_BIND, _RECURSIVE, _PRIVATE = 4096, 16384, 1 << 18
_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _HERE, _AT_RECURSIVE = 442, -100, 0x8000


def _enter(libc: ctypes.CDLL, settings: dict[str, object]) -> None:
    """A file system of its own: what may be read, read-only, and an empty folder in memory.

    Landlock guards contents only. Here nothing else has a path: no mode or time to change, no
    socket of another program to connect to, and everything written is gone with the process.
    """
    root = Path(str(settings["root"]))
    _mount(libc, None, "/", None, _PRIVATE | _RECURSIVE)
    _mount(libc, "tmpfs", str(root), "tmpfs", _NO_SETUID | _NO_DEVICES, "size=1m,mode=755")
    bound: list[str] = []
    readable = settings["readable"]
    assert isinstance(readable, list), "paths"
    for path in readable:  # sorted: a folder before what is in it
        if any(Path(path).is_relative_to(other) for other in bound):
            continue
        place = root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir() if Path(path).is_dir() else place.touch()
        _mount(libc, path, str(place), None, _BIND | _RECURSIVE)
        _lock(libc, str(place), _AT_RECURSIVE)
        bound.append(path)
    folder, old = root / _FOLDER.lstrip("/"), root / "old"
    folder.mkdir()
    old.mkdir()
    size = f"size={settings['folder_mib']}m,nr_inodes={_MOST_FILES},mode=700"
    _mount(libc, "tmpfs", str(folder), "tmpfs", _NO_SETUID | _NO_DEVICES, size)
    number = _PIVOT_ROOT.get(os.uname().machine, -1)
    if libc.syscall(number, str(root).encode(), str(old).encode()) != 0:
        raise OSError(f"no file system of its own ({os.strerror(ctypes.get_errno())})")
    os.chdir(_FOLDER)
    settings["folder"] = _FOLDER
    if libc.umount2(b"/old", _DETACH) != 0:
        raise OSError(f"the old root stays ({os.strerror(ctypes.get_errno())})")
    _lock(libc, "/", 0)


def _mount(
    libc: ctypes.CDLL, source: str | None, place: str, kind: str | None, flags: int, data: str = ""
) -> None:
    given = [None if text is None else text.encode() for text in (source, place, kind)]
    if libc.mount(*given, ctypes.c_ulong(flags), data.encode()) != 0:
        raise OSError(f"{place} cannot be mounted ({os.strerror(ctypes.get_errno())})")


def _lock(libc: ctypes.CDLL, place: str, flags: int) -> None:
    """Make a mount read-only, for contents as well as for modes, owners and times."""
    attributes = struct.pack("QQQQ", _READ_ONLY | _NO_SETUID, 0, 0, 0)
    path = place.encode()
    if libc.syscall(_MOUNT_SETATTR, _HERE, path, flags, attributes, len(attributes)) != 0:
        raise OSError(f"{place} cannot be made read-only ({os.strerror(ctypes.get_errno())})")


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Those that the first process of a user namespace has."""
    number = 0
    while libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    header = struct.pack("Ii", 0x20080522, 0)
    if libc.capset(header, bytes(24)) != 0:
        raise OSError(f"capabilities are kept ({os.strerror(ctypes.get_errno())})")


def _limit(settings: dict[str, float]) -> None:
    memory, size = int(settings["memory_mib"]) << 20, int(settings["file_mib"]) << 20
    seconds = int(settings["seconds"]) + 1
    for kind, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, size),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, _MOST_THREADS),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(kind, (most, most + (kind == resource.RLIMIT_CPU)))


def _landlock(libc: ctypes.CDLL, settings: dict[str, list[str]]) -> None:
    version = libc.syscall(_CREATE_RULESET, None, 0, _GET_VERSION)
    if version < 1:
        raise OSError(f"no Landlock in this kernel ({os.strerror(ctypes.get_errno())})")
    handled = 0
    for least, rights in _RIGHTS_BY_VERSION:
        handled |= rights if version >= least else 0
    network = _NETWORK if version >= 4 else 0
    scopes = _SCOPES if version >= 6 else 0
    attributes = struct.pack("QQQ", handled, network, scopes)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = libc.syscall(_CREATE_RULESET, attributes, size, 0)
    if ruleset < 0:
        raise OSError(f"Landlock refuses ({os.strerror(ctypes.get_errno())})")
    _allow(libc, ruleset, str(settings["folder"]), handled)
    for path in settings["readable"]:
        rights = _READ_FILE | _READ_DIR | _EXECUTE
        if path.startswith("/dev/"):
            rights |= _WRITE_FILE
        _allow(libc, ruleset, path, rights & handled)
    if libc.syscall(_RESTRICT_SELF, ruleset, 0) != 0:
        raise OSError(f"Landlock refuses ({os.strerror(ctypes.get_errno())})")
    os.close(ruleset)


_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE_CALL = {"x86_64": 56, "aarch64": 220}
_PRCTL_CALL = {"x86_64": 157, "aarch64": 167}
_CLONE3, _IO_URING_SETUP = 435, 425
_X32 = 0x40000000
_DENIED = {
    "x86_64": {
        "processes": (57, 58),  # fork, vfork
        "other processes": (101, 310, 311, 312),  # ptrace, process_vm_readv and _writev, kcmp
        "files": (155, 161, 165, 166, 303, 304),  # pivot_root, chroot, mount, umount2, handles
        "namespaces": (272, 308),  # unshare, setns
        "keys": (248, 249, 250),
        "the kernel": (246, 298, 321, 323),  # kexec_load, perf_event_open, bpf, userfaultfd
        "sockets": (41,),  # a network namespace holds neither vsock nor sockets that have a path
        "memory outside of the limit": (29, 64, 68, 240, 319),  # shm, sem, msg, mq, memfd
    },
    "aarch64": {
        "other processes": (117, 270, 271, 272),
        "files": (41, 51, 40, 39, 264, 265),
        "namespaces": (97, 268),
        "keys": (217, 218, 219),
        "the kernel": (104, 241, 280, 282),
        "sockets": (198,),
        "memory outside of the limit": (194, 190, 186, 180, 279),
    },
}
# open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, pidfd_getfd, mount_setattr, memfd_secret
_DENIED_EVERYWHERE = (428, 429, 430, 431, 432, 433, 438, 442, 447)
_LOAD, _EQUAL, _GREATER, _SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NO_PERMISSION, _NO_SUCH_CALL = 1, 38
_CLONE_THREAD = 0x00010000
_PR_SET_SECCOMP, _FILTER = 22, 2


def _seccomp(libc: ctypes.CDLL) -> None:
    """Refuse further processes, and system calls that sandboxes break at."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(f"no seccomp filter for {machine}")
    denied = [*_DENIED_EVERYWHERE, *(n for numbers in _DENIED[machine].values() for n in numbers)]
    refused = [(number, _NO_PERMISSION) for number in denied]
    # glibc falls back to clone, whose flags can be seen.
    refused += [(_CLONE3, _NO_SUCH_CALL), (_IO_URING_SETUP, _NO_SUCH_CALL)]
    program = [
        (_LOAD, 0, 0, 4),  # the architecture
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the number of the call
        (_GREATER, 0, 1, _X32),
        (_RETURN, 0, 0, _ERRNO | _NO_SUCH_CALL),
    ]
    for number, errno in refused:
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno)]
    program += [
        (_EQUAL, 0, 4, _PRCTL_CALL[machine]),
        (_LOAD, 0, 0, 16),  # what it sets: not whether it dies with the launcher
        (_EQUAL, 0, 1, _PR_SET_PDEATHSIG),
        (_RETURN, 0, 0, _ERRNO | _NO_PERMISSION),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 3, _CLONE_CALL[machine]),
        (_LOAD, 0, 0, 16),  # the low half of its flags
        (_SET, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _ERRNO | _NO_PERMISSION),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, header, 0, 0) != 0:
        raise OSError(f"no seccomp filters ({os.strerror(ctypes.get_errno())})")


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH)
    try:
        if not Path(path).is_dir():
            rights &= _FILE_RIGHTS
        rule = struct.pack("=Qi", rights, descriptor)
        if libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0) != 0:
            raise OSError(f"Landlock refuses {path} ({os.strerror(ctypes.get_errno())})")
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()
