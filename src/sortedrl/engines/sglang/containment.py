"""SGLang contained in a process that is not its own.

SGLang takes a process for its own: it sets signal handlers, the start method of processes, the
loggers and the event loop policy, and when one of its child processes fails it ends its parent and
all children of it. Here the parent is a training run with children of other kinds. So what SGLang
changes is put back, and the signal by which it ends its parent only prints where the parent stands.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import multiprocessing
import os
import signal
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

_STANDARD_ERROR = 2
_END_SECONDS = 30.0


def started(arguments: Mapping[str, object]) -> Engine:
    """An engine of SGLang; its processes die with the thread that called this."""
    from sglang.srt.entrypoints.engine import Engine

    class Contained(Engine):  # type: ignore[misc]
        """Does not end the other children of this process when the process ends."""

        def shutdown(self) -> None:
            """Nothing: see `end`."""

    shield()
    before = {process.pid for process in multiprocessing.active_children()}
    try:
        engine = Contained(**arguments)
    except BaseException:
        end([process for process in multiprocessing.active_children() if process.pid not in before])
        unshield()
        raise
    # It would answer the death of a child by the death of this process.
    engine.tokenizer_manager._subprocess_watchdog.stop()
    return engine


def processes_of(engine: Engine) -> list[BaseProcess]:
    """Its processes that are children of this one."""
    ids = set(engine.get_all_child_pids())
    return [process for process in multiprocessing.active_children() if process.pid in ids]


def end(processes: list[BaseProcess]) -> None:
    """End these processes, and wait until they are gone."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join(_END_SECONDS)


def shield() -> None:
    """Live through SIGQUIT, which a failing child of SGLang sends to its parent.

    Python sets signal handlers only in the main thread, which this need not be; but it can print
    where a thread stands whenever a signal comes, and then the signal does nothing else.
    """
    faulthandler.register(signal.SIGQUIT, file=_STANDARD_ERROR, all_threads=False)


def unshield() -> None:
    """SIGQUIT means again what it meant before."""
    faulthandler.unregister(signal.SIGQUIT)


@contextmanager
def everything_put_back(settings: Mapping[str, str]) -> Iterator[None]:
    """What SGLang changes in here is as before afterwards; `settings` are for its environment."""
    environment = dict(os.environ)
    start_method = multiprocessing.get_start_method(allow_none=True)
    policy = asyncio.get_event_loop_policy()
    root = logging.getLogger()
    # Taken out first: SGLang would not only remove them but close them.
    handlers, root.handlers, level = root.handlers, [], root.level
    os.environ.update(settings)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        root.handlers, root.level = handlers, level
        asyncio.set_event_loop_policy(policy)
        multiprocessing.set_start_method(start_method, force=True)
        os.environ.clear()
        os.environ.update(environment)
