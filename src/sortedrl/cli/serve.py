"""`sortedrl serve`: an endpoint for agent programs, backed by the engine and the scheduler."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import tyro

from sortedrl.cli.arguments import parse
from sortedrl.config.checks import require, require_native
from sortedrl.report.terminal import one_line, tell
from sortedrl.runs.serve import ServeSettings, serve

HELP = """Serve a model to agent programs: token ids in, token ids and log-probabilities out.

  sortedrl serve MODEL                          at http://127.0.0.1:8123; Ctrl-C stops it
  sortedrl serve tiny --slots 8 --out runs/agents      writes events.jsonl for sortedrl report
  sortedrl serve MODEL --weights-folder runs/mine      clients may load weights from there
  SORTEDRL_TOKEN=... sortedrl serve MODEL --host 0.0.0.0      for other machines, with a token

POST /inference/v1/generate (as vLLM) and POST /v1/completions (as OpenAI, with token ids or text).
The header X-Session-ID names a conversation; turns of the oldest conversation get a slot first.
The same request with the same seed gets the same tokens, regardless of other requests.
POST /update_weights_from_disk (as SGLang) loads new weights while requests are in flight: running
turns keep their tokens and continue, and weight_versions gives the version behind each token.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to serve."""

    model: tyro.conf.Positional[tuple[str, ...]]
    """The model: a hub name, a folder, a GGUF file, or tiny."""
    json: bool = False
    """Print one line with a JSON object, {"url": ...}, once the server listens."""
    settings: ServeSettings = field(default_factory=ServeSettings)


def run(arguments: Sequence[str]) -> None:
    """Run the command."""
    given = parse(Arguments, arguments, prog="sortedrl serve", description=HELP)
    require(
        len(given.model) == 1,
        f"give one model, got {len(given.model)}; see sortedrl serve --help",
    )
    require_native("sortedrl serve")
    model = given.model[0]

    def ready(url: str) -> None:
        tell(f"serving {one_line(model)} at {url} (Ctrl-C stops it)")
        if given.json:
            print(json.dumps({"url": url}), flush=True)

    serve(model, given.settings, tell=tell, on_ready=ready)
