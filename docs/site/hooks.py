"""What the build of the site adds to the Markdown: generated parts, links to other files.

`<!-- generated: NAME -->` on a page is replaced with what `reference.PARTS` has under that name.
Pages link to source files, tests and examples by relative path, so that the links work in a
checkout and where the repository is shown. The site has only docs/: there such a link leads to
the repository that `SORTEDRL_REPOSITORY` names (https://host/owner/name), or, without it, is the
path as code.
"""

from __future__ import annotations

import importlib.util
import os
import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)#\s]*)(#[^)\s]*)?\)")
_LISTS = tuple(f"reference/{name}.md" for name in ("cli", "config", "metrics"))
_GENERATED = re.compile(r"^<!-- generated: ([a-z-]+) -->$", re.MULTILINE)


def parts() -> Mapping[str, Callable[[], str]]:
    """The generated parts by name; the module beside this one is no package."""
    spec = importlib.util.spec_from_file_location(
        "reference", Path(__file__).parent / "reference.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Mapping[str, Callable[[], str]] = module.PARTS
    return found


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """The page with its generated parts, and the links that leave docs/ rewritten."""
    if _GENERATED.search(markdown):
        known = parts()
        markdown = _GENERATED.sub(lambda found: known[found.group(1)](), markdown)
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    repository = os.environ.get("SORTEDRL_REPOSITORY", "").rstrip("/")

    def replaced(match: re.Match[str]) -> str:
        text, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.startswith("docs/"):
            return match.group(0)
        if repository:
            return f"[{text}]({repository}/blob/main/{path}{anchor})"
        return text if text.strip("`") == path else f"{text} (`{path}`)"

    return _LINK.sub(replaced, markdown)


def on_page_content(html: str, *, page: Page, **_: object) -> str:
    """Mark the generated pages, whose tables become lists on a phone (`docs/css/site.css`)."""
    return f'<div class="reference">{html}</div>' if page.file.src_uri in _LISTS else html
