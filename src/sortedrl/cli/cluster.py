"""`sortedrl cluster`: checks the cluster that a run would use."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from sortedrl.cli.arguments import parse, source_and_flags
from sortedrl.config.checks import require
from sortedrl.config.cluster import Cluster
from sortedrl.config.parsing import read_toml, settings_over
from sortedrl.errors import DataError
from sortedrl.report.terminal import tell

if TYPE_CHECKING:
    from sortedrl.cluster.check import Report

HELP = """Check a cluster before a run: nothing is trained, and all resources are released.

  sortedrl cluster check                             a new Ray on this machine
  sortedrl cluster check run.toml                    with the section [cluster] of a run
  sortedrl cluster check --address auto              the Ray started by `ray start` here
  sortedrl cluster check --rollout-workers 8 --gpus-per-worker 1 --trainer-ranks 8
  sortedrl cluster check --json                      for a script

It places workers and trainer ranks as the run would, and reports what is missing. Versions of
sortedrl, Python, Ray and torch must be the same on every node; free memory is listed. The trainer
ranks then run an all-reduce: over NCCL where each has a GPU, otherwise over gloo.

In a run's file:

  [cluster]
  address = "auto"          # leave out to start a Ray for the run only
  kind = "separated"        # colocated: worker and rank share a GPU, one at a time
  rollout_workers = 4
  gpus_per_worker = 1
  trainer_ranks = 4

Exits with code 0 if a run can start, with code 1 otherwise.
"""
_WIDTH = 100
_NAME_WIDTH = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Which cluster to check, and how."""

    verb: tyro.conf.Positional[Literal["check"]]
    """check."""
    cluster: Cluster = field(default_factory=lambda: Cluster(rollout_workers=2))
    seconds: float = 60.0
    """How long to wait for resources that other runs hold."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        require(self.seconds > 0, f"seconds must be above 0, got {self.seconds:g}")


def run(arguments: Sequence[str]) -> None:
    """Run the command."""
    source, words = source_and_flags(Arguments, arguments)
    default = None
    if source is not None:
        default = Arguments(verb="check", cluster=_from_file(Path(source)))
    given = parse(Arguments, words, prog="sortedrl cluster", description=HELP, default=default)
    report, where = _report(given)
    if given.json:
        print(json.dumps(asdict(report) | {"ray": where, "is_fine": report.is_fine}, indent=2))
    else:
        for line in _lines(report):
            print(line)
    if not report.is_fine:
        raise SystemExit(1)


def _from_file(path: Path) -> Cluster:
    table = read_toml(path).get("cluster")
    if not isinstance(table, dict):
        raise DataError(path, "has no section [cluster]; see sortedrl cluster --help")
    return settings_over(Cluster(), table, path=path, section="cluster.")


def _report(given: Arguments) -> tuple[Report, str]:
    from sortedrl.cluster.connection import connected

    said: list[str] = []

    def hear(line: str) -> None:
        said.append(line)
        tell(line)

    with connected(given.cluster, tell=hear):
        # Ray is installed, or `connected` would have raised.
        from sortedrl.cluster.check import check

        return check(given.cluster, seconds=given.seconds), said[0]


def _lines(report: Report) -> Iterator[str]:
    for node in report.nodes:
        host = "silent" if node.machine is None else node.machine.host
        yield f"node {node.address} ({host}): {node.resources}"
    for bundle in report.bundles:
        names = ", ".join(device.card or device.name for device in bundle.devices)
        yield f"{bundle.holder} on {bundle.host}: {names}"
    yield ""
    for finding in report.findings:
        mark = "ok" if finding.is_fine else "FAILED"
        start = f"{finding.name:<{_NAME_WIDTH}}{mark:<8}"
        indent = " " * len(start)
        yield from textwrap.wrap(
            start + finding.words, _WIDTH, subsequent_indent=indent, drop_whitespace=True
        )
