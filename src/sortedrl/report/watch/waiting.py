"""The page that stands in until there is a page of the runs; it asks for news as that one does."""

from __future__ import annotations

from collections.abc import Sequence

from sortedrl.report.html import asset, escape, page


def waiting_page(notes: Sequence[str], *, title: str, refresh_seconds: float) -> str:
    """A page that says what is waited for."""
    lines = "".join(f"<li>{escape(note)}</li>" for note in notes)
    body = (
        f'<header><p class="kicker">{escape(title)}</p><h1>Nothing to show yet</h1>'
        f'<p class="lead">This page shows the run as soon as there is something to see.</p>'
        f'<ul class="notes">{lines}</ul></header>'
    )
    scripts = asset("browse.js") + "\n" + asset("run.js")
    return page(
        title=title,
        body=f"<main>\n{body}\n</main>",
        style=asset("page.css") + asset("run.css") + asset("watch.css"),
        script=f'"use strict";\n(() => {{\n{scripts}\n}})();',
        refresh_seconds=refresh_seconds,
    )
