"""What a part of the page says of each run, in the order of the runs.

The same is said once, for all runs of which it is true.
Where the page has a single run, it need not be named.
"""

from __future__ import annotations

from collections.abc import Iterable

from sortedrl.report.sections.frame import paragraph


def remarks(said: Iterable[tuple[str, str]], *, are_named: bool) -> str:
    """Paragraphs from pairs of a run's name and what is said of it, or of that alone."""
    names: dict[str, list[str]] = {}
    for name, words in said:
        names.setdefault(words, []).append(name)
    if not are_named:
        return "".join(paragraph(words[:1].upper() + words[1:]) for words in names)
    return "".join(paragraph(f"{_joined(whose)}: {words}") for words, whose in names.items())


def _joined(names: list[str]) -> str:
    *before, last = names
    return f"{', '.join(before)} and {last}" if before else last
