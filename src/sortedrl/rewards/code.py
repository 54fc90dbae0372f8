r"""Rewards for programs: the code of an answer is run against tests in the sandbox.

The last fenced block of the answer is the program, or all of it where there is none. The row has
its tests in the field `tests`:

    ["assert add(1, 2) == 3", ...]                 run after the program, in the same process
    [{"input": "1 2\n", "output": "3\n"}, ...]   a run each; white space at line ends is ignored

Tests of the first kind share a process with the program, so a program made to cheat them can; those
of the second kind only see what it prints.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence

from sortedrl.errors import DataError
from sortedrl.rewards.sandbox import SandboxLimits, run_python
from sortedrl.types import Prompt

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
