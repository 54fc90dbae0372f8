"""SVG to PNG, by the package resvg_py, which is there only when asked for.

It follows no theme of a reader, so pictures for it have one scheme. It knows fonts by name only;
which of ours are on this machine is tried out first, so that no picture loses its words.
"""

from __future__ import annotations

from types import ModuleType

from sortedrl.errors import ConfigError

FONTS = (
    "Arial",
    "Helvetica",
    "Liberation Sans",
    "Segoe UI",
    "Roboto",
    "Noto Sans",
    "Open Sans",
    "Ubuntu",
    "Cantarell",
    "DejaVu Sans",
    "Verdana",
)
"""Fonts to draw with, the narrow ones first: pictures leave room for letters of Arial's width."""

MAX_WIDTH = 20_000
"""Beyond this, a picture takes gigabytes."""

_SHEET = '<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16">{}</svg>'
_WORD = _SHEET.format('<text y="12" font-family="sans-serif" font-size="9">Wag1</text>')
_NO_FONT = "no font has this name"


def png(svg: str, *, width: int) -> bytes:
    """The picture as a PNG file's content, so many pixels wide."""
    if not 1 <= width <= MAX_WIDTH:
        raise ConfigError(f"the width of a PNG must lie in 1..{MAX_WIDTH} pixels, got {width}")
    renderer = _renderer()
    font = _font(renderer)
    drawn: bytes = renderer.svg_to_bytes(
        svg_string=svg, width=width, sans_serif_family=font, font_family=font
    )
    return drawn


def _renderer() -> ModuleType:
    try:
        import resvg_py
    except ImportError as error:
        raise ConfigError(
            "a .png needs the package resvg_py, which is not installed; "
            "write an .svg, or run: pip install 'sortedrl[plot]'"
        ) from error
    return resvg_py


def _font(renderer: ModuleType) -> str:
    """The first font that is on this machine; where there is another one only, that one."""
    otherwise = renderer.svg_to_bytes(svg_string=_WORD, sans_serif_family=_NO_FONT)
    for name in FONTS:
        # a name that is not known gives what any unknown name gives: another font, or no mark
        if renderer.svg_to_bytes(svg_string=_WORD, sans_serif_family=name) != otherwise:
            return name
    if otherwise != renderer.svg_to_bytes(svg_string=_SHEET.format("")):
        return FONTS[0]
    raise ConfigError(
        "a .png needs a font for its words, but none of these is installed: "
        f"{', '.join(FONTS)}; install one (the Debian package fonts-dejavu has one), "
        "or write an .svg"
    )
