"""The page of training runs, one or several side by side: the order of its parts.

It is one file that opens from disk, made from what the runs wrote down (see `record`); a run that
is still going on or was killed shows as far as it came. The numbers are those of `meter` over the
whole log; seconds are seconds of training, in which evaluations do not count (see `clock`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sortedrl.report.html import asset, packed_script, page
from sortedrl.report.record import RunRecord, measured
from sortedrl.report.sections import (
    advice,
    answers,
    bubbles,
    headline,
    learning,
    ledger,
    lengths,
    numbers,
    reading,
    settings,
    slots,
    staleness,
)
from sortedrl.report.svg import stylesheet

_NAME = re.compile(r'<section id="([a-z]+)"')
_STYLES = ("page.css", "run.css", "slots.css", "answers.css", "watch.css")
SCRIPTS = (
    "browse.js",
    "slots.js",
    "slots_bars.js",
    "slots_colours.js",
    "slots_shares.js",
    "slots_paint.js",
    "slots_words.js",
    "slots_pointing.js",
    "slots_zoom.js",
    "answers.js",
    "run.js",
)
"""The parts of the page's script; they are joined inside one function."""


def runs_page(
    records: Sequence[RunRecord], *, title: str, refresh_seconds: float | None = None
) -> str:
    """The page of these runs; one that is served asks for news every `refresh_seconds`."""
    if not records:
        raise ValueError("a page of runs needs at least one run, got none")
    runs = [measured(record) for record in records]
    sections = [
        headline.opening(runs, title=title),
        advice.section(runs),
        numbers.section(runs),
        slots.section(runs),
        bubbles.section(runs),
        ledger.section(runs),
        lengths.section(runs),
        staleness.section(runs),
        learning.section(runs),
        answers.section(runs),
        settings.section(runs),
        reading.section(),
    ]
    opening, *parts = filter(None, sections)
    body = "\n".join([opening, _contents(parts), *parts])
    data = packed_script("slots-data", slots.data(runs))
    data += packed_script("answers-data", answers.data(runs))
    scripts = "\n".join(asset(name) for name in SCRIPTS)
    return page(
        title=title,
        body=f"<main>\n{body}\n</main>\n{data}",
        style=stylesheet() + "".join(asset(name) for name in _STYLES),
        script=f'"use strict";\n(() => {{\n{scripts}\n}})();',
        refresh_seconds=refresh_seconds,
    )


def _contents(sections: Sequence[str]) -> str:
    """Links to the sections, by their names."""
    names = (found.group(1) for found in map(_NAME.match, sections) if found)
    links = "".join(f'<li><a href="#{name}">{name}</a></li>' for name in names)
    return f'<nav aria-label="Parts of this page"><ul>{links}</ul></nav>'
