"""`sortedrl serve`: an engine behind HTTP, token in and token out, for agents that own their loop.

    POST /inference/v1/generate       token ids in, token ids out, as vLLM has it
    POST /v1/completions              the same as OpenAI has it, with token ids or text
    POST /update_weights_from_disk    new weights, as SGLang has it; turns continue with them
    GET  /v1/models, /server_info     the model, and the load of the server
    GET  /health                      whether the server runs; needs no token

A request becomes a `Turn`, and its thread waits until the scheduler has an answer, the client
disconnects or the request times out. An unknown field that would change the answer is refused by
name. On a loopback address only requests that name this machine are answered, so that no web page
can reach the server under another name (DNS rebinding).
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import re
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from sortedrl.config.checks import (
    PositiveFloat,
    PositiveInt,
    check_device,
    check_values,
    is_utf8,
    require,
)
from sortedrl.core.clock import WallClock
from sortedrl.core.events import Event, EventFile, Record
from sortedrl.core.files import refuse_foreign
from sortedrl.data.stream import Tokenizer
from sortedrl.errors import ConfigError, DataError, os_errors
from sortedrl.report.terminal import one_line
from sortedrl.report.watch import LocalServer, QuietHandler
from sortedrl.runs.endpoint import Answer, Endpoint, WeightReader, is_name
from sortedrl.runs.start import Stopping
from sortedrl.runs.tasks import threads, tokenizer_of
from sortedrl.runs.turns import HttpError, Turn, TurnLog, TurnScheduler
from sortedrl.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sortedrl.engines.native import NativeEngine

Tell = Callable[[str], None]
EVENTS = "events.jsonl"
TOKEN_VARIABLE = "SORTEDRL_TOKEN"
_GIB = 1 << 30
_POLL_SECONDS = 0.25
"""How often a waiting request checks whether its client is still connected."""
_BODY_SECONDS = 60.0
_IDLE_SECONDS = 75.0
_DRAIN_SECONDS = 5.0
_LINGER_SECONDS = 1.0
_CHUNK_BYTES = 1 << 16
_SPARE_CONNECTIONS = 128
_PORTS = 65_535
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """What is served, where, and within which limits."""

    host: str = "127.0.0.1"
    """Address to listen at; any other than this machine's own needs a token."""
    port: int = 8123
    """Where to listen; 0 takes any free port."""
    token: str | None = None
    """Token that requests must have, as Authorization: Bearer TOKEN. Other users of a machine can
    read its command lines: the environment variable SORTEDRL_TOKEN does the same."""
    name: str | None = None
    """Name of the model in requests; by default MODEL as given."""
    slots: PositiveInt = 32
    """Turns that are generated at the same time."""
    max_tokens: PositiveInt = 4096
    """Most tokens of one turn, and the default of requests without max_tokens."""
    queue: PositiveInt = 1024
    """Turns that may wait for a slot; beyond that the answer is 503."""
    timeout_seconds: PositiveFloat = 3600.0
    """How long a request may take, the wait for a slot included; then the answer is 504."""
    session_seconds: PositiveFloat = 300.0
    """A session without a turn for so long ends, in the log and in the order of turns."""
    weights_folder: Path | None = None
    """Folder below which callers may name new weights; without it they may name none."""
    out: Path | None = None
    """Folder to keep events.jsonl in, for sortedrl report, watch and trace."""
    seed: int | None = None
    """Seed of requests without one; by default another one at every start."""
    cache_gib: PositiveFloat | None = None
    """Memory of the KV cache; by default most of the free GPU memory, or a quarter of the RAM."""
    device: str | None = None
    """cuda, cpu, ...; by default the GPU if there is one."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, before anything is loaded."""
        check_device(self.device)
        require(0 <= self.port <= _PORTS, f"port must lie in 0..{_PORTS}, got {self.port}")
        secret = self.secret
        require(
            secret is None or (secret.isascii() and secret.isprintable() and " " not in secret),
            "the token must be printable ASCII without spaces, such as openssl rand -hex 32 gives",
        )

    @property
    def secret(self) -> str | None:
        """The token, from the command line or from the environment."""
        return self.token if self.token is not None else os.environ.get(TOKEN_VARIABLE) or None


