"""The process of a self-test: prints its verdict as one line of JSON.

    python -m sortedrl.engines.self_test native
    python -m sortedrl.engines.self_test server http://localhost:8000

Only that line goes to standard output. What engines print goes to standard error.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from sortedrl.engines.installed import KINDS, Kind
from sortedrl.engines.self_test.launcher import STAGE, Verdict, to_line
from sortedrl.engines.self_test.scenario import (
    Figures,
    check,
    check_as_it_is,
    made_pair,
    write_model,
)
from sortedrl.engines.self_test.tiny_engines import (
    connected_engine,
    default_device,
    default_dtype,
    start_engine,
)
from sortedrl.engines.servers import served_vocabulary
from sortedrl.errors import SortedRLError

if TYPE_CHECKING:
    from sortedrl.engines.generation import RolloutEngine


def main(arguments: Sequence[str]) -> int:
    """Test the engine that the arguments name."""
    # So small a model is slower on several threads.
    torch.set_num_threads(1)
    with _own_output() as output:
        try:
            verdict = (
                _server(arguments[1]) if arguments[0] == "server" else _engine(_kind(arguments[0]))
            )
        except SortedRLError as error:
            verdict = Verdict(reason=str(error))
        os.write(output, f"{to_line(verdict)}\n".encode())
    return 0


def _engine(kind: Kind) -> Verdict:
    device = default_device()
    dtype = default_dtype(device)
    with TemporaryDirectory() as folder:
        _stage("making a tiny model")
        models = made_pair(device=device, dtype=dtype)
        write_model(models.before, Path(folder))
        _stage("starting the engine")
        engine = start_engine(kind, Path(folder), device=device, dtype=dtype)
        try:
            return _verdict(engine, check(engine, models, stage=_stage))
        finally:
            _stage("closing the engine")
            engine.close()


def _server(url: str) -> Verdict:
    _stage("inspecting the server")
    vocabulary = asyncio.run(served_vocabulary(url))
    with TemporaryDirectory() as folder:
        engine = connected_engine(url, vocabulary=vocabulary, weights_folder=Path(folder))
        try:
            return _verdict(engine, check_as_it_is(engine, vocabulary=vocabulary, stage=_stage))
        finally:
            engine.close()


def _verdict(engine: RolloutEngine, figures: Figures) -> Verdict:
    return Verdict(
        reason=None,
        name=engine.name,
        slots=engine.slots,
        largest_gap=figures.largest_gap,
        tokens_per_second=figures.tokens_per_second,
    )


def _kind(name: str) -> Kind:
    (kind,) = [kind for kind in KINDS if kind == name]
    return kind


def _stage(what: str) -> None:
    sys.stderr.write(f"{STAGE}{what}\n")
    sys.stderr.flush()


@contextmanager
def _own_output() -> Iterator[int]:
    """Standard output for the verdict alone: whatever else is printed goes to standard error."""
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        yield output
    finally:
        os.close(output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
