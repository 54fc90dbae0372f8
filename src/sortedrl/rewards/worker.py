"""A worker process: loads a reward function, scores what it is sent, and says how it went.

    parent -> worker    Setup, then Work after Work
    worker -> parent    Ready or Refused, then one Report for each answer, as it is done

The socket is the lifeline: when it closes the worker ends at once, with all its own children.
"""

from __future__ import annotations

import asyncio
import os
import queue
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from sortedrl.errors import ConfigError
from sortedrl.rewards.score import NoScoreError, Score, checked_score
from sortedrl.rewards.source import Kind, RewardSource, load
from sortedrl.types import Prompt

Ending = Literal["raised", "no_score", "memory", "timeout"]
"""How a call ends without a score."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker is told first."""

    source: RewardSource
    time_limit_seconds: float
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Ready:
    """The function is loaded."""

    kind: Kind


@dataclass(frozen=True, slots=True)
class Refused:
    """The function cannot be used; `is_setting` if the address is wrong, not the code."""

    message: str
    is_setting: bool


@dataclass(frozen=True, slots=True)
class Work:
    """Answers for one call of the function: several only if it is batched."""

    tickets: Sequence[int]
    prompts: Sequence[Prompt]
    responses: Sequence[str]


@dataclass(frozen=True, slots=True)
class Report:
    """What became of one answer: a score, or how the call ended without one."""

    ticket: int
    seconds: float
    score: Score | None = None
    ending: Ending | None = None
    words: str = ""


def main(descriptor: int) -> None:
    """Serve the parent at the other end of the socket until it goes away."""
    connection = Connection(descriptor)
    setup: Setup = connection.recv()
    try:
        function, kind = load(setup.source)
    except ConfigError as error:
        connection.send(Refused(str(error), is_setting=True))
        return
    except (Exception, SystemExit):  # noqa: BLE001  what the user's module does when imported
        connection.send(Refused(traceback.format_exc(), is_setting=False))
        return
    call = partial(function, **setup.source.options)
    if setup.memory_bytes is not None:
        _limit_memory(setup.memory_bytes)
    works: queue.SimpleQueue[Work] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, works), daemon=True).start()
    connection.send(Ready(kind))
    if kind == "async":
        asyncio.run(_serve_async(call, works, connection, limit=setup.time_limit_seconds))
    else:
        _serve(call, works, connection, is_batched=kind == "batched")


def _receive(connection: Connection, works: queue.SimpleQueue[Work]) -> None:
    while True:
        try:
            works.put(connection.recv())
        except (EOFError, OSError):
            if os.getpgrp() == os.getpid():
                os.killpg(os.getpid(), signal.SIGKILL)
            os._exit(0)


def _serve(
    call: Callable[..., Any],
    works: queue.SimpleQueue[Work],
    connection: Connection,
    *,
    is_batched: bool,
) -> None:
    while True:
        work = works.get()
        began = time.perf_counter()
        try:
            if is_batched:
                scores = _checked_scores(call(list(work.prompts), list(work.responses)), work)
            else:
                scores = [checked_score(call(work.prompts[0], work.responses[0]))]
        except MemoryError as error:
            _report_end(connection, work, began, "memory", error)
            sys.exit(1)
        except NoScoreError as error:
            _report_end(connection, work, began, "no_score", error)
        except Exception as error:  # noqa: BLE001  the user's own; the parent shows it
            _report_end(connection, work, began, "raised", error)
        else:
            seconds = time.perf_counter() - began
            for ticket, score in zip(work.tickets, scores, strict=True):
                connection.send(Report(ticket, seconds / len(scores), _sendable(score)))


async def _serve_async(
    call: Callable[..., Any],
    works: queue.SimpleQueue[Work],
    connection: Connection,
    *,
    limit: float,
) -> None:
    async def serve(work: Work) -> None:
        began = time.perf_counter()
        try:
            returned = await asyncio.wait_for(call(work.prompts[0], work.responses[0]), limit)
            score = checked_score(returned)
        except MemoryError as error:
            _report_end(connection, work, began, "memory", error)
            os._exit(1)
        except NoScoreError as error:
            _report_end(connection, work, began, "no_score", error)
        except TimeoutError as error:
            # One of the user's own is not ours: it came before the limit.
            is_ours = time.perf_counter() - began >= limit
            _report_end(connection, work, began, "timeout" if is_ours else "raised", error)
        except Exception as error:  # noqa: BLE001  the user's own; the parent shows it
            _report_end(connection, work, began, "raised", error)
        except SystemExit:
            os._exit(1)  # the thread that waits for work would keep the process alive
        else:
            seconds = time.perf_counter() - began
            connection.send(Report(work.tickets[0], seconds, _sendable(score)))

    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(serve(await asyncio.to_thread(works.get)))


def _checked_scores(returned: object, work: Work) -> list[Score]:
    if not isinstance(returned, Sequence) or isinstance(returned, str | bytes):
        raise NoScoreError(
            f"a batched reward must return one score for each answer, got {returned!r:.100}"
        )
    if len(returned) != len(work.tickets):
        raise NoScoreError(
            f"a batched reward must return one score for each of the {len(work.tickets)} answers, "
            f"got {len(returned)}"
        )
    return [checked_score(value) for value in returned]


def _report_end(
    connection: Connection, work: Work, began: float, ending: Ending, error: Exception
) -> None:
    seconds, words = time.perf_counter() - began, str(error)
    if ending == "raised":
        # The first frame is this module's: nobody wants to read it.
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        words = "".join(traceback.format_exception(type(error), error, trace))
    for ticket in work.tickets:
        connection.send(Report(ticket, seconds, ending=ending, words=words))


def _sendable(score: Score) -> Score:
    return Score(score.reward, dict(score.parts))


def _limit_memory(extra_bytes: int) -> None:
    """Let the process grow by that much, so that one call cannot take the machine's memory."""
    for used in _data_bytes():
        most = used + extra_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard == resource.RLIM_INFINITY or most < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _data_bytes() -> Iterator[int]:
    """The private memory of this process, where the system tells."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmData:"):
                yield int(line.split()[1]) * 1024
