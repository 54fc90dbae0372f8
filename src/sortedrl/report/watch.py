"""Follows runs in progress, rebuilds their page, and serves it.

Only the first request waits for a page to be built. One thread follows the runs, and builds a page
only if something has changed and someone has requested it within the last minute, for at most a
fifth of the time, however large the runs are. A run may be watched before it starts: until its log
begins there is no record, and `note` says what is missing. A failed read keeps the record as it is.

    /                    the page
    /state               polled by the page: is there a newer version?
    /files/RUN/PATH      a plain file from a run folder, as a download

The server answers GET and HEAD. On a loopback address it answers only requests that name this
machine, so that no other site can reach it under its own name (DNS rebinding). A served file always
lies inside the folder, whatever the request, and wherever links lead.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import re
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from email.message import Message
from hashlib import blake2b
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import IO
from urllib.parse import quote, unquote

from sortedrl.config.checks import require
from sortedrl.core.events import End, Event, Order, from_json
from sortedrl.errors import ConfigError, DataError
from sortedrl.report.html import asset, escape, head_value, page, script
from sortedrl.report.page import runs_page
from sortedrl.report.record import BESIDE, RunRecord, run_names, with_files

WANTED_SECONDS = 60.0
"""A client without requests for this long is gone."""
_SHARE = 5
"""A page that takes a second to build is built at most every this many seconds."""

_Print = tuple[int, int] | None
"""Size and mtime of a file, to detect changes; `None` if there is none."""
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSnapshot:
    """A page, and the state of the runs it shows."""

    text: str
    is_ended: bool = False
    """Whether all runs have reached the end of their data."""
    seconds: float | None = None
    """Training seconds of the run that trained longest; `None` before any has begun."""
    written: float | None = None
    """When the newest log was last written, in seconds since 1970."""
    notes: tuple[str, ...] = ()
    """Why the page shows no more."""

    @property
    def version(self) -> str:
        """A hash of the page."""
        return head_value(self.text, "sortedrl-version")


class Pages:
    """Builds the newest page of some runs in a thread; must be closed."""

    def __init__(
        self,
        runs: Sequence[FollowedRun],
        *,
        tell: Callable[[str], None],
        refresh_seconds: float = 2.0,
    ) -> None:
        """Start to follow; `tell` reports pages that cannot be built."""
        self._runs = runs
        self._tell = tell
        self._refresh_seconds = refresh_seconds
        self._title = ", ".join(run.name for run in runs)
        self._newest = self._waiting(("the page is being built",))
        self._has_tried = False
        self._is_closed = False
        self._wanted = -WANTED_SECONDS
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="pages", daemon=True)
        self._thread.start()

    def newest(self, *, timeout_seconds: float = 0.0) -> PageSnapshot:
        """The newest page; wait for the first one, up to the timeout."""
        with self._condition:
            self._wanted = time.monotonic()
            self._condition.notify_all()
            self._condition.wait_for(
                lambda: self._has_tried or self._is_closed, timeout=timeout_seconds
            )
            return self._newest

    def close(self) -> None:
        """Stop building pages."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._thread.join(timeout=1.0)

    def _work(self) -> None:
        due = time.monotonic()
        while self._is_wanted_at(due):
            started = time.monotonic()
            # look at every run, even after one that has changed
            has_changed = any([run.look() for run in self._runs])
            if has_changed:
                snapshot = self._made()
                with self._condition:
                    self._newest, self._has_tried = snapshot, True
                    self._condition.notify_all()
            took = time.monotonic() - started
            due = started + max(self._refresh_seconds, _SHARE * took)

    def _is_wanted_at(self, due: float) -> bool:
        """Wait until the page is due and requested; false once closed."""
        with self._condition:
            while not self._is_closed:
                now = time.monotonic()
                is_wanted = now - self._wanted < WANTED_SECONDS
                if is_wanted and now >= due:
                    return True
                self._condition.wait(due - now if is_wanted else None)
            return False

    def _made(self) -> PageSnapshot:
        notes = tuple(f"{run.name}: {run.note}" for run in self._runs if run.note is not None)
        records = [run.record for run in self._runs if run.record is not None]
        if not records:
            return self._waiting(notes)
        try:
            text = runs_page(records, title=self._title, refresh_seconds=self._refresh_seconds)
        except Exception as error:  # noqa: BLE001  a page that fails must not prevent later ones
            note = f"the page could not be built ({type(error).__name__}: {error})"
            self._tell(note)
            if self._newest.seconds is None:
                return self._waiting((*notes, note))
            return replace(self._newest, notes=(*notes, note))
        return PageSnapshot(
            text=text,
            is_ended=all(run.is_ended for run in self._runs),
            seconds=max(record.events[-1].seconds for record in records),
            written=max(
                (run.written for run in self._runs if run.written is not None), default=None
            ),
            notes=notes,
        )

    def _waiting(self, notes: tuple[str, ...]) -> PageSnapshot:
        text = waiting_page(notes, title=self._title, refresh_seconds=self._refresh_seconds)
        return PageSnapshot(text=text, notes=notes)


