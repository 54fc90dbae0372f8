r"""Rewards for programs, run against tests in a sandbox.

The last fenced block of the answer is the program, or all of it where there is none. The row has
its tests in the field `tests`:

    ["assert add(1, 2) == 3", ...]                 run after the program, in the same process
    [{"input": "1 2\n", "output": "3\n"}, ...]   a run each; white space at line ends is ignored

Tests of the first kind share a process with the program, so a program made to cheat them can; those
of the second kind only see what it prints.

`run_python` runs code in a process that can reach nothing but its own folder. What holds it
(Linux), each set up by the process itself before the code begins:

    mount namespace                files: Python's own, read-only, and an empty folder in memory of
                                   limited size; nothing else has a path
    user and network namespaces    no network, not even the machine's own addresses
    process namespace              it sees no other process, and all its processes end with it
    Landlock                       the same rules for files once more; where the kernel has it, no
                                   signals and no sockets out of the sandbox
    seccomp                        no further processes (threads are allowed), no sockets of any
                                   kind, no mounts, no namespaces, no memory beside the limit,
                                   none of the system calls that sandboxes break at
    limits (setrlimit)             seconds of CPU, memory, open files, size of files, threads
                                   (where the run is not the machine's root user)
    no capabilities or privileges  neither of the namespace's own, nor from setuid programs
    wall clock                     killed after the time limit, with everything it started

What it does not stop: code that exploits the kernel or the CPU, which is shared. It can read the
files of Python, of the installed packages and of /usr (not /etc, /home, /tmp or the folder of the
run), and can use its limits up. It is meant for models that try things out; against people who
attack you, put a virtual machine around the run.

Where a mechanism is missing, `run_python` refuses, unless `allow_weak` is set: then the code runs
with what there is, at least the limits.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from sortedrl.errors import ConfigError, DataError
from sortedrl.types import Prompt

_READ_LIMIT = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What a program may use."""

    seconds: float = 5.0
    """Of the wall clock; CPU time is limited to the next whole second."""
    memory_mib: int = 512
    """Address space of each process."""
    file_mib: int = 16
    """Size of each file it writes, output included."""
    folder_mib: int = 64
    """Size of its folder, which lies in memory."""
    allow_weak: bool = False
    """Run even where namespaces or Landlock are missing on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """How a program ended."""

    output: str
    errors: str
    ending: Literal["done", "failed", "timeout"]
    """done: exit code 0. failed: another one, or killed by a limit. timeout: killed."""


def run_python(code: str, limits: SandboxLimits | None = None, *, input: str = "") -> SandboxResult:
    """Run a program in a folder of its own, which is removed afterwards."""
    limits = SandboxLimits() if limits is None else limits
    with tempfile.TemporaryDirectory(prefix="sandbox-") as name:
        folder = Path(name)
        for part in ("work", "root"):
            (folder / part).mkdir()
        program = folder / "work" / "program.py"
        program.write_text(code, encoding="utf-8", errors="surrogatepass")
        (folder / "input").write_text(input, encoding="utf-8", errors="surrogatepass")
        code_of_exit, is_late, missing = _launched(folder, limits)
        output, errors = _read(folder / "output"), _read(folder / "errors")
    if missing:
        raise ConfigError(
            f"this machine cannot hold the code of a model in a sandbox: {missing}; run on a "
            "Linux kernel with user namespaces and Landlock (5.13 or later), or set allow_weak if "
            "you trust the code"
        )
    is_late |= code_of_exit == 128 + signal.SIGXCPU
    ending: Literal["done", "failed", "timeout"] = "done" if code_of_exit == 0 else "failed"
    return SandboxResult(output=output, errors=errors, ending="timeout" if is_late else ending)


def _launched(folder: Path, limits: SandboxLimits) -> tuple[int, bool, str]:
    """The exit code, whether it was killed for its time, and the mechanism that was missing."""
    reading, writing = os.pipe()  # not the exit code: that is the program's
    settings = {
        **asdict(limits),
        "folder": str(folder / "work"),
        "root": str(folder / "root"),
        "report": writing,
        "readable": _readable(),
        "packages": _packages(),
    }
    with (
        os.fdopen(reading, "rb") as report,
        (folder / "input").open("rb") as given,
        (folder / "output").open("wb") as output,
        (folder / "errors").open("wb") as errors,
    ):
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_LAUNCHER), json.dumps(settings)],
                stdin=given,
                stdout=output,
                stderr=errors,
                cwd=folder / "work",
                env=_ENVIRONMENT,
                pass_fds=(writing,),
                start_new_session=True,
            )
        finally:
            os.close(writing)
        is_late = False
        try:
            process.wait(limits.seconds + _START_SECONDS)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return process.returncode, is_late, report.read().decode(errors="replace")


_START_SECONDS = 2.0
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "PATH": "/usr/bin:/bin",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")


def _readable() -> list[str]:
    """What Python needs to run: its own folders, and those of the system's libraries."""
    paths = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()}
    system = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
    devices = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
    return sorted(p for p in {*paths, *system, *devices} if Path(p).exists())


def _packages() -> list[str]:
    return [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_READ_LIMIT).decode(errors="replace")


_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def code_reward(
    prompt: Prompt,
    response: str,
    *,
    all_right: float = 1.0,
    share: float = 0.0,
    seconds: float = 2.0,
    memory_mib: int = 512,
    allow_weak: bool = False,
) -> Mapping[str, float]:
    """`all_right` if every test passes, and otherwise `share` times the share of tests that do."""
    limits = SandboxLimits(seconds=seconds, memory_mib=memory_mib, allow_weak=allow_weak)
    tests = _tests(prompt)
    program = program_of(response)
    passed = [_passes(program, test, limits) for test in tests]
    is_right = all(passed)
    part = sum(passed) / len(passed)
    return {
        "reward": all_right if is_right else share * part,
        "correct": float(is_right),
        "tests": part,
    }


def lowest_code_reward(options: Mapping[str, float]) -> float:
    """What no passed test earns."""
    return min(0.0, options["all_right"])


def program_of(response: str) -> str:
    r"""The program in an answer.

    >>> program_of("So:\n```python\nprint(1)\n```\nDone.")
    'print(1)\n'
    """
    blocks = _FENCED.findall(response)
    return blocks[-1] if blocks else response


def _tests(prompt: Prompt) -> Sequence[str | Mapping[str, str]]:
    tests = prompt.fields.get("tests")
    if isinstance(tests, str):
        tests = json.loads(tests) if tests.lstrip().startswith("[") else [tests]
    if not isinstance(tests, list | tuple) or not tests:
        raise DataError(
            str(prompt.fields.get("place", "row")),
            "the reward code_reward needs a column tests: a list of asserts, or of objects with "
            f"input and output, got {tests!r:.80}",
        )
    return tests


def _passes(program: str, test: str | Mapping[str, str], limits: SandboxLimits) -> bool:
    if isinstance(test, str):
        # An early exit must not look like success.
        mark = secrets.token_hex(8)
        result = run_python(f"{program}\n{test}\nprint('\\n{mark}')\n", limits)
        return result.ending == "done" and result.output.rstrip().endswith(mark)
    result = run_python(program, limits, input=test["input"])
    return result.ending == "done" and _lines(result.output) == _lines(test["output"])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
