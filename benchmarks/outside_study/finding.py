"""One number that was measured: a line of the table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """What was measured, its value, and under which conditions."""

    what: str
    value: float
    unit: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.what:44} {self.value:>14,.6g} {self.unit:11} {self.note}"