def waiting_page(notes: Sequence[str], *, title: str, refresh_seconds: float) -> str:
    """A page that says what is missing."""
    lines = "".join(f"<li>{escape(note)}</li>" for note in notes)
    body = (
        f'<header><p class="kicker">{escape(title)}</p><h1>Nothing to show yet</h1>'
        f'<p class="lead">This page shows the run as soon as there is data.</p>'
        f'<ul class="notes">{lines}</ul></header>'
    )
    return page(
        title=title,
        body=f"<main>\n{body}\n</main>",
        style=asset("page.css") + asset("run.css") + asset("watch.css"),
        script=script("browse.js", "run.js"),
        refresh_seconds=refresh_seconds,
    )


class FollowedRun:
    """A run folder, or a bare event log, read incrementally."""

    def __init__(self, path: Path, *, name: str) -> None:
        self.path = path
        self.name = name
        self.record: RunRecord | None = None
        self.note: str | None = None
        self._prints: list[_Print] | None = None
        self._tail: Tail | None = None
        self._checked: Sequence[Event] | None = None
        self._num_checked = 0
        self._order = Order()

    @property
    def is_ended(self) -> bool:
        """Whether its log reached the end of the data."""
        return self.record is not None and isinstance(self.record.events[-1], End)

    @property
    def written(self) -> float | None:
        """When its log was last written, in seconds since 1970, as of the last look."""
        log = None if self._prints is None else self._prints[1]
        return None if log is None else log[1] / 1e9

    def look(self) -> bool:
        """Read new data; returns whether record or note may have changed."""
        # Taken before reading: what is written meanwhile is seen at the next look.
        beside = (self.path / name for name in BESIDE)
        prints = [_fingerprint(path) for path in (self.path, self._log, *beside)]
        if prints == self._prints:
            return False
        self._prints = prints
        try:
            self.note = self._read()
        except DataError as error:
            self.note = str(error)
        except OSError as error:
            self.note = f"{self.path} cannot be read ({error.strerror})"
        return True

    @property
    def _log(self) -> Path:
        return self.path if self.path.is_file() else self.path / "events.jsonl"

    def _read(self) -> str | None:
        """Update the record, or return what is missing."""
        if not self.path.exists():
            return f"{self.path} does not exist yet; waiting for the run to start"
        log = self._log
        if self._tail is None or self._tail.path != log:
            self._tail = Tail(log)
        events = self._tail.look() if log.is_file() else []
        if not events:
            return "waiting for the run's first update"
        self._check(events, log)
        self.record = with_files(RunRecord(name=self.name, events=events), self.path)
        return None

    def _check(self, events: Sequence[Event], log: Path) -> None:
        """Refuse events that cannot follow the previous ones; only new ones are checked."""
        if events is not self._checked:
            self._checked, self._num_checked, self._order = events, 0, Order()
        for event in events[self._num_checked :]:
            try:
                self._order(event)
            except ValueError as error:
                self._checked = None
                raise DataError(log, str(error), line=self._num_checked + 1) from error
            self._num_checked += 1


def followed(paths: Sequence[Path]) -> list[FollowedRun]:
    """The runs at these paths, with unique names."""
    return [
        FollowedRun(path, name=name) for path, name in zip(paths, run_names(paths), strict=True)
    ]


def _fingerprint(path: Path) -> _Print:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


