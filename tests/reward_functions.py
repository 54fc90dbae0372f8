"""Reward functions as users write them, the bad ones too; worker processes import this file."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from array import array
from multiprocessing import shared_memory
from pathlib import Path


def length(prompt, response):
    return len(response)


def gold(prompt, response, *, right=1.0):
    return right * (response == prompt.fields["answer"])


def parts(prompt, response):
    return {"format": 1, "answer": 2.5}


def by_word(prompt, response):  # noqa: C901, PLR0915
    """Does what the response says: the tests choose the fault."""
    kind, _, rest = response.partition(":")
    match kind:
        case "sleep":
            time.sleep(float(rest))
        case "hang":
            while True:
                time.sleep(1)
        case "meet":
            count, _, folder = rest.partition(":")
            (Path(folder) / str(os.getpid())).touch()
            while len(list(Path(folder).iterdir())) < int(count):
                time.sleep(0.01)
        case "raise":
            raise KeyError(rest)
        case "exit":
            sys.exit(int(rest))
        case "abort":
            os._exit(int(rest))
        case "eat":
            _ = [bytearray(1 << 24) for _ in range(int(rest))]
        case "return":
            values = {"string": "good", "none": None, "empty": {}}
            return values[rest] if rest in values else float(rest)
        case "die-once":
            if not Path(rest).exists():
                Path(rest).touch()
                os._exit(7)
        case "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            Path(rest).write_text(str(child.pid))
            child.wait()
        case "print":
            print(rest)  # noqa: T201
        case "daemon":
            how, _, pid_file = rest.partition(":")
            subprocess.run([sys.executable, "-c", DAEMON, pid_file], check=True)
            while not Path(pid_file).exists():
                time.sleep(0.01)
            if how == "abort":
                os._exit(3)
            while how == "hang":
                time.sleep(1)
        case "brood":
            code = "import time; _ = bytearray(b'x') * (150 << 20); time.sleep(60)"
            children = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(int(rest))]
            _ = [child.wait() for child in children]
        case "share":
            _share(*rest.split(":"))
        case "deaf":
            signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
            ctypes.PyDLL(None).sleep(60)  # holds the interpreter, so that no other thread can run
        case "torch":
            return float("torch" in sys.modules or "numpy" in sys.modules)
    return 1.0


def _share(size, name, crash=""):
    memory = shared_memory.SharedMemory(name, create=True, size=int(size) << 20)
    for start in range(0, memory.size, 1 << 20):
        memory.buf[start : start + (1 << 20)] = bytes(1 << 20)
    if crash:
        os._exit(3)
    time.sleep(60)


DAEMON = """
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
os.environ.clear()
open(sys.argv[1] + ".new", "w").write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(60)
"""
"""A process that nobody waits for, in a session of its own."""


_waiting = []


async def later(prompt, response):
    if response.startswith("meet:"):
        _waiting.append(response)
        while len(_waiting) < int(response.partition(":")[2]):
            await asyncio.sleep(0.01)
    if response == "block":
        time.sleep(60)
    if response == "hang":
        await asyncio.sleep(60)
    if response == "raise":
        raise KeyError(response)
    if response == "own-timeout":
        raise TimeoutError("of the user")
    if response == "exit":
        sys.exit(3)
    if response == "nap":
        await asyncio.sleep(0.6)
    await asyncio.sleep(0.05)
    return 1.0


def together(prompts, responses):
    if "hang" in responses:
        time.sleep(60)
    if "raise" in responses:
        raise KeyError("together")
    if "short" in responses:
        return [1.0]
    if "abort" in responses:
        os._exit(3)
    if "eat" in responses:
        _ = [bytearray(1 << 24) for _ in range(200)]
    return [{"reward": len(r), "batch": len(responses)} for r in responses]


async def later_together(prompts, responses):
    assert isinstance(prompts, list)
    assert isinstance(responses, list)
    if "hang" in responses:
        await asyncio.sleep(60)
    if "block" in responses:
        time.sleep(60)
    await asyncio.sleep(0.05)
    return [{"reward": len(r), "batch": len(responses)} for r in responses]


def in_many_forms(prompts, responses, *, form):
    """The lengths of the responses, in the form that the test asks for."""
    lengths = [len(response) for response in responses]
    forms = {
        "generator": (length for length in lengths),
        "array": array("d", lengths),
        "columns": {"reward": array("d", lengths), "one": [1] * len(lengths)},
        "one bad": [1e300 if length == 3 else 1.0 for length in lengths],
        "text": "1" * len(lengths),
    }
    return forms[form]


def scored_below_zero(prompt, response, *, wrong=-1.0):
    if response == "hang":
        time.sleep(60)
    return wrong


def declared(prompt, response, *, wrong=-1.0, right=1.0):
    return scored_below_zero(prompt, response, wrong=wrong)


def lowest_declared(options):
    return min(options["wrong"], options["right"])


def wrapped(prompt, response):
    return later(prompt, response)


def wants_three(prompt, response, extra):
    return 1.0


class NotAFunction:
    pass


def starts_with_a_capital(prompt, response):
    return float(response[:1].isupper())


def hangs(prompt, response):
    time.sleep(60)


def raises(prompt, response):
    return 1 / 0


def exits(prompt, response):
    sys.exit(3)


def eats(prompt, response):
    return len([bytearray(1 << 24) for _ in range(200)])


def nan(prompt, response):
    return float("nan")


def text(prompt, response):
    return "good"
