"""Limits the effects of SGLang on the process that starts it.

SGLang assumes that it owns its process: it sets signal handlers, the start method of
multiprocessing, the loggers and the event loop policy, and when one of its child processes fails it
kills its parent and all children of it. Here the parent is a training run with other children. So
what SGLang changes is restored, and the signal with which it kills its parent only prints a
traceback.
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


def start(arguments: Mapping[str, object]) -> Engine:
    """Start an engine of SGLang; its processes die with the calling thread."""
    from sglang.srt.entrypoints.engine import Engine

    class Contained(Engine):  # type: ignore[misc]
        """Does not kill the other children of this process at exit."""

        def shutdown(self) -> None:
            """Nothing: see `kill`."""

    ignore_sigquit()
    before = {process.pid for process in multiprocessing.active_children()}
    try:
        engine = Contained(**arguments)
    except BaseException:
        kill(
            [process for process in multiprocessing.active_children() if process.pid not in before]
        )
        restore_sigquit()
        raise
    # It would kill this process when a child dies.
    engine.tokenizer_manager._subprocess_watchdog.stop()
    return engine


def processes_of(engine: Engine) -> list[BaseProcess]:
    """The child processes of an engine."""
    ids = set(engine.get_all_child_pids())
    return [process for process in multiprocessing.active_children() if process.pid in ids]


def kill(processes: list[BaseProcess]) -> None:
    """Kill these processes, and wait for them."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join(_END_SECONDS)


def ignore_sigquit() -> None:
    """Survive SIGQUIT, which a failing child of SGLang sends to its parent.

    Signal handlers can only be set in the main thread, which this need not be; but faulthandler can
    be registered anywhere, and replaces the default action.
    """
    faulthandler.register(signal.SIGQUIT, file=_STANDARD_ERROR, all_threads=False)


def restore_sigquit() -> None:
    """Restore the default action of SIGQUIT."""
    faulthandler.unregister(signal.SIGQUIT)


@contextmanager
def restored_globals(settings: Mapping[str, str]) -> Iterator[None]:
    """Restore what SGLang changes inside the block; `settings` are environment variables for it."""
    environment = dict(os.environ)
    start_method = multiprocessing.get_start_method(allow_none=True)
    policy = asyncio.get_event_loop_policy()
    root = logging.getLogger()
    # Removed first: SGLang would close them.
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
