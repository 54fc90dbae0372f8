"""A Python tool for maths tasks: the policy's code runs in a sandbox, and its output is the reply.

Each call is a program of its own; nothing is kept between two calls, so conversations can be
replayed. The sandbox is that of `rewards.sandbox`, which says what it stops and what not.
"""

from __future__ import annotations

from sortedrl.rewards.sandbox import SandboxLimits, run_python

_SHOWN_CHARACTERS = 2000


class PythonTool:
    """One tool, `python`, in the form of TRL's environments; the reward is the task's own."""

    is_replayable = True

    def __init__(
        self, *, seconds: float = 5.0, memory_mib: int = 512, allow_weak: bool = False
    ) -> None:
        """Limits of a program; `allow_weak` runs it on machines without a full sandbox too."""
        self._limits = SandboxLimits(
            seconds=float(seconds), memory_mib=int(memory_mib), allow_weak=bool(allow_weak)
        )

    def reset(self, **row: object) -> None:
        """Begin a conversation."""

    def python(self, code: str) -> str:
        """Run a Python program and get what it prints. Nothing is kept between two calls.

        Args:
            code: The program; print the results that you need.
        """
        result = run_python(code, self._limits)
        if result.ending == "timeout":
            return f"Error: the program took more than {self._limits.seconds:g} seconds"
        if result.ending == "failed":
            last = result.errors.strip().rpartition("\n")[2]
            return f"{result.output[:_SHOWN_CHARACTERS]}Error: {last[:_SHOWN_CHARACTERS]}"
        return result.output[:_SHOWN_CHARACTERS] or "(no output; use print)"