class Tail:
    """Reads the events of a growing log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._restart()

    def look(self) -> list[Event]:
        """All events of the log so far; `DataError` for an invalid line.

        After such a line the next look starts over, as the file may have been replaced.
        """
        with self.path.open("rb") as file:
            if not self._begins_as_before(file):
                self._restart()
                file.seek(0)
            found = file.read()
        self._take(found[: found.rfind(b"\n") + 1])
        return self._events

    def _restart(self) -> None:
        # A new list: the old one may still be in use.
        self._events: list[Event] = []
        self._digest = blake2b()
        self.kept = 0

    def _begins_as_before(self, file: IO[bytes]) -> bool:
        """Whether the bytes read so far are unchanged; leaves the file positioned after them."""
        digest, left = blake2b(), self.kept
        while left and (piece := file.read(min(left, _PIECE_BYTES))):
            digest.update(piece)
            left -= len(piece)
        return digest.digest() == self._digest.digest()

    def _take(self, lines: bytes) -> None:
        for line in lines.split(b"\n")[:-1]:
            try:
                self._events.append(from_json(line.decode()))
            except (ValueError, TypeError) as error:
                number = len(self._events) + 1
                self._restart()
                raise DataError(self.path, str(error), line=number) from error
        self._digest.update(lines)
        self.kept += len(lines)


USUAL_PORT = 8642
_PORTS_TRIED = 20
_TIMEOUT_SECONDS = 5.0
"""How long a browser waits for the very first page before it must ask again."""
_SENT_BYTES = 1 << 16
_TEXT = frozenset({".jsonl", ".json", ".toml", ".txt", ".log", ".md", ".csv"})
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_LOCKED = "default-src 'none'; sandbox; frame-ancestors 'none'"
"""The content security policy of everything except pages."""


class NotFree(ConfigError):
    """An address or port that cannot be listened on."""


class LocalServer(ThreadingHTTPServer):
    """An HTTP server that knows whether it is reachable only from this machine."""

    daemon_threads = True

    def __init__(
        self,
        host: str,
        port: int,
        handler: type[BaseHTTPRequestHandler],
        *,
        tell: Callable[[str], None],
    ) -> None:
        """Listen; `tell` reports failed requests."""
        self._tell = tell
        kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
        try:
            found = socket.getaddrinfo(host, port, type=kind, flags=flags)
            self.address_family, _, _, _, address = found[0]
            super().__init__((str(address[0]), port), handler)
        except OSError as error:
            raise NotFree(
                f"must listen on an address and a port that are free on this machine, but {host}, "
                f"port {port} gave: {error.strerror}; choose others with --host and --port"
            ) from error

    def server_bind(self) -> None:
        """Bind without a name server lookup of this machine."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(str(self.server_address[0])).is_loopback

    @property
    def url(self) -> str:
        """Its URL for programs on this machine."""
        address = ipaddress.ip_address(str(self.server_address[0]))
        if address.is_unspecified:
            address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
        host = str(address) if address.version == 4 else f"[{address}]"
        return f"http://{host}:{self.server_address[1]}/"

    def is_asked_by_name(self, headers: Message) -> bool:
        """Whether a request names this machine, if the server listens on a loopback address.

        This prevents web pages from reaching it under their own name (DNS rebinding).
        """
        if not self.is_loopback:
            return True
        bound = re.escape(str(self.server_address[0]))
        known = rf"(localhost|127\.0\.0\.1|\[::1\]|{bound})(:[0-9]{{1,5}})?"
        given = headers.get_all("Host", [])
        return len(given) == 1 and re.fullmatch(known, given[0], re.IGNORECASE) is not None

    def handle_error(self, request: object, client_address: object) -> None:
        """Report a failure in one line; clients that disconnected are ignored."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            self._tell(f"a request failed ({type(error).__name__}: {error})")


class PageServer(LocalServer):
    """Serves the page of some runs."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        pages: Pages,
        folders: Mapping[str, Path],
        tell: Callable[[str], None],
    ) -> None:
        """Listen; `folders` maps run names to folders."""
        self.pages = pages
        self.folders = folders
        super().__init__(host, port, _Handler, tell=tell)


def open_server(
    host: str,
    port: int | None,
    *,
    pages: Pages,
    folders: Mapping[str, Path],
    tell: Callable[[str], None],
) -> PageServer:
    """A server at this port; by default at the first free one from 8642 on."""
    usual = [*range(USUAL_PORT, USUAL_PORT + _PORTS_TRIED), 0]
    ports = usual if port is None else [port]
    require(0 <= ports[0] <= 65535, f"port must lie in 0..65535, got {ports[0]}")
    for number in ports:
        try:
            return PageServer(host, number, pages=pages, folders=folders, tell=tell)
        except NotFree as error:
            cause = error.__cause__
            is_taken = isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
            if number == ports[-1] or not is_taken:
                raise
    raise AssertionError("the last port is given or refused")


