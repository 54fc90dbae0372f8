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
from pathlib import Path

_CLONE = {"user": 0x10000000, "network": 0x40000000, "process": 0x20000000, "ipc": 0x08000000}
_PR_SET_NO_NEW_PRIVS, _PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 38, 1, 4
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEVICE = 1 << 14, 1 << 15
_RIGHTS_BY_VERSION = ((1, (1 << 13) - 1), (2, 1 << 13), (3, _TRUNCATE), (5, _IOCTL_DEVICE))
_NETWORK = 0b11  # bind and connect of TCP
_SCOPES = 0b11  # abstract sockets and signals
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_WEAK = 97


def main() -> None:
    """Set up everything, then run the program as `__main__`."""
    settings = json.loads(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        _separate(libc)
        _fork(libc)
        _limit(settings)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _landlock(libc, settings)
        _seccomp(libc)
    except OSError as error:
        if not settings["allow_weak"]:
            os.write(2, f"{error}\n".encode())
            os._exit(_WEAK)
        _limit(settings)
    sys.argv = ["program.py"]
    sys.path[:0] = [settings["folder"]]
    sys.path += settings["packages"]
    source = Path("program.py").read_text(encoding="utf-8", errors="surrogatepass")
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


def _fork(libc: ctypes.CDLL) -> None:
    """Go on as the first process of the new namespace; this one waits for it."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(128 - code if code < 0 else code)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # A first process ignores signals that it does not handle; limits must end it all the same.
    for number in (signal.SIGXCPU, signal.SIGXFSZ):
        signal.signal(number, lambda number, _: os._exit(128 + number))


def _limit(settings: dict[str, float]) -> None:
    memory, size = int(settings["memory_mib"]) << 20, int(settings["file_mib"]) << 20
    seconds = int(settings["seconds"]) + 1
    for kind, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, size),
        (resource.RLIMIT_NOFILE, 64),
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
_CLONE3, _IO_URING_SETUP = 435, 425
_X32 = 0x40000000
_DENIED = {
    # fork, vfork, ptrace, pivot_root, mount, umount2, kexec_load, add_key, request_key, keyctl,
    # unshare, perf_event_open, setns, bpf, userfaultfd
    "x86_64": (57, 58, 101, 155, 165, 166, 246, 248, 249, 250, 272, 298, 308, 321, 323),
    "aarch64": (117, 41, 40, 39, 104, 217, 218, 219, 97, 241, 268, 280, 282),
}
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
    refused = [(number, _NO_PERMISSION) for number in _DENIED[machine]]
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
