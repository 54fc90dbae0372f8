"""Tables and captions of the results page, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.record import Record


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(table(("a", "b"), [("1", "2")]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [head, ["---"] * len(head), *rows]
    first, rule, *rest = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([first, rule.replace(" ", ""), *rest])


def caption(records: Sequence[Record]) -> str:
    """How the records were measured: command, commit, date and machine."""
    commands = " and ".join(f"`{text}`" for text in dict.fromkeys(r.command for r in records))
    commits = ", ".join(dict.fromkeys(record.commit for record in records))
    dates = ", ".join(dict.fromkeys(record.date for record in records))
    machines = "; ".join(dict.fromkeys(_machine(record) for record in records))
    return f"{commands}, commit {commits}, {dates}: {machines}."


def _machine(record: Record) -> str:
    facts = record.machine
    words = [f"one {facts['device']}" if "NVIDIA" in facts["device"] else facts["device"]]
    words.append(f"{facts['cores']} CPU cores")
    words += [f"{name} {facts[name]}" for name in facts if name not in ("device", "cores")]
    return ", ".join(words)


def percent(share: float) -> str:
    """A share in percent with one decimal.

    >>> percent(0.0101)
    '1.0'
    """
    return f"{100 * share:.1f}"
