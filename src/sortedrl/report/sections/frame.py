"""What the parts of the page share: a section, a figure with its caption, unbroken numbers."""

from __future__ import annotations

from sortedrl.report.html import escape, prose


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


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{prose(text)}</p>"
