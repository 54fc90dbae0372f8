"""The server of the page: GET and HEAD, on this machine only by default.

    /                    the page
    /state               what the page asks for again and again: is there a newer one?
    /files/RUN/PATH      a plain file out of a run's folder, to be saved

On a loopback address only requests that name this machine are answered, so that no page of
elsewhere can reach the server under a name of its own (DNS rebinding).
Whatever a request asks for, and wherever links lead, a file that is given lies inside the folder.
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
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from urllib.parse import quote, unquote

from sortedrl.config.checks import require
from sortedrl.errors import ConfigError
from sortedrl.report.html import head_value
from sortedrl.report.watch.pages import Pages

USUAL_PORT = 8642
_PORTS_TRIED = 20
_TIMEOUT_SECONDS = 5.0
"""How long a browser waits for the very first page before it must ask again."""
_PIECE_BYTES = 1 << 16
_TEXT = frozenset({".jsonl", ".json", ".toml", ".txt", ".log", ".md", ".csv"})
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_LOCKED = "default-src 'none'; sandbox; frame-ancestors 'none'"
"""The policy of everything that is no page."""


class Server(ThreadingHTTPServer):
    """Serves the page of some runs."""

    daemon_threads = True

    def __init__(
        self,
        host: str,
        port: int,
        *,
        pages: Pages,
        folders: Mapping[str, Path],
        tell: Callable[[str], None],
    ) -> None:
        """Listen; `folders` are those of the runs by name, `tell` hears of requests that broke."""
        self.pages = pages
        self.folders = folders
        self._tell = tell
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = found[0]
        super().__init__((str(address[0]), port), _Handler)

    def server_bind(self) -> None:
        """Bind, without asking a name server what this machine is called."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(str(self.server_address[0])).is_loopback

    @property
    def url(self) -> str:
        """Where a browser on this machine finds the page."""
        address = ipaddress.ip_address(str(self.server_address[0]))
        if address.is_unspecified:
            address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
        host = str(address) if address.version == 4 else f"[{address}]"
        return f"http://{host}:{self.server_address[1]}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Tell in one line what broke; a browser that went away is no news."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            self._tell(f"a request failed ({type(error).__name__}: {error})")


def open_server(
    host: str,
    port: int | None,
    *,
    pages: Pages,
    folders: Mapping[str, Path],
    tell: Callable[[str], None],
) -> Server:
    """A server at this port; without one, at the first that is free from the usual one on."""
    usual = [*range(USUAL_PORT, USUAL_PORT + _PORTS_TRIED), 0]
    ports = usual if port is None else [port]
    require(0 <= ports[0] <= 65535, f"port must lie in 0..65535, got {ports[0]}")
    for number in ports:
        try:
            return Server(host, number, pages=pages, folders=folders, tell=tell)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and number != ports[-1]:
                continue
            raise ConfigError(
                f"must listen on an address and a port that are free on this machine, but {host}, "
                f"port {number} gave: {error.strerror}; choose others with --host and --port"
            ) from error
    raise AssertionError("the last port is given or refused")


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Server
    timeout = 30

    def do_GET(self) -> None:
        """Answer."""
        if not self._names_this_machine():
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
        """Answer, without the body."""
        self.do_GET()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """A short refusal that repeats nothing from the request."""
        # the base class knows methods only by whether they are there
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else code
        text = f"{HTTPStatus(status).phrase}\n".encode()
        extra = {"Allow": "GET, HEAD"} if status == HTTPStatus.METHOD_NOT_ALLOWED else {}
        self._send(text, kind="text/plain; charset=utf-8", status=status, extra=extra)

    def version_string(self) -> str:
        """What the server calls itself."""
        return "sortedrl"

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing about requests."""

    def _names_this_machine(self) -> bool:
        """Whether the request is for a name of this machine, where others cannot reach it."""
        if not self.server.is_loopback:
            return True
        bound = re.escape(str(self.server.server_address[0]))
        known = rf"(localhost|127\.0\.0\.1|\[::1\]|{bound})(:[0-9]{{1,5}})?"
        given = self.headers.get_all("Host", [])
        return len(given) == 1 and re.fullmatch(known, given[0], re.IGNORECASE) is not None

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
            # A log grows while it is sent: what was announced is sent, and no more.
            while left and self.command != "HEAD":
                piece = file.read(min(left, _PIECE_BYTES))
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
    """A part of a request's path between two slashes as text, if it is any."""
    try:
        return unquote(part, errors="strict")
    except UnicodeDecodeError:
        return None


def file_inside(folder: Path, parts: Sequence[str | None]) -> Path | None:
    """The plain file at these parts of a path under the folder, if there is one to hand out."""
    names = [part for part in parts if part is not None and _is_name(part)]
    if not names or len(names) < len(parts):
        return None
    try:
        root = folder.resolve(strict=True)
        found = root.joinpath(*names).resolve(strict=True)
    except (OSError, RuntimeError):  # not there, too long, or links that go in a circle
        return None
    if not found.is_relative_to(root) or not all(map(_is_name, found.relative_to(root).parts)):
        return None
    return found if found.is_file() else None


def _is_name(part: str) -> bool:
    """Whether this names something in a folder, and nothing hidden or elsewhere.

    >>> [_is_name(part) for part in ("events.jsonl", "..", ".env", "a/b", "C:", "")]
    [True, False, False, False, False, False]
    """
    return bool(part) and not part.startswith(".") and not any(sign in part for sign in "/\\:\0")
