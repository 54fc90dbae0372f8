r"""Rewards for programs, run against tests in a sandbox.

The last fenced block of the answer is the program, or all of it where there is none. The row has
its tests in the field `tests`:

    ["assert add(1, 2) == 3", ...]                 run after the program, in the same process
    [{"input": "1 2\n", "output": "3\n"}, ...]   a run each; white space at line ends is ignored

Tests of the first kind share a process with the program, so a program made to cheat them can; those
of the second kind only see what it prints.

`run_python` runs code in a process that can reach nothing but its own folder. What holds it
(Linux), each set up by the process itself before the code begins:

    user and network namespaces    no network, not even the machine's own addresses
    process namespace              it sees no other process, and all its processes end with it
    Landlock                       files: read Python's own, write in its folder alone; where the
                                   kernel has it, no signals and no sockets out of the sandbox
    seccomp                        no further processes (threads are allowed), no mounts, no
                                   namespaces, none of the system calls that sandboxes break at
    limits (setrlimit)             seconds of CPU, memory, open files, size of files
    no new privileges              no setuid program gains anything
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
_WEAK = 97
"""The exit code of a launcher that misses a mechanism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What a program may use."""

    seconds: float = 5.0
    """Of the wall clock; CPU time is limited to the next whole second."""
    memory_mib: int = 512
    """Address space of each process."""
    file_mib: int = 16
    """Size of each file it writes, output included."""
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
        (folder / "work").mkdir()
        program = folder / "work" / "program.py"
        program.write_text(code, encoding="utf-8", errors="surrogatepass")
        (folder / "input").write_text(input, encoding="utf-8", errors="surrogatepass")
        settings = {
            **asdict(limits),
            "folder": str(folder / "work"),
            "readable": _readable(),
            "packages": _packages(),
        }
        with (
            (folder / "input").open("rb") as given,
            (folder / "output").open("wb") as output,
            (folder / "errors").open("wb") as errors,
        ):
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_LAUNCHER), json.dumps(settings)],
                stdin=given,
                stdout=output,
                stderr=errors,
                cwd=folder / "work",
                env=_ENVIRONMENT,
                start_new_session=True,
            )
            is_late = False
            try:
                process.wait(limits.seconds + _START_SECONDS)
            except subprocess.TimeoutExpired:
                is_late = True
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said, wrong = _read(folder / "output"), _read(folder / "errors")
    if process.returncode == _WEAK:
        raise ConfigError(
            f"this machine cannot hold the code of a model in a sandbox: {wrong.strip()}; run on a "
            "Linux kernel with user namespaces and Landlock (5.13 or later), or set allow_weak if "
            "you trust the code"
        )
    is_late |= process.returncode == 128 + signal.SIGXCPU
    ending: Literal["done", "failed", "timeout"] = "done" if process.returncode == 0 else "failed"
    return SandboxResult(output=said, errors=wrong, ending="timeout" if is_late else ending)


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
    paths = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), str(_LAUNCHER)}
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
