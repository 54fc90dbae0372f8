"""Commands and programs in processes of their own that start in no time.

They are forked from one process that has imported everything heavy, and are otherwise processes
like any other: to be killed, interrupted, or waited for. They inherit the environment of the test.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import resource
import runpy
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

_HEAVY = ["torch.utils.tensorboard", "sortedrl.runs.opening"]


@cache
def _forks():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_HEAVY)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # read once, when torch is loaded
    multiprocessing.forkserver.ensure_running()
    if before is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = before
    return context


class Forked:
    """A process of its own; used like a `Popen`."""

    def __init__(self, work, *words, folder, out, err, file_bytes=None, environment=None):
        """Call `work(*words)` in a folder; no file that it writes may outgrow `file_bytes`."""
        there = dict(os.environ) | (environment or {})
        self._process = _forks().Process(
            target=_begin, args=(work, words, folder, out, err, file_bytes, there)
        )
        self._process.start()
        self.pid = self._process.pid

    def poll(self):
        """Its exit code, or `None` while it runs; negative after a signal."""
        return self._process.exitcode

    def kill(self):
        self._process.kill()

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("a forked process", timeout)
        return self.poll()


def _begin(work, words, folder, out, err, file_bytes, environment):
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    null = os.open(os.devnull, os.O_RDWR)
    writable = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    for number, path in ((0, None), (1, out), (2, err)):
        os.dup2(null if path is None else os.open(path, writable, 0o644), number)
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    sys.exit(work(*words))


def command(*words):
    """The work of `sortedrl WORDS`."""
    from sortedrl.cli import main

    sys.argv = ["sortedrl", *words]
    return main(list(words))


def _program(code):
    """The work of `python -c CODE`."""
    sys.argv = ["-c"]
    sys.path.insert(0, "")
    module = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), vars(module))


def _script(path, *words):
    """The work of `python PATH WORDS`."""
    sys.argv = [path, *words]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def run_command(*words, folder=".", timeout=300):
    """Run `sortedrl WORDS` to its end, with all it has said."""
    return _run(command, *words, folder=folder, timeout=timeout)


def run_program(code, *, folder=".", timeout=300, **environment):
    """Run `python -c CODE` to its end, with all it has said."""
    return _run(_program, code, folder=folder, timeout=timeout, environment=environment)


def run_script(path, *words, folder=".", timeout=300):
    """Run `python PATH WORDS` to its end, with all it has said."""
    return _run(_script, str(path), *map(str, words), folder=folder, timeout=timeout)


def _run(work, *words, folder, timeout, environment=None):
    with tempfile.TemporaryDirectory() as logs:
        out, err = Path(logs) / "out", Path(logs) / "err"
        process = Forked(work, *words, folder=folder, out=out, err=err, environment=environment)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())
