"""The sandbox: what code may do, what it may not, and the rewards and tools that use it."""

import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from sortedrl.environments.adapters import made
from sortedrl.environments.builtin import PythonTool
from sortedrl.rewards.code import SandboxLimits, code_reward, program_of, run_python
from sortedrl.types import Prompt

LIMITS = SandboxLimits(seconds=1.0, memory_mib=256, file_mib=1)


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(6 * 7)", "42\n"),
        ("open('a', 'w').write('b'); print(open('a').read())", "b\n"),
        ("import math; print(math.factorial(20))", "2432902008176640000\n"),
        (
            "import threading as t; x = t.Thread(target=print, args=(5,)); x.start(); x.join()",
            "5\n",
        ),
        ("print(input()[::-1])", "cba\n"),
    ],
)
def test_code_may_compute_and_use_its_folder(code, output):
    result = run_python(code, SandboxLimits(seconds=20), input="abc\n")
    assert (result.output, result.ending) == (output, "done"), result.errors


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os; os.listdir('/home')", "Error: [Errno "),
        ("open('/etc/passwd').read()", "Error: [Errno "),
        ("import os; os.listdir('/proc')", "Error: [Errno "),
        ("open('/tmp/left_behind', 'w')", "Error: [Errno "),
        ("open(__import__('sys').executable, 'ab')", "Error"),
        ("import socket as n; n.socket()", "Operation not permitted"),
        ("import socket as n; n.socket(n.AF_UNIX)", "Operation not permitted"),
        ("import socket as n; n.socket(n.AF_VSOCK)", "Operation not permitted"),
        ("import os; os.memfd_create('beside the limit')", "Operation not permitted"),
        ("import os; os.chroot('.')", "Operation not permitted"),
        (
            "import ctypes; assert ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) >= 0",
            "AssertionError",
        ),
        (
            "for n in range(100): open(str(n), 'wb').write(bytes(1 << 20))",
            "No space left on device",
        ),
        ("import os; os.fork()", "Operation not permitted"),
        ("import subprocess; subprocess.run(['true'])", "Operation not permitted"),
        ("import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0", "AssertionError"),
        ("x = bytearray(10**9)", "MemoryError"),
    ],
)
def test_code_reaches_nothing_else(code, error):
    result = run_python(code, SandboxLimits(seconds=20, memory_mib=256))
    assert result.ending == "failed"
    assert error in result.errors


def test_code_changes_neither_modes_nor_times_of_files_outside(tmp_path):
    file = tmp_path / "file"
    file.write_text("precious")
    before = file.stat()
    for call in ("chmod(FILE, 0o777)", "utime(FILE, (1, 1))", "chown(FILE, -1, -1)", "stat(FILE)"):
        result = run_python(f"FILE = {str(file)!r}\nimport os\nos.{call}")
        assert "FileNotFoundError" in result.errors
    assert file.stat() == before
    result = run_python("import os, sys; os.utime(sys.prefix)")
    assert "Read-only file system" in result.errors


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(1000)"])
def test_code_ends_at_the_time_limit(code):
    assert run_python(code, LIMITS).ending == "timeout"


def test_code_that_leaves_its_process_group_ends_at_the_time_limit_too(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = run_python(
        "import ctypes, os, time; print(ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)); os.setsid()\n"
        "print('here', flush=True); time.sleep(60)",
        LIMITS,
    )
    assert (result.output, result.ending) == ("-1\nhere\n", "timeout")
    deadline = time.monotonic() + 30
    while any(str(tmp_path) in line for line in command_lines()):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.05)


def command_lines():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield path.read_text(errors="replace")


def test_code_that_exits_as_it_likes_is_no_fault_of_the_machine():
    assert run_python("import sys; sys.exit(97)").ending == "failed"


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare of util-linux")
def test_without_namespaces_code_runs_only_where_that_is_allowed():
    program = (
        "from sortedrl.rewards.code import *\n"
        "print(run_python('print(5)', SandboxLimits(allow_weak=True)).output)\n"
        "run_python('print(6)')"
    )
    shell = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-U", "-r", "sh", "-c", shell, sys.executable, program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "5"
    assert "no namespaces of its own" in done.stderr


def test_what_code_leaves_in_its_folder_is_gone_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "import os\nfor _ in range(2000): os.mkdir('d'); os.chdir('d')\nprint('deep')"
    assert run_python(code, SandboxLimits(seconds=20)).output == "deep\n"
    run_python("import os; os.mkdir('locked'); os.chmod('locked', 0); os.chmod('.', 0)")
    assert list(tmp_path.iterdir()) == []


def test_output_is_limited():
    result = run_python("print('x' * 10**7)", SandboxLimits(seconds=20, file_mib=1))
    assert result.ending == "failed"
    assert len(result.output) <= 65_536


def scored(response, tests, **options):
    prompt = Prompt(id=0, fields={"tests": tests})
    return dict(code_reward(prompt, response, seconds=20.0, **options))


def test_programs_are_scored_by_their_tests():
    good = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\n"
    tests = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
    assert scored(good, tests) == {"reward": 1.0, "correct": 1.0, "tests": 1.0}
    half = good.replace("a + b", "3")
    assert scored(half, tests, share=0.5) == {"reward": 0.25, "correct": 0.0, "tests": 0.5}
    assert scored("import sys\nsys.exit(0)", tests)["reward"] == 0
    assert program_of("no fence") == "no fence"


def test_programs_are_scored_by_what_they_print():
    tests = [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5\n", "output": "9"}]
    assert scored("print(sum(map(int, input().split())), '')", tests)["correct"] == 1
    assert scored("print(3)", tests)["tests"] == 0.5


def test_the_python_tool_replies_with_the_output():
    environment = made(PythonTool, {})
    opening = environment.open({"prompt": "What is 12 * 12?"})
    assert opening.tools[0]["function"]["name"] == "python"
    assert environment.is_replayable

    def replied(code):
        text = '<tool_call>{"name": "python", "arguments": {"code": "%s"}}</tool_call>'
        reply = environment.reply({"role": "assistant", "content": text % code})
        return reply.messages[0]["content"]

    assert replied("print(12 * 12)") == "144\n"
    assert replied("1 / 0") == "Error: ZeroDivisionError: division by zero"
    assert "use print" in replied("x = 1")
    assert environment.reply({"role": "assistant", "content": "It is 144."}).is_done
