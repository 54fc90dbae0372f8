"""`sortedrl watch`: serves the report page of runs and updates it while they run."""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import tyro

from sortedrl.cli.arguments import parse
from sortedrl.config.checks import require
from sortedrl.report.terminal import tell
from sortedrl.report.watch import Pages, PageServer, followed, open_server

HELP = """Serve the report page of runs in the browser, updated while they run.

  sortedrl watch runs/mine                 then open the printed address; Ctrl-C stops it
  sortedrl watch runs/sorted runs/sync     side by side
  sortedrl watch runs/next --open          opens the browser; the run may start later
  sortedrl watch runs/mine --port 9000     on this port; 0 takes any free one

Only this machine can connect, unless --host says otherwise. The files of a run are served too, such
as /files/mine/config.toml. A run that is in progress or was killed is shown up to its last event.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to watch, and where to serve it."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders, or their events.jsonl; they need not exist yet."""
    port: int | None = None
    """Port to listen on; 0 takes any free one. By default 8642, or the next free one."""
    host: str = "127.0.0.1"
    """Address to listen on. Anyone who can connect can read the runs: there is no password."""
    open: bool = False
    """Open the page in the browser."""
    json: bool = False
    """Print one line with a JSON object, {"url": ...}, once the server listens."""


def run(arguments: Sequence[str]) -> None:
    """Run the command."""
    given = parse(Arguments, arguments, prog="sortedrl watch", description=HELP)
    require(bool(given.runs), "give at least one run; see sortedrl watch --help")
    runs = followed(given.runs)
    for path in given.runs:
        if not path.exists():
            tell(f"{path} does not exist yet; waiting for the run to start")
    folders = {run.name: run.path for run in runs}
    with (
        closing(Pages(runs, tell=tell)) as pages,
        open_server(given.host, given.port, pages=pages, folders=folders, tell=tell) as server,
    ):
        _announce(given, server)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            tell("stopped")


def _announce(given: Arguments, server: PageServer) -> None:
    tell(f"watching {', '.join(map(str, given.runs))} at {server.url} (Ctrl-C stops it)")
    if not server.is_loopback:
        tell(
            f"listening on {given.host}: anyone who can connect to this machine can read these "
            "runs, their answers and their files; there is no password"
        )
    if given.json:
        print(json.dumps({"url": server.url}), flush=True)
    if given.open and not webbrowser.open(server.url):
        tell("no browser could be opened; open the address yourself")
