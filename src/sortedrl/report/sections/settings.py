"""The settings of the runs: what differs between them in a table, and everything behind a fold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sortedrl.report.html import escape, table
from sortedrl.report.record import Run
from sortedrl.report.sections.frame import framed, paragraph
from sortedrl.report.seeds import flat
from sortedrl.toml_file import toml_value

_NONE = "\N{EN DASH}"


def section(runs: Sequence[Run]) -> str:
    """The settings; for several runs first those that differ."""
    known = [(run.name, flat(run.record.config)) for run in runs if run.record.config is not None]
    unknown = [run.name for run in runs if run.record.config is None]
    parts = []
    if unknown:
        names = ", ".join(unknown)
        parts.append(paragraph(f"Not known, because there is no config.toml: {names}."))
    if len(known) == 1:
        parts.append(_folded("Every setting", known[0][1]))
    elif known:
        parts += _compared(known)
    return framed("Settings", *parts, name="settings")


def _compared(known: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """A table of what differs, and what is equal behind a fold."""
    names = list(dict.fromkeys(name for _, settings in known for name in settings))
    shown = {
        name: [toml_value(s[name]) if name in s else _NONE for _, s in known] for name in names
    }
    different = [name for name in names if len(set(shown[name])) > 1]
    equal = {name: known[0][1][name] for name in names if name not in different}
    if different:
        told = table(
            ["", *(name for name, _ in known)],
            [[name, *shown[name]] for name in different],
            caption=f"Settings that differ; {_NONE} is one that is not set",
            quiet=[False] * len(different),
        )
    else:
        told = paragraph("All settings are the same.")
    fold = f"{len(equal):,} settings are the same for all"
    return [told, _folded(fold, equal) if equal else ""]


def _folded(summary: str, settings: Mapping[str, object]) -> str:
    """A list behind a line that opens it."""
    entries = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(toml_value(value))}</dd>"
        for name, value in settings.items()
    )
    return f"<details><summary>{escape(summary)}</summary><dl>{entries}</dl></details>"