class QuietHandler(BaseHTTPRequestHandler):
    """Reveals neither its software nor its requests."""

    def version_string(self) -> str:
        """The server header."""
        return "sortedrl"

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""


class _Handler(QuietHandler):
    server: PageServer
    timeout = 30

    def do_GET(self) -> None:
        if not self.server.is_asked_by_name(self.headers):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
            return
        path = self.path.partition("?")[0]
        if path == "/":
            self._send_page()
        elif path == "/state":
            self._send_state()
        elif path.startswith("/files/"):
            self._send_file(path)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def do_HEAD(self) -> None:
        self.do_GET()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send a short error that repeats nothing from the request."""
        # the base class refuses methods by their absence
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else code
        text = f"{HTTPStatus(status).phrase}\n".encode()
        extra = {"Allow": "GET, HEAD"} if status == HTTPStatus.METHOD_NOT_ALLOWED else {}
        self._send(text, kind="text/plain; charset=utf-8", status=status, extra=extra)

    def _send_page(self) -> None:
        snapshot = self.server.pages.newest(timeout_seconds=_TIMEOUT_SECONDS)
        policy = head_value(snapshot.text, "Content-Security-Policy") + "; frame-ancestors 'none'"
        self._send(snapshot.text.encode(), kind="text/html; charset=utf-8", policy=policy)

    def _send_state(self) -> None:
        snapshot = self.server.pages.newest()
        state = {
            "version": snapshot.version,
            "runs": len(self.server.folders),
            "ended": snapshot.is_ended,
            "seconds": snapshot.seconds,
            "written": snapshot.written,
            "notes": snapshot.notes,
        }
        self._send(json.dumps(state).encode(), kind="application/json")

    def _send_file(self, path: str) -> None:
        _, _, name, *parts = map(decoded, path.split("/"))
        folder = self.server.folders.get(name or "")
        found = None if folder is None else file_inside(folder, parts)
        if found is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            file = found.open("rb")
        except OSError:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with file:
            left = os.fstat(file.fileno()).st_size
            is_text = found.suffix in _TEXT
            self._send_head(
                kind="text/plain; charset=utf-8" if is_text else "application/octet-stream",
                length=left,
                extra={"Content-Disposition": f"attachment; filename*=UTF-8''{quote(found.name)}"},
            )
            # A log may grow while it is sent: exactly the announced length is sent.
            while left and self.command != "HEAD":
                piece = file.read(min(left, _SENT_BYTES))
                if not piece:
                    return
                self.wfile.write(piece)
                left -= len(piece)

    def _send(
        self,
        body: bytes,
        *,
        kind: str,
        status: int = HTTPStatus.OK,
        policy: str = _LOCKED,
        extra: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._send_head(kind=kind, length=len(body), status=status, policy=policy, extra=extra)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_head(
        self,
        *,
        kind: str,
        length: int,
        status: int = HTTPStatus.OK,
        policy: str = _LOCKED,
        extra: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(length),
            "Content-Security-Policy": policy,
            **_HEADERS,
            **extra,
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def decoded(part: str) -> str | None:
    """Decode one segment of a request path; `None` if it is invalid."""
    try:
        return unquote(part, errors="strict")
    except UnicodeDecodeError:
        return None


def file_inside(folder: Path, parts: Sequence[str | None]) -> Path | None:
    """The plain file at this path inside the folder, if it may be served."""
    names = [part for part in parts if part is not None and _is_name(part)]
    if not names or len(names) < len(parts):
        return None
    try:
        root = folder.resolve(strict=True)
        found = root.joinpath(*names).resolve(strict=True)
    except (OSError, RuntimeError):  # missing, too long, or a symlink loop
        return None
    if not found.is_relative_to(root) or not all(map(_is_name, found.relative_to(root).parts)):
        return None
    return found if found.is_file() else None


def _is_name(part: str) -> bool:
    """Whether this names an entry of a folder that is neither hidden nor elsewhere.

    >>> [_is_name(part) for part in ("events.jsonl", "..", ".env", "a/b", "C:", "")]
    [True, False, False, False, False, False]
    """
    return bool(part) and not part.startswith(".") and not any(sign in part for sign in "/\\:\0")
