"""What the parts of the page share: a section, a figure with its caption, curves, a paragraph."""

from __future__ import annotations

from collections.abc import Sequence

from sortedrl.report.courses import Course
from sortedrl.report.curves import curves
from sortedrl.report.html import escape, prose
from sortedrl.report.seeds import SeedGroup, seed_series


def framed(title: str, *parts: str, name: str) -> str:
    """A section with a heading; nothing where there is nothing in it. `name` is its anchor."""
    inside = "".join(parts)
    return f'<section id="{name}"><h2>{escape(title)}</h2>{inside}</section>' if inside else ""


def figure(caption: str, picture: str) -> str:
    """A picture that scrolls sideways where it is too wide, under a caption."""
    return (
        f"<figure><figcaption>{prose(caption)}</figcaption>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"{picture}</div></figure>"
    )


def course_figure(course: Course, groups: Sequence[SeedGroup], *, caption: str) -> str:
    """Curves with a line for each group of seeds; nothing where no run has the number."""
    if course.is_empty:
        return ""
    picture = curves(
        seed_series(groups, course.lines),
        x_label=course.x_label,
        y_label=course.y_label,
        title=course.title,
        is_share=course.is_share,
    )
    return figure(caption, picture)


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{prose(text)}</p>"