def serve(
    model: str,
    settings: ServeSettings,
    *,
    tell: Tell,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve a model until Ctrl-C or SIGTERM; `on_ready` is given the address.

    Invalid settings are refused before the weights are loaded.
    """
    check_values(settings)
    _require_token(settings)
    with ExitStack() as stack:
        record = stack.enter_context(_log_file(settings.out, tell=tell))
        # Threads that answer HTTP need a core too.
        stack.enter_context(threads(None, workers=1))
        tokenizer = tokenizer_of(model)
        tell(f"loading {one_line(model)}")
        loaded = _loaded(model, settings, tokenizer)
        engine = stack.enter_context(closing(loaded.engine))
        seed = secrets.randbits(62) if settings.seed is None else settings.seed
        log = TurnLog(
            record, clock=WallClock(), slots=engine.slots, seed=seed, version=engine.version
        )
        scheduler = TurnScheduler(
            engine,
            queue=settings.queue,
            seed=seed,
            log=log,
            session_seconds=settings.session_seconds,
        )
        endpoint = Endpoint(
            scheduler,
            name=model if settings.name is None else settings.name,
            limits=engine.request_limits[0],
            max_tokens=settings.max_tokens,
            stop_tokens=loaded.stop_tokens,
            tokenizer=tokenizer,
            weights=None
            if settings.weights_folder is None
            else WeightReader(settings.weights_folder, loaded.model),
        )
        server = stack.enter_context(listening(endpoint, settings, tell=tell))
        stack.enter_context(Stopping(tell, message="stopping", then=scheduler.close))
        on_ready(server.url.rstrip("/"))
        scheduler.run()


@dataclass(frozen=True, slots=True)
class _Loaded:
    model: PreTrainedModel
    engine: NativeEngine
    stop_tokens: Sequence[int]


def _loaded(name: str, settings: ServeSettings, tokenizer: Tokenizer) -> _Loaded:
    from sortedrl.engines.native import NativeEngine
    from sortedrl.models.loading import load_model, stop_tokens

    model = load_model(name, dtype=None, device=settings.device)
    cache = settings.cache_gib
    engine = NativeEngine(
        model,
        slots=settings.slots,
        max_tokens=settings.max_tokens,
        tokenizer=tokenizer,
        cache_bytes=None if cache is None else int(cache * _GIB),
        keeps_prefixes=True,
    )
    return _Loaded(model, engine, stop_tokens(model))


def _require_token(settings: ServeSettings) -> None:
    """Refuse an address that other machines can reach, without a token."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"host must be an address of this machine, got {settings.host!r}"
        ) from error
    require(
        settings.secret is not None
        or all(ipaddress.ip_address(str(address[0])).is_loopback for *_, address in found),
        f"host {settings.host} can be reached from other machines, which needs a token: set "
        f"{TOKEN_VARIABLE} (openssl rand -hex 32 makes one), or listen at 127.0.0.1",
    )


@contextmanager
def _log_file(out: Path | None, *, tell: Tell) -> Iterator[Record]:
    """Where events go; a log that can no longer be written ends, and the server keeps running."""
    if out is None:
        yield lambda event: None
        return
    path = out / EVENTS
    refuse_foreign(path, mark=None)
    with os_errors(out, "cannot be made"):
        out.mkdir(parents=True, exist_ok=True)
    with closing(EventFile(path, is_watched=True)) as file:
        is_broken = False

        def record(event: Event) -> None:
            nonlocal is_broken
            if is_broken:
                return
            try:
                file(event)
            except DataError as error:
                is_broken = True
                tell(f"{error}; the log ends here, and the server continues without it")

        yield record


