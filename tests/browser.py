"""Pages in a real browser: Chromium without a window, driven by Playwright.

A test asks for the fixture `browser_page` (in `conftest`) and gets a fresh page. When the test is
over the page must not have said or fetched anything it should not: `Log.complaints` is empty.
"""

import asyncio
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ARTEFACTS = Path(__file__).resolve().parent.parent / "test-artefacts"
"""Where screenshots are kept, to be looked at."""

WIDE, NARROW = 1280, 390
PATIENCE_SECONDS = 60
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    # Nothing outside this machine can even be looked up.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)


def missing(what):
    """Leave the test out where a browser is missing; in CI nothing is left out."""
    sentence = f"needs a real browser, but {what} is missing"
    if os.environ.get("CI"):
        pytest.fail(f"{sentence}; in CI nothing is left out: install it")
    pytest.skip(sentence)


@dataclass
class Log:
    """What the pages of one test said and fetched."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)
    """Requests that a page that needs no network does not make."""
    _excused: list[str] = field(default_factory=list)

    def excuse(self, pattern):
        """Errors in which the pattern is found are part of this test."""
        self._excused.append(pattern)

    @property
    def complaints(self):
        return [
            *(f"the page said: {error}" for error in self.errors if not self._is_excused(error)),
            *(f"the page fetched {url}" for url in self.strangers),
        ]

    def _is_excused(self, error):
        return any(re.search(pattern, error) for pattern in self._excused)

    def listen(self, context):
        context.on("console", self._hear)
        context.on("weberror", lambda problem: self.errors.append(f"uncaught: {problem.error}"))
        context.on("request", self._see)

    def _hear(self, message):
        words = f"{message.text} ({message.location.get('url', '')})"
        if message.type in ("error", "assert"):
            self.errors.append(words)
        elif message.type == "warning":
            self.warnings.append(words)

    def _see(self, request):
        self.requests.append(request.url)
        if not is_allowed(request.url, is_document=request.is_navigation_request()):
            self.strangers.append(request.url)


def is_allowed(url, *, is_document):
    """Whether a page that needs no network may fetch this: itself, its own data, this machine."""
    parts = urlsplit(url)
    if parts.scheme in ("data", "blob", "about"):
        return True
    if parts.scheme == "file":
        return is_document
    return parts.scheme in ("http", "ws") and parts.hostname == "127.0.0.1"


class Chromium:
    """One browser; each test gets a fresh context of it.

    Playwright leaves its event loop marked as the running one, so that another test in the same
    process could not run one of its own: between tests the mark is taken off.
    """

    def __init__(self):
        try:
            from playwright.sync_api import sync_playwright
        except ImportError:
            missing("the Python package playwright")
        program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
        if program is None:
            missing("Chromium")
        self._playwright = sync_playwright().start()
        try:
            self._loop = asyncio.get_running_loop()
            self._browser = self._playwright.chromium.launch(executable_path=program, args=_FLAGS)
        finally:
            self._rest()

    def open_context(self):
        asyncio._set_running_loop(self._loop)
        context = self._browser.new_context(
            viewport={"width": WIDE, "height": 900}, color_scheme="light", reduced_motion="reduce"
        )
        context.set_default_timeout(1000 * PATIENCE_SECONDS)
        return context

    def close_context(self, context):
        context.close()
        self._rest()

    def close(self):
        asyncio._set_running_loop(self._loop)
        self._browser.close()
        self._playwright.stop()
        self._rest()

    def _rest(self):
        asyncio._set_running_loop(None)


def expect(thing):
    """What must hold of a part of a page within some seconds; see Playwright's `expect`."""
    from playwright.sync_api import expect

    expect.set_options(timeout=1000 * PATIENCE_SECONDS)
    return expect(thing)


def open_text(page, text, folder, *, name="page.html"):
    """Write the page to the folder and open it from disk."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    page.goto(path.as_uri())
    return path


def set_scheme(page, scheme):
    """Show the page as on a machine set to "light" or "dark"."""
    page.emulate_media(color_scheme=scheme)


def set_width(page, width):
    page.set_viewport_size({"width": width, "height": 900})


def is_too_wide(page):
    """Whether the page as a whole must be scrolled sideways."""
    return page.evaluate("document.documentElement.scrollWidth > innerWidth")


def keep_screenshot(page, name, *, is_whole=True):
    """Keep a picture of the page, or only of what is in view, to be looked at."""
    ARTEFACTS.mkdir(exist_ok=True)
    path = ARTEFACTS / f"{name}.png"
    page.screenshot(path=path, full_page=is_whole)
    return path
