"""Metadata of a release: the README and the addresses, with the repository's address filled in.

`SORTEDRL_REPOSITORY` (https://host/owner/name) is set by `make release REPOSITORY=...`. With it the
relative links and pictures of the README become absolute, at the tag of the version, so that they
work on the package index too, and the addresses of the project are listed. Without it the README
stays as it is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAPER = "https://arxiv.org/abs/2603.23414"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")
_PICTURE = re.compile(r'(<img [^>]*\bsrc=")(?!https?:)([^"]+)')


class ReleaseMetadata(MetadataHookInterface):
    """Fills in `readme` and `urls`."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Add both to the project's metadata."""
        repository = os.environ.get("SORTEDRL_REPOSITORY", "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        tag = f"v{_version(Path(self.root))}"
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute(text, repository=repository, tag=tag) if repository else text,
        }
        metadata["urls"] = urls(repository)


def absolute(text: str, *, repository: str, tag: str) -> str:
    """The text with its relative links and pictures leading to the repository at the tag."""

    def replaced(match: re.Match[str]) -> str:
        kind = "raw" if match.group(1) else "blob"
        address = f"{repository}/{kind}/{tag}/{match.group(3)}"
        return f"{match.group(1)}[{match.group(2)}]({address})"

    pictures = _PICTURE.sub(rf"\g<1>{repository}/raw/{tag}/\g<2>", text)
    return _LINK.sub(replaced, pictures)


def urls(repository: str) -> dict[str, str]:
    """The addresses of the project; only the paper's is known without a repository."""
    if not repository:
        return {"Paper": PAPER}
    return {
        "Source": repository,
        "Documentation": f"{repository}/tree/main/docs",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
        "Paper": PAPER,
    }


def _version(root: Path) -> str:
    text = (root / "src" / "sortedrl" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    assert found is not None, "src/sortedrl/__init__.py names the version"
    return found.group(1)
