"""Runs to be watched: logs that grow piece by piece, and a server for them."""

import http.client
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache

from sortedrl.core.events import to_json
from sortedrl.report.watch import Pages, PageServer, followed
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.settings import PRESETS

PATIENCE_SECONDS = 60


@cache
def log_of(strategy="sorted", *, seed=0, preset="six"):
    """The lines of a simulated run's log."""
    simulation = PRESETS[preset]()
    schedule = replace(simulation.schedule, strategy=strategy)
    lines = []
    simulate(
        replace(simulation, schedule=schedule, seed=seed),
        record=lambda event: lines.append(to_json(event).encode() + b"\n"),
    )
    return tuple(lines)


@cache
def first_updates(number, **given):
    """The log as far as it is after so many updates."""
    lines = log_of(**given)
    ends = [place for place, line in enumerate(lines, 1) if b'"event":"update"' in line]
    return b"".join(lines[: ends[number - 1]])


def whole_log(**given):
    return b"".join(log_of(**given))


def write_run(folder, log):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_bytes(log)
    return folder


@contextmanager
def served(*paths, refresh_seconds=0.05, host="127.0.0.1", port=0, told=None):
    runs = followed(paths)
    tell = [].append if told is None else told.append
    with (
        closing(Pages(runs, tell=tell, refresh_seconds=refresh_seconds)) as pages,
        PageServer(
            host, port, pages=pages, folders={run.name: run.path for run in runs}, tell=tell
        ) as server,
    ):
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path, *, method="GET", host=None, more=()):
    """The answer to a request, sent exactly as given: status, headers and body."""
    address, port = server.server_address[:2]
    with closing(http.client.HTTPConnection(address, port, timeout=PATIENCE_SECONDS)) as line:
        line.putrequest(method, path, skip_host=True)
        for given in [f"{address}:{port}"] if host is None else host:
            line.putheader("Host", given)
        for name, value in more:
            line.putheader(name, value)
        line.endheaders()
        with line.getresponse() as reply:
            return reply.status, reply.headers, reply.read()


def until(holds):
    """Wait until something holds, and give it."""
    limit = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < limit:
        found = holds()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("it did not come about in time")
