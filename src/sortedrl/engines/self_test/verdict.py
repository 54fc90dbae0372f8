"""What comes out of a self-test: passed, or failed for a reason that fits one line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome, with the figures as far as they are known."""

    reason: str | None
    """Why it failed; `None` if it passed."""
    seconds: float = 0.0
    """From the start of the engine's process to its end."""
    name: str | None = None
    """What the engine says it is."""
    slots: int | None = None
    """Answers it wrote at the same time."""
    largest_gap: float | None = None
    """Nats between its log-probabilities and a plain forward pass, for the worst token."""
    tokens_per_second: float | None = None
    """With a model so tiny that it says little of any other."""
    log: tuple[str, ...] = ()
    """The last lines that the engine printed, if it failed."""

    @property
    def passed(self) -> bool:
        """Whether the engine can be relied on."""
        return self.reason is None


def to_line(verdict: Verdict) -> str:
    """One line of JSON."""
    return json.dumps(asdict(verdict))


def from_line(line: str) -> Verdict:
    """The verdict that such a line holds."""
    told = json.loads(line)
    return Verdict(**(told | {"log": tuple(told["log"])}))
