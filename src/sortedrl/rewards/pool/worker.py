"""A worker process: loads a reward function, scores answers, and reports each result.

parent -> worker    Setup, then Work after Work
worker -> parent    Ready or Refused, then one Report for each answer, as it is done
"""

from __future__ import annotations

import asyncio
import inspect
import os
import queue
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal

from sortedrl.rewards.functions import CallStyle, load
from sortedrl.rewards.pool.process import served
from sortedrl.rewards.pool.score import NoScoreError, Score, checked_score, values_of_batch
from sortedrl.types import Prompt

Ending = Literal["raised", "no_score", "memory", "timeout"]
"""How a call ends without a score."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The function is loaded."""

    style: CallStyle
    lowest: float | None
    """The lowest reward that it gives, if known."""


@dataclass(frozen=True, slots=True)
class Work:
    """Answers for one call of the function: several only if it is batched."""

    tickets: Sequence[int]
    prompts: Sequence[Prompt]
    responses: Sequence[str]


@dataclass(frozen=True, slots=True)
class Report:
    """The result for one answer: a score, or how the call ended without one."""

    ticket: int
    seconds: float
    score: Score | None = None
    ending: Ending | None = None
    words: str = ""
    num_answers: int = 1
    """How many answers shared the call."""


def main(descriptor: int) -> None:
    """Serve the parent at the other end of the socket until it closes."""
    worker = served(descriptor, load)
    if worker is None:
        return
    reward, connection, works = worker.loaded, worker.connection, worker.works
    call = partial(reward.function, **worker.setup.source.options)
    connection.send(Ready(reward.style, reward.lowest))
    is_batched = reward.style.is_batched
    if reward.style.is_async:
        limit = worker.setup.time_limit_seconds
        asyncio.run(_serve_async(call, works, connection, is_batched=is_batched, limit=limit))
    else:
        _serve(call, works, connection, is_batched=is_batched)


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
            returned = call(*_arguments(work, is_batched=is_batched))
            if inspect.iscoroutine(returned):
                returned.close()
                raise NoScoreError(
                    "a reward must not return a coroutine; declare the function with `async def`"
                )
        except MemoryError as error:
            _report_end(connection, work, began, "memory", error)
            sys.exit(1)
        except NoScoreError as error:
            _report_end(connection, work, began, "no_score", error)
        except Exception as error:  # noqa: BLE001  the user's own; the parent shows it
            _report_end(connection, work, began, "raised", error)
        else:
            _report_scores(connection, work, began, returned, is_batched=is_batched)


async def _serve_async(
    call: Callable[..., Any],
    works: queue.SimpleQueue[Work],
    connection: Connection,
    *,
    is_batched: bool,
    limit: float | None,
) -> None:
    async def serve(work: Work) -> None:
        began = time.perf_counter()
        try:
            arguments = _arguments(work, is_batched=is_batched)
            returned = await asyncio.wait_for(call(*arguments), limit)
        except MemoryError as error:
            _report_end(connection, work, began, "memory", error)
            os._exit(1)
        except NoScoreError as error:
            _report_end(connection, work, began, "no_score", error)
        except TimeoutError as error:
            # A TimeoutError of the user's code comes before the limit.
            is_ours = limit is not None and time.perf_counter() - began >= limit
            _report_end(connection, work, began, "timeout" if is_ours else "raised", error)
        except Exception as error:  # noqa: BLE001  the user's own; the parent shows it
            _report_end(connection, work, began, "raised", error)
        except SystemExit:
            os._exit(1)  # the receiving thread would keep the process alive
        else:
            _report_scores(connection, work, began, returned, is_batched=is_batched)

    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(serve(await asyncio.to_thread(works.get)))


def _arguments(work: Work, *, is_batched: bool) -> tuple[object, object]:
    if is_batched:
        return list(work.prompts), list(work.responses)
    return work.prompts[0], work.responses[0]


def _report_scores(
    connection: Connection, work: Work, began: float, returned: object, *, is_batched: bool
) -> None:
    """Report each answer; an invalid score is reported for its own answer."""
    num_answers = len(work.tickets)
    seconds = (time.perf_counter() - began) / num_answers
    try:
        values = values_of_batch(returned, num_answers) if is_batched else [returned]
    except NoScoreError as error:
        _report_end(connection, work, began, "no_score", error)
        return
    for ticket, value in zip(work.tickets, values, strict=True):
        try:
            score = checked_score(value)
        except NoScoreError as error:
            connection.send(Report(ticket, seconds, ending="no_score", words=str(error)))
        else:
            connection.send(Report(ticket, seconds, Score(score.reward, dict(score.parts))))


def _report_end(
    connection: Connection, work: Work, began: float, ending: Ending, error: Exception
) -> None:
    seconds, words = time.perf_counter() - began, str(error)
    if ending == "raised":
        # The first frame is in this module: leave it out.
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        words = "".join(traceback.format_exception(type(error), error, trace))
    for ticket in work.tickets:
        connection.send(
            Report(ticket, seconds, ending=ending, words=words, num_answers=len(work.tickets))
        )
