"""`sortedrl engines`: lists the installed rollout engines, and runs their self-tests."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from sortedrl.cli.arguments import parse
from sortedrl.config.checks import require
from sortedrl.engines.installed import KINDS, Device, Installation, Kind, devices, installation
from sortedrl.engines.self_test import Verdict, self_test, server_self_test
from sortedrl.report.terminal import line_width, tell, thousands

HELP = """List the rollout engines and run a self-test of each, in about a minute.

  sortedrl engines                              native, vLLM and SGLang, if installed
  sortedrl engines --no-test                    only list them, with versions and devices
  sortedrl engines --only native vllm           only these two
  sortedrl engines --urls http://gpu1:8000      also test a running server
  sortedrl engines --json                       for a script

The self-test uses a tiny random model. The engine generates 8 answers in 4 slots, is interrupted,
loads other weights and continues. No answer may be lost or duplicated, and every log-probability
must match a plain forward pass with the weights that sampled the token.
A server keeps its own weights, so its log-probabilities are not compared.

Exits with code 0 if all installed engines pass, with code 1 otherwise.
"""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Which engines to list and test."""

    only: tuple[Kind, ...] = ()
    """Only these engines; by default native, vllm and sglang."""
    urls: tuple[str, ...] = ()
    """Addresses of running vLLM or SGLang servers to test as well. Their weights are not changed,
    but they should be idle: the test may abort requests of other clients."""
    no_test: bool = False
    """Only list what is installed, without the self-tests."""
    seconds: float = 60.0
    """Time limit of each self-test, including the start of the engine."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        require(self.seconds > 0, f"seconds must be above 0, got {self.seconds:g}")
        for url in self.urls:
            require(
                url.startswith(("http://", "https://")),
                f"urls must begin with http:// or https://, got {url!r}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One engine or server, and the result of its self-test."""

    name: str
    """The engine's name, or the server's address."""
    installation: Installation
    """For a server: the installation of the native engine, whose packages the self-test needs."""
    is_server: bool = False
    verdict: Verdict | None = None
    """`None` if it was not tested."""

    @property
    def has_failed(self) -> bool:
        """Whether it was tested and failed."""
        return self.verdict is not None and not self.verdict.passed


def run(arguments: Sequence[str]) -> None:
    """Run the command."""
    given = parse(Arguments, arguments, prog="sortedrl engines", description=HELP)
    found = devices()
    entries = list(_entries(given))
    is_fine = not any(entry.has_failed for entry in entries)
    if given.json:
        print(json.dumps(_as_json(entries, found) | {"passed": is_fine}, indent=2))
    else:
        _print(entries, found)
    if not is_fine:
        raise SystemExit(1)


def _entries(given: Arguments) -> Iterator[Entry]:
    for kind in given.only or KINDS:
        found = installation(kind)
        verdict = None
        if not given.no_test and not found.missing:
            tell(f"testing {kind}, for at most {given.seconds:g} s")
            verdict = self_test(kind, seconds=given.seconds)
        yield Entry(name=kind, installation=found, verdict=verdict)
    for url in given.urls:
        found = installation("native")
        verdict = None
        if found.missing and not given.no_test:
            verdict = Verdict(reason=f"{', '.join(found.missing)} missing; run: {found.remedy}")
        elif not given.no_test:
            tell(f"testing {url}, for at most {given.seconds:g} s")
            verdict = server_self_test(url, seconds=given.seconds)
        yield Entry(name=url, installation=found, is_server=True, verdict=verdict)


def _as_json(entries: Sequence[Entry], found: Sequence[Device]) -> dict[str, object]:
    return {
        "devices": [asdict(device) for device in found],
        "engines": [_entry_as_json(entry, found) for entry in entries],
    }


def _entry_as_json(entry: Entry, found: Sequence[Device]) -> dict[str, object]:
    verdict = entry.verdict
    packages = {
        package.name: {
            "version": package.version,
            "tested": package.tested,
            "is_tested": package.is_tested,
        }
        for package in entry.installation.packages
    }
    return {
        "engine": entry.name,
        "is_server": entry.is_server,
        "is_installed": not entry.installation.missing,
        "packages": packages,
        "install": entry.installation.remedy,
        "device": _device(entry, found),
        "self_test": None
        if verdict is None
        else asdict(verdict) | {"passed": verdict.passed, "is_tiny_model": not entry.is_server},
    }


