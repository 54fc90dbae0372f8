"""Reward functions as users write them, the bad ones too; worker processes import this file."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path


def length(prompt, response):
    return len(response)


def gold(prompt, response, *, right=1.0):
    return right * (response == prompt.fields["answer"])


def parts(prompt, response):
    return {"format": 1, "answer": 2.5}


def by_word(prompt, response):  # noqa: C901
    """Does what the response says: the tests choose the fault."""
    kind, _, rest = response.partition(":")
    match kind:
        case "sleep":
            time.sleep(float(rest))
        case "hang":
            while True:
                time.sleep(1)
        case "raise":
            raise KeyError(rest)
        case "exit":
            sys.exit(int(rest))
        case "abort":
            os._exit(int(rest))
        case "eat":
            _ = [bytearray(1 << 24) for _ in range(int(rest))]
        case "return":
            return {"nan": float("nan"), "string": "good", "none": None, "empty": {}}[rest]
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
    return 1.0


async def later(prompt, response):
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
    await asyncio.sleep(0.05)
    return 1.0


def together(prompts, responses):
    if "hang" in responses:
        time.sleep(60)
    if "raise" in responses:
        raise KeyError("together")
    if "short" in responses:
        return [1.0]
    return [{"reward": len(r), "batch": len(responses)} for r in responses]


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
