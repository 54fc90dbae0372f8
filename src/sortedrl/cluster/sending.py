"""One broadcast of a source, in a thread of its own: the workers receive at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import perf_counter

from sortedrl.cluster.weight_source import Meeting, WayFailed, WeightSource


class Sending:
    """A source that sends to these workers from now on."""

    def __init__(
        self,
        source: WeightSource,
        meeting: Meeting,
        *,
        members: Sequence[int],
        failed: Callable[[Sending], None],
    ) -> None:
        """`failed` is called in the thread of the sending, if that does not end well."""
        self.meeting = meeting
        self.members = members
        self.seconds = 0.0
        self._source = source
        self._failed = failed
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._send, name="hand-over", daemon=True)
        self._thread.start()

    def rank(self, worker: int) -> int:
        """The rank of a worker in the group."""
        return 1 + self.members.index(worker)

    def wait(self, *, seconds: float) -> None:
        """Wait until the source is done with its weights, but no longer than that."""
        self._thread.join(timeout=seconds)

    def raise_other(self) -> None:
        """Raise what the source raised, unless it only says that this way failed."""
        if self._error is not None and not isinstance(self._error, WayFailed):
            raise self._error

    def raise_reason(self, failure: WayFailed) -> None:
        """Raise what the source raised, now that a worker failed: it may be why."""
        self.raise_other()
        if self._error is not None:
            raise WayFailed(f"{failure}; the sender: {self._error}") from failure

    def _send(self) -> None:
        start = perf_counter()
        try:
            self._source.send(self.meeting)
        except BaseException as error:  # noqa: BLE001  raised in the threads of the workers
            self._error = error
            self._failed(self)
        self.seconds = perf_counter() - start
