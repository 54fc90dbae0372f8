"""HTML pages that open from disk: one file that fetches nothing, with all foreign text escaped.

Text is inserted through `escape`, and data for the script through `data_script` or
`packed_script`, whose content is plain ASCII without `<`, so that nothing in it can close the
element. The content security policy allows exactly the script and the style of the page. A served
page may also poll its own server for updates.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files

_PICTOGRAPH = (
    "[\u00a9\u00ae\u203c\u2049\u2122\u2139\u2190-\u27ff\u2900-\u2bff\u3030\u303d\u3297\u3299"
    "\U0001f000-\U0001faff][\U0001f3fb-\U0001f3ff]?\ufe0f?"
)
_EMOJI = f"{_PICTOGRAPH}(?:\u200d{_PICTOGRAPH})*|[0-9#*]\ufe0f\u20e3"
_HIDDEN = (
    "\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"  # controls
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"  # no width, or a blank for a letter
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u2800\u3164\ufeff\uffa0"  # the same, and directions
    "\ufe00-\ufe0f\U000e0000-\U000e0fff"  # variation selectors and tags
    "\ufff0-\ufffb\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"  # formats
    "\ud800-\udfff\ufdd0-\ufdef"  # halves of characters, and code points that are none
) + "".join(f"{chr(plane + 0xFFFE)}{chr(plane + 0xFFFF)}" for plane in range(0, 0x110000, 0x10000))
_HIDDEN_OR_EMOJI = re.compile(f"(?P<emoji>{_EMOJI})|[{_HIDDEN}]")
"""Characters that are invisible or change the text direction; inside an emoji they are kept."""

MAX_CHARACTERS = 8_000_000
"""Characters of text in the data of a page's script."""
_LIMITS = (1_000_000, 50_000, 20_000, 10_000, 5_000, 2_000)
"""Character limits per answer, tried in this order until all answers fit."""


def visible(text: str) -> str:
    r"""Text with hidden characters replaced by their code points, as `browse.js` does.

    >>> ascii(visible("a\u200bb"))
    "'a\\u2039U+200B\\u203ab'"
    """
    return _HIDDEN_OR_EMOJI.sub(
        lambda found: found["emoji"] or f"\u2039U+{ord(found[0]):04X}\u203a", text
    )


def escape(text: str) -> str:
    """Escape text for an element or a quoted attribute.

    >>> escape('<b title="x">')
    '&lt;b title=&quot;x&quot;&gt;'
    """
    return html.escape(visible(text))


def prose(text: str) -> str:
    """Escaped text that keeps numbers on one line with their percent signs."""
    return escape(unbroken(text))


def unbroken(text: str) -> str:
    """Text that keeps numbers on one line with their percent signs."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


def page(
    *, title: str, body: str, style: str, script: str, refresh_seconds: float | None = None
) -> str:
    """A whole page; one that asks for news every `refresh_seconds` is marked with its version."""
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    news = []
    if refresh_seconds is not None:
        policy += "; connect-src 'self'"
        version = hashlib.sha256(
            f"{escape(title)}\n{style}\n{script}\n{body}".encode()
        ).hexdigest()[:16]
        news = [
            f'<meta name="sortedrl-refresh" content="{refresh_seconds:g}">',
            f'<meta name="sortedrl-version" content="{version}">',
        ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="generator" content="sortedrl">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<meta name="referrer" content="no-referrer">',
            *news,
            f"<title>{escape(title)}</title>",
            f"<style>{style}</style>",
            "</head>",
            f"<body>\n{body}\n<script>{script}</script>\n</body>",
            "</html>\n",
        ]
    )


def head_value(text: str, name: str) -> str:
    """A value in the head of a page, such as its policy or its version.

    >>> text = page(title="t", body="", style="", script="", refresh_seconds=2)
    >>> head_value(text, "sortedrl-refresh")
    '2'
    """
    head, _, _ = text.partition("<title>")
    found = re.search(rf'<meta (?:name|http-equiv)="{re.escape(name)}" content="([^"]*)">', head)
    if found is None:
        raise ValueError(f"the head of the page must hold {name}, but does not")
    return found[1]


def data_script(name: str, data: object) -> str:
    """Data for the page's script: JSON in an element that is not executed."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    # `<!--` and `</script` would close or change the element; in JSON strings, escapes are equal
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json" id="{escape(name)}">{text}</script>'


def packed_script(name: str, data: object) -> str:
    """Large data for the page's script: JSON, compressed with gzip, as base64."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    # without a timestamp, so that the same data gives the same page
    packed = base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()
    return f'<script type="application/octet-stream+base64" id="{escape(name)}">{packed}</script>'


def characters_each(lengths: Sequence[int]) -> int:
    """The character limit per text at which all together fit."""
    for limit in _LIMITS[:-1]:
        if sum(min(length, limit) for length in lengths) <= MAX_CHARACTERS:
            return limit
    return _LIMITS[-1]


def shortened(text: str, limit: int) -> str | list[str | int]:
    """The text, or its start, the number of characters left out, and its end."""
    if len(text) <= limit:
        return text
    end = limit // 3
    return [text[: limit - end], len(text) - limit, text[-end:]]


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str,
    quiet: Sequence[bool] | None = None,
) -> str:
    """A table that scrolls sideways if it is too wide; `quiet` rows are muted.

    Cells are escaped; the first column is left-aligned and names its row, the others right-aligned.
    """
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    lines = []
    for row, is_quiet in zip(rows, quiet or [False] * len(rows), strict=True):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        mark = ' class="quiet"' if is_quiet else ""
        lines.append(f'<tr{mark}><th scope="row">{escape(row[0])}</th>{cells}</tr>')
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def script(*names: str) -> str:
    """Scripts from the folder of this module, joined inside one function."""
    parts = "\n".join(asset(name) for name in names)
    return f'"use strict";\n(() => {{\n{parts}\n}})();'


def asset(name: str) -> str:
    """A style or script from the folder of this module."""
    return (files("sortedrl.report") / "assets" / name).read_text(encoding="utf-8").strip()


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def remarks(sentences: Iterable[tuple[str, str]], *, are_named: bool) -> str:
    """Paragraphs from pairs of run name and text; runs with the same text share one."""
    names: dict[str, list[str]] = {}
    for name, text in sentences:
        names.setdefault(text, []).append(name)
    if not are_named:
        return "".join(paragraph(text[:1].upper() + text[1:]) for text in names)
    return "".join(paragraph(f"{_listed(whose)}: {text}") for text, whose in names.items())


def _listed(names: list[str]) -> str:
    *before, last = names
    return f"{', '.join(before)} and {last}" if before else last


def section(title: str, *parts: str, name: str) -> str:
    """A section with a heading and an anchor `name`; empty if its content is."""
    inside = "".join(parts)
    return f'<section id="{name}"><h2>{escape(title)}</h2>{inside}</section>' if inside else ""


def figure(caption: str, picture: str, narrow: str = "") -> str:
    """A chart with a caption, replaced by the `narrow` one on a phone, if there is one."""
    pictures = f'<div class="at-wide">{picture}</div><div class="at-narrow">{narrow}</div>'
    return (
        f"<figure><figcaption>{prose(caption)}</figcaption>"
        f"{pictures if narrow else picture}</figure>"
    )


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{prose(text)}</p>"