def _device(entry: Entry, found: Sequence[Device]) -> str | None:
    """The device it runs on: a GPU if there is one."""
    if entry.is_server or entry.installation.missing:
        return None
    return found[-1].name.partition(":")[0]


def _print(entries: Sequence[Entry], found: Sequence[Device]) -> None:
    console = Console(highlight=False, markup=False, emoji=False, width=line_width())
    for device in found:
        console.print(_device_line(device), soft_wrap=True)
    console.print()
    console.print(_grid(entries, found))
    for note in _notes(entries):
        console.print()
        for line in note:
            console.print(line, soft_wrap=True)


def _device_line(device: Device) -> str:
    if device.card is None or device.free_bytes is None or device.total_bytes is None:
        return f"{device.name}: {device.cores} cores"
    free, total = device.free_bytes / _GIB, device.total_bytes / _GIB
    return f"{device.name}: {device.card}, {free:.1f} of {total:.1f} GiB free"


def _grid(entries: Sequence[Entry], found: Sequence[Device]) -> Table:
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    grid.add_column("engine", overflow="fold")
    for name in ("installed", "device"):
        grid.add_column(name, no_wrap=True)
    is_tried = any(entry.verdict is not None for entry in entries)
    if is_tried:
        grid.add_column("self-test", no_wrap=True)
        for name in ("seconds", "max gap", "tokens/s"):
            grid.add_column(name, justify="right", no_wrap=True)
    for entry in entries:
        device = "its own" if entry.is_server else _device(entry, found) or ""
        cells = _verdict_cells(entry.verdict) if is_tried else ()
        grid.add_row(entry.name, _installed(entry), device, *cells)
    return grid


def _installed(entry: Entry) -> str:
    first = entry.installation.packages[0]
    if entry.is_server:
        name = entry.verdict.name if entry.verdict else None
        return "?" if name is None else name.partition(" at ")[0]
    if entry.installation.missing:
        return "missing"
    mark = "" if first.is_tested else ", untested"
    return f"{first.name} {first.version}{mark}"


def _verdict_cells(verdict: Verdict | None) -> tuple[str, str, str, str]:
    if verdict is None:
        return ("", "", "", "")
    gap, speed = verdict.largest_gap, verdict.tokens_per_second
    return (
        "passed" if verdict.passed else "FAILED",
        f"{verdict.seconds:.1f}",
        "" if gap is None else f"{gap:.1e}",
        "" if speed is None else thousands(speed),
    )


def _notes(entries: Sequence[Entry]) -> Iterator[list[str]]:
    """Notes below the table, one paragraph each."""
    for entry in entries:
        found, verdict = entry.installation, entry.verdict
        if found.missing and not entry.is_server:
            what = ", ".join(found.missing)
            # The command on a line of its own, to be copied whole.
            needs = f"{entry.name} needs {what}, which is not installed. Run:"
            yield [*_wrapped(needs), f"  {found.remedy}"]
        if not entry.is_server:
            for package in found.untested:
                yield _wrapped(
                    f"{entry.name}: {package.name} {package.version} is untested with this version "
                    f"of sortedrl; tested versions: {package.tested}"
                )
        if verdict is not None and verdict.reason is not None:
            lines = _wrapped(f"{entry.name} FAILED: {verdict.reason}")
            yield [*lines, *(_cut(f"  | {line}") for line in verdict.log)]
    yield from _remarks(entries)


def _remarks(entries: Sequence[Entry]) -> Iterator[list[str]]:
    passed = [e for e in entries if e.verdict is not None and e.verdict.passed]
    if any(not entry.is_server for entry in passed):
        yield _wrapped(
            "max gap: the largest log-probability difference to a plain forward pass, in nats. "
            "tokens/s: with a tiny model; says nothing about yours."
        )
    if any(entry.is_server for entry in passed):
        yield _wrapped(
            "Servers: loading weights was not tested, because their model is not known here; a "
            "training run checks it at its start. "
            "Their tokens/s are measured on 8 short answers."
        )


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, line_width(), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _cut(line: str) -> str:
    return line if len(line) <= line_width() else line[: line_width() - 4] + " ..."
