"""The newest page of the runs, made in the background while someone looks at it.

Nobody who asks waits for a page to be made, but for the first. One thread looks at the runs, and
makes a page only when something has changed, when someone asked within the last minute, and never
for more than a fifth of the time, however large the runs are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sortedrl.report.html import head_value
from sortedrl.report.runs import runs_page
from sortedrl.report.watch.follow import FollowedRun
from sortedrl.report.watch.waiting import waiting_page

WANTED_SECONDS = 60.0
"""Who has not asked for so long is no longer looking."""
_SHARE = 5
"""A page that took a second to make is made at most every so many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A page, and the state of the runs it shows."""

    text: str
    is_ended: bool = False
    """Whether all runs have used up their prompts."""
    seconds: float | None = None
    """Seconds of training of the run that has gone on longest; `None` while all are waited for."""
    written: float | None = None
    """When the newest of their logs was last written, in seconds since 1970."""
    notes: tuple[str, ...] = ()
    """What keeps the page from showing more."""

    @property
    def version(self) -> str:
        """Changes when the page does."""
        return head_value(self.text, "sortedrl-version")


class Pages:
    """The newest page of some runs; to be closed."""

    def __init__(
        self,
        runs: Sequence[FollowedRun],
        *,
        tell: Callable[[str], None],
        refresh_seconds: float = 2.0,
    ) -> None:
        """Start to look; `tell` hears when a page cannot be made."""
        self._runs = runs
        self._tell = tell
        self._refresh_seconds = refresh_seconds
        self._title = ", ".join(run.name for run in runs)
        self._newest = self._waiting(("the page is being made",))
        self._has_tried = False
        self._is_closed = False
        self._wanted = -WANTED_SECONDS
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="pages", daemon=True)
        self._thread.start()

    def newest(self, *, patience_seconds: float = 0.0) -> Sheet:
        """The newest page; where there was none yet, wait a while for the first."""
        with self._condition:
            self._wanted = time.monotonic()
            self._condition.notify_all()
            self._condition.wait_for(
                lambda: self._has_tried or self._is_closed, timeout=patience_seconds
            )
            return self._newest

    def close(self) -> None:
        """Make no more pages."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._thread.join(timeout=1.0)

    def _work(self) -> None:
        due = time.monotonic()
        while self._is_wanted_at(due):
            started = time.monotonic()
            # every run is looked at, also after one that has changed
            has_changed = any([run.look() for run in self._runs])
            if has_changed:
                sheet = self._made()
                with self._condition:
                    self._newest, self._has_tried = sheet, True
                    self._condition.notify_all()
            took = time.monotonic() - started
            due = started + max(self._refresh_seconds, _SHARE * took)

    def _is_wanted_at(self, due: float) -> bool:
        """Wait until the time has come and someone is looking; false once closed."""
        with self._condition:
            while not self._is_closed:
                now = time.monotonic()
                is_wanted = now - self._wanted < WANTED_SECONDS
                if is_wanted and now >= due:
                    return True
                self._condition.wait(due - now if is_wanted else None)
            return False

    def _made(self) -> Sheet:
        notes = tuple(f"{run.name}: {run.note}" for run in self._runs if run.note is not None)
        records = [run.record for run in self._runs if run.record is not None]
        if not records:
            return self._waiting(notes)
        try:
            text = runs_page(records, title=self._title, refresh_seconds=self._refresh_seconds)
        except Exception as error:  # noqa: BLE001  a page that breaks must not end all later ones
            note = f"the page could not be made ({type(error).__name__}: {error})"
            self._tell(note)
            if self._newest.seconds is None:
                return self._waiting((*notes, note))
            return replace(self._newest, notes=(*notes, note))
        return Sheet(
            text=text,
            is_ended=all(run.is_ended for run in self._runs),
            seconds=max(record.events[-1].seconds for record in records),
            written=max(
                (run.written for run in self._runs if run.written is not None), default=None
            ),
            notes=notes,
        )

    def _waiting(self, notes: tuple[str, ...]) -> Sheet:
        text = waiting_page(notes, title=self._title, refresh_seconds=self._refresh_seconds)
        return Sheet(text=text, notes=notes)
