"""The groups of a run as the controller calls them: who is in one, and what it is called.

The same members meet under the same key, so they keep their group. As soon as a member changes or
anything fails in a group, the next one has a new key.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from sortedrl.cluster.weight_source import Meeting, WayFailed

if TYPE_CHECKING:
    from sortedrl.cluster.bridge import MeetingPlace


class Meetings:
    """All meetings of one sender with its workers. Used by one thread at a time."""

    def __init__(self, *, seconds: float) -> None:
        """Members have so long to come, and so long for each bucket."""
        self._seconds = seconds
        self._place: MeetingPlace | None = None
        self._members: tuple[int, ...] | None = None
        self._key = ""

    def called(self, members: tuple[int, ...]) -> Meeting:
        """The meeting of these workers, who are ranks 1, 2, ... in order; rank 0 sends."""
        if self._place is None:
            import ray

            from sortedrl.cluster.bridge import MeetingPlace

            host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            self._place = MeetingPlace(host, seconds=self._seconds)
        if members != self._members:
            self._members = members
            self._key = uuid.uuid4().hex
        return Meeting(
            host=self._place.host,
            port=self._place.port,
            world=len(members) + 1,
            key=self._key,
            timeout=self._seconds,
        )

    def give_up(self, meeting: Meeting, *, rank: int) -> None:
        """A member failed: nobody waits for it, and the next meeting is of a new group."""
        if meeting.key == self._key:
            self._members = None
        if self._place is not None:
            try:
                self._place.miss(meeting.key, rank=rank)
            except WayFailed:
                # Another store, at another port, may be reached.
                self._place = None

    def close(self) -> None:
        """Let go of the place."""
        self._place = None