class EndpointServer(LocalServer):
    """Listens for an endpoint: a thread for each connection, and not too many of them."""

    request_queue_size = 128

    def __init__(self, endpoint: Endpoint, settings: ServeSettings, *, tell: Tell) -> None:
        """Listen; `tell` gets a line for each request that failed."""
        self.endpoint = endpoint
        self.secret = settings.secret
        self.timeout_seconds = settings.timeout_seconds
        self._room = threading.BoundedSemaphore(
            settings.queue + settings.slots + _SPARE_CONNECTIONS
        )
        self._num_busy = 0
        self._is_idle = threading.Condition()
        super().__init__(settings.host, settings.port, _Handler, tell=tell)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count a request as being answered inside the block."""
        with self._is_idle:
            self._num_busy += 1
        try:
            yield
        finally:
            with self._is_idle:
                self._num_busy -= 1
                self._is_idle.notify_all()

    def drain(self) -> None:
        """Wait for answers that are being sent, at most a few seconds."""
        with self._is_idle:
            self._is_idle.wait_for(lambda: not self._num_busy, timeout=_DRAIN_SECONDS)

    def process_request(self, request: object, client_address: object) -> None:
        """Give the connection a thread, if there are not too many."""
        assert isinstance(request, socket.socket)
        if not self._room.acquire(blocking=False):
            request.settimeout(_LINGER_SECONDS)
            request.sendall(
                b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
                b"Content-Length: 0\r\nConnection: close\r\n\r\n"
            )
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: object, client_address: object) -> None:
        """Serve one connection."""
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._room.release()


@contextmanager
def listening(
    endpoint: Endpoint, settings: ServeSettings, *, tell: Tell
) -> Iterator[EndpointServer]:
    """The server, answering inside the block; at its end the last answers are sent."""
    with EndpointServer(endpoint, settings, tell=tell) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            server.drain()


class _Handler(QuietHandler):
    """Answers the requests of one connection."""

    server: EndpointServer
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_SECONDS

    def do_GET(self) -> None:
        # An unread body must not be taken for the next request.
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True
        with self.server.busy():
            self._answer(self._get)

    def do_POST(self) -> None:
        with self.server.busy():
            self._answer(self._post)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """A refusal by the base class, without text from the request."""
        self.close_connection = True
        self._send(code, _error(code, HTTPStatus(code).phrase))

    def _answer(self, respond: Callable[[], Answer]) -> None:
        try:
            answer = respond()
        except HttpError as error:
            self._send(error.status, _error(error.status, str(error)))
        except _DisconnectedError:
            self.close_connection = True
        else:
            self._send(HTTPStatus.OK, answer)

    def _get(self) -> Answer:
        path = self.path.partition("?")[0]
        if path == "/health":
            self._check_host()
            return {"status": "ok"}
        self._check_caller()
        if path == "/v1/models":
            return self.server.endpoint.models()
        if path == "/server_info":
            return self.server.endpoint.info()
        raise HttpError(404, "GET knows /health, /server_info and /v1/models")

    def _post(self) -> Answer:
        # An error before the body is read leaves it on the connection.
        was_closed, self.close_connection = self.close_connection, True
        self._check_caller()
        path, endpoint = self.path.partition("?")[0], self.server.endpoint
        turns = {"/inference/v1/generate": endpoint.generate, "/v1/completions": endpoint.complete}
        if path not in (*turns, "/update_weights_from_disk"):
            raise HttpError(
                404,
                "POST knows /inference/v1/generate, /v1/completions and "
                "/update_weights_from_disk; apply the chat template in your program, and send "
                "token ids",
            )
        session_id = self._session_id()
        raw = self._body()
        self.close_connection = was_closed
        body = _decoded(raw)
        if path not in turns:
            return endpoint.update_weights(body)
        request = turns[path](body, session_id=session_id)
        endpoint.scheduler.submit(request.turn)
        return request.answer(self._waited(request.turn))

    def _waited(self, turn: Turn) -> Trajectory:
        """The answer, unless the client disconnects or the request times out first."""
        scheduler, seconds = self.server.endpoint.scheduler, self.server.timeout_seconds
        deadline = time.monotonic() + seconds
        while not turn.done.wait(_POLL_SECONDS):
            if self._has_disconnected():
                scheduler.cancel(turn, status=499, reason="the client disconnected")
                raise _DisconnectedError
            if time.monotonic() > deadline:
                scheduler.cancel(turn, status=504, reason=f"no answer within {seconds:g} seconds")
        if turn.answer is None:
            assert turn.failure is not None, "a turn that is done has an answer or a failure"
            raise turn.failure
        return turn.answer

    def _has_disconnected(self) -> bool:
        """Whether the other side has closed the connection."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        try:
            return bool(poll.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _check_caller(self) -> None:
        self._check_host()
        secret = self.server.secret
        if secret is None:
            return
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        is_known = hmac.compare_digest(given.strip().encode(errors="replace"), secret.encode())
        if scheme.lower() != "bearer" or not is_known:
            raise HttpError(401, "send the server's token as Authorization: Bearer TOKEN")

    def _check_host(self) -> None:
        """Refuse a request for a name that is none of this machine's, where only it can come."""
        if not self.server.is_asked_by_name(self.headers):
            raise HttpError(421, "the request must be for localhost")

    def _session_id(self) -> str | None:
        given = self.headers.get_all("X-Session-ID", [])
        if not given:
            return None
        if len(given) > 1 or not is_name(given[0]):
            raise HttpError(
                400, "X-Session-ID must be one printable name of at most 256 characters"
            )
        return str(given[0])

    def _body(self) -> bytes:
        """The body of the request, which must be announced as JSON."""
        if self.headers.get_content_type() != "application/json":
            # A form on a web page cannot send this type without asking first.
            raise HttpError(415, "send JSON, with the header Content-Type: application/json")
        length = self.headers.get("Content-Length", "")
        if "Transfer-Encoding" in self.headers or not re.fullmatch(r"[0-9]{1,12}", length):
            raise HttpError(411, "send the body in one piece, with its Content-Length")
        most = self.server.endpoint.most_bytes
        if int(length) > most:
            raise HttpError(413, f"the body must have at most {most:,} bytes, got {int(length):,}")
        return self._read(int(length))

    def _read(self, count: int) -> bytes:
        """So many bytes of the body, which must not take for ever."""
        deadline = time.monotonic() + _BODY_SECONDS
        pieces = []
        while count:
            piece = self.rfile.read1(min(count, _CHUNK_BYTES))
            if not piece:
                raise _DisconnectedError
            if time.monotonic() > deadline:
                raise HttpError(408, f"the body must arrive within {_BODY_SECONDS:g} seconds")
            pieces.append(piece)
            count -= len(piece)
        return b"".join(pieces)

    def _send(self, status: int, answer: Answer) -> None:
        body = json.dumps(answer, allow_nan=False, separators=(",", ":")).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.send_header("Retry-After", "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        if self.close_connection and status >= HTTPStatus.BAD_REQUEST:
            self._linger()

    def _linger(self) -> None:
        """Read what the client still sends, so that it gets the refusal and not a reset."""
        self.wfile.flush()
        deadline = time.monotonic() + _LINGER_SECONDS
        try:
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(_LINGER_SECONDS)
            while time.monotonic() < deadline and self.connection.recv(_CHUNK_BYTES):
                pass
        except OSError:
            pass


class _DisconnectedError(Exception):
    """The client has closed the connection: no answer can be sent."""


def _error(status: int, message: str) -> Answer:
    phrase = "Client Closed Request" if status == 499 else HTTPStatus(status).phrase
    return {"error": {"message": message, "type": phrase, "code": int(status)}}


def _decoded(raw: bytes) -> object:
    try:
        text = raw.decode("utf-8-sig")
        row: object = json.loads(text, parse_constant=_refuse_constant)
        # Only an escape can make a lone surrogate, which neither tokenizer nor engine can encode.
        if _SURROGATE.search(text) and not is_utf8(json.dumps(row, ensure_ascii=False)):
            raise ValueError(
                "a text has half a character, a lone surrogate, which UTF-8 cannot encode; it was "
                "truncated or decoded wrongly"
            )
    except (ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise HttpError(400, f"the body must be JSON ({reason:.200})") from error
    return row


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not valid JSON")
