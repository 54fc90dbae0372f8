"""The stateful rollout buffer: a state machine, and nothing else.

    load ──> waiting ──start──> running ──finish──> ready ──take──> trained
              ^   ^              │   │                │
              │   └───put_back───┘───│────put_back────┘
            reply                  pause
              └─────── outside <─────┘          finish and put_back also leave from outside

Invariant: every loaded trajectory is in exactly one state, and each arrow moves it.
Nothing is lost, nothing is trained twice, nothing is copied.

A conversation is *outside* while its environment replies: it holds no slot.
A trajectory is *begun* from its start until it is complete or loses its tokens; a begun
conversation holds an environment.
Waiting trajectories are *fresh* (never started) or *returned* (put back).
Ready trajectories are *harvestable* (their unit is complete) or *partnered* (complete, but siblings
of the same prompt are not; only with `unit_size` > 1).
A group is open from its load until its last trajectory is trained; `open_group` creates its
trajectories from prompts.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from sortedrl.core.randomness import mix
from sortedrl.errors import BufferStateError
from sortedrl.types import Key, Prompt, Trajectory


class Feed(Enum):
    """Which waiting trajectories are started.

    Always: older group first, then the most interrupted, then by id. Fresh trajectories are started
    in the order of loading, so returned ones come before them.
    """

    OLDEST_FIRST = "fresh and returned work in one order"
    FRESH_ONLY = "only fresh work"
    RETURNED_ONLY = "only returned work"


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferState:
    """Everything that a buffer holds between rounds, when nothing runs."""

    unit_size: int
    next_group: int
    next_prompt: int
    num_trained: int
    fresh: tuple[Trajectory, ...]
    returned: tuple[Trajectory, ...]
    ready: tuple[Trajectory, ...]
    outside: tuple[Trajectory, ...] = ()


class Buffer:
    """Holds every trajectory from its load to its training."""

    def __init__(self, *, unit_size: int = 1) -> None:
        """`unit_size` trajectories of a prompt become harvestable together."""
        self.unit_size = unit_size
        self.next_group = 0
        self.num_trained = 0
        self._next_prompt = 0
        self._fresh: deque[Trajectory] = deque()
        self._returned: list[tuple[int, int, int, int, Trajectory]] = []
        self._running: dict[Key, Trajectory] = {}
        self._outside: dict[Key, Trajectory] = {}
        self._partnered: dict[Key, Trajectory] = {}
        self._harvestable: dict[Key, Trajectory] = {}
        self._pending_in_unit: dict[int, int] = {}
        self._untrained_in_group: dict[int, int] = {}
        self._unfinished_in_group: dict[int, int] = {}
        self._running_interruptions: Counter[int] = Counter()

    @property
    def num_fresh(self) -> int:
        """Waiting trajectories that were never started."""
        return len(self._fresh)

    @property
    def num_returned(self) -> int:
        """Waiting trajectories that were put back."""
        return len(self._returned)

    @property
    def num_waiting(self) -> int:
        """All waiting trajectories."""
        return len(self._fresh) + len(self._returned)

    @property
    def num_running(self) -> int:
        """Trajectories in the engine."""
        return len(self._running)

    @property
    def num_outside(self) -> int:
        """Conversations that wait for their environment."""
        return len(self._outside)

    @property
    def num_begun(self) -> int:
        """Trajectories that run, are outside, or wait with tokens."""
        waiting = sum(1 for entry in self._returned if entry[-1].segments)
        return len(self._running) + len(self._outside) + waiting

    @property
    def num_harvestable(self) -> int:
        """Ready trajectories that may be trained on."""
        return len(self._harvestable)

    @property
    def num_unfinished(self) -> int:
        """Trajectories that would remain if everything harvestable were trained."""
        active = len(self._running) + len(self._outside)
        return self.num_waiting + active + len(self._partnered)

    @property
    def num_open_groups(self) -> int:
        """Groups with untrained work."""
        return len(self._untrained_in_group)

    @property
    def oldest_open_group(self) -> int | None:
        """The oldest group with untrained work."""
        return next(iter(self._untrained_in_group), None)

    @property
    def oldest_unfinished_group(self) -> int | None:
        """The oldest group that would stay open if everything harvestable were trained."""
        return min(self._unfinished_in_group, default=None)

    def any_running_interrupted(self, times: int) -> bool:
        """Whether a running trajectory has been interrupted at least this many times."""
        return any(interruptions >= times for interruptions in self._running_interruptions)

    def is_open(self, group: int) -> bool:
        """Whether a loaded group has untrained work."""
        return group in self._untrained_in_group

    def harvestable(self) -> list[Trajectory]:
        """Ready trajectories that may be trained on, in the order they became so."""
        return list(self._harvestable.values())

    def ready(self, keys: Sequence[Key]) -> list[Trajectory]:
        """These harvestable trajectories; they stay ready until they are taken."""
        return [self._harvestable[key] for key in keys]

    def partnered(self) -> list[Trajectory]:
        """Ready trajectories that wait for their siblings."""
        return list(self._partnered.values())

    def outside(self) -> list[Trajectory]:
        """Conversations that wait for their environment, in the order they left their slots."""
        return list(self._outside.values())

    def load(self, trajectories: Sequence[Trajectory]) -> int:
        """Add the next group, in order of prompt and sample; returns its number."""
        group, after = self.next_group, (self._next_prompt, -1)
        for trajectory in trajectories:
            if trajectory.group != group or trajectory.key <= after:
                raise BufferStateError(
                    f"group {group} must continue after {after} in order of prompt and sample, got "
                    f"{trajectory.key} of group {trajectory.group}; was it loaded before?"
                )
            after = trajectory.key
        if not trajectories:
            raise BufferStateError(f"group {group} must hold at least one trajectory, got none")
        self.next_group += 1
        self._next_prompt = trajectories[-1].prompt.id + 1
        self._fresh.extend(trajectories)
        self._count_in(trajectories)
        return group

    def start(self, count: int, *, feed: Feed, max_begun: int | None = None) -> list[Trajectory]:
        """Waiting to running: at most `count` trajectories, in order.

        Once `max_begun` are begun, only those may be started.
        """
        started: list[Trajectory] = []
        num_begun = 0 if max_begun is None else self.num_begun
        while len(started) < count:
            is_full = max_begun is not None and num_begun >= max_begun
            trajectory = self._pop_begun() if is_full else self._pop_waiting(feed)
            if trajectory is None:
                break
            num_begun += not trajectory.segments
            started.append(trajectory)
            self._running[trajectory.key] = trajectory
            self._running_interruptions[trajectory.interruptions] += 1
        return started

    def pause(self, trajectory: Trajectory) -> Trajectory:
        """Running to outside, with the new value; returns the value it was started with."""
        before = self._leave_running(trajectory.key, "pause")
        self._outside[trajectory.key] = trajectory
        return before

    def reply(self, trajectory: Trajectory) -> Trajectory:
        """Outside to waiting, with the new value; returns the previous one."""
        self._expect(trajectory.key in self._outside, trajectory.key, "reply", "outside")
        self._push_returned(trajectory)
        return self._outside.pop(trajectory.key)

    def finish(self, trajectory: Trajectory) -> Trajectory:
        """Running or outside to ready, with the new value; returns the previous one."""
        key = trajectory.key
        if trajectory.finish_reason is None:
            raise BufferStateError(f"trajectory {key} is ready without a finish reason")
        is_outside = key in self._outside
        before = self._outside.pop(key) if is_outside else self._leave_running(key, "finish")
        self._make_ready(trajectory)
        return before

    def put_back(self, trajectory: Trajectory) -> Trajectory:
        """Running, outside or ready to waiting, with the new value; returns the previous one."""
        key = trajectory.key
        if key in self._running:
            before = self._leave_running(key, "put_back")
        elif key in self._outside:
            before = self._outside.pop(key)
        elif key in self._partnered:
            before = self._partnered.pop(key)
            self._pending_in_unit[key[0]] += 1
        else:
            self._expect(key in self._harvestable, key, "put_back", "running or ready")
            before = self._harvestable.pop(key)
            self._undo_ready(before)
        self._push_returned(trajectory)
        return before

    def take(self, keys: Sequence[Key]) -> list[Trajectory]:
        """Ready to trained: the trajectories leave the buffer."""
        for key, times in Counter(keys).items():
            is_once = key in self._harvestable and times == 1
            self._expect(is_once, key, "take", "harvestable and named once")
        taken = [self._harvestable.pop(key) for key in keys]
        for trajectory in taken:
            self._untrained_in_group[trajectory.group] -= 1
            if not self._untrained_in_group[trajectory.group]:
                del self._untrained_in_group[trajectory.group]
        self.num_trained += len(taken)
        return taken

    def state(self) -> BufferState:
        """Everything that the buffer holds; only between rounds."""
        if self._running:
            raise BufferStateError(
                f"a buffer can only be saved between rounds, but {len(self._running)} trajectories "
                "run; interrupt the engine and put them back first"
            )
        return BufferState(
            unit_size=self.unit_size,
            next_group=self.next_group,
            next_prompt=self._next_prompt,
            num_trained=self.num_trained,
            fresh=tuple(self._fresh),
            returned=tuple(entry[-1] for entry in sorted(self._returned, key=lambda e: e[:-1])),
            ready=(*self._harvestable.values(), *self._partnered.values()),
            outside=tuple(self._outside.values()),
        )

    @classmethod
    def from_state(cls, state: BufferState) -> Buffer:
        """Restore a saved buffer."""
        buffer = cls(unit_size=state.unit_size)
        buffer.next_group = state.next_group
        buffer.num_trained = state.num_trained
        buffer._next_prompt = state.next_prompt
        everything = (*state.fresh, *state.returned, *state.ready, *state.outside)
        buffer._count_in(sorted(everything, key=lambda t: (t.group, t.key)))
        buffer._fresh.extend(state.fresh)
        for trajectory in state.returned:
            buffer._push_returned(trajectory)
        for trajectory in state.ready:
            buffer._make_ready(trajectory)
        buffer._outside.update({t.key: t for t in state.outside})
        return buffer

    def _count_in(self, trajectories: Iterable[Trajectory]) -> None:
        for trajectory in trajectories:
            group, prompt = trajectory.group, trajectory.prompt.id
            self._untrained_in_group[group] = self._untrained_in_group.get(group, 0) + 1
            self._unfinished_in_group[group] = self._unfinished_in_group.get(group, 0) + 1
            if self.unit_size > 1:
                self._pending_in_unit[prompt] = self._pending_in_unit.get(prompt, 0) + 1

    def _pop_waiting(self, feed: Feed) -> Trajectory | None:
        fresh_allowed = feed is not Feed.RETURNED_ONLY and bool(self._fresh)
        returned_allowed = feed is not Feed.FRESH_ONLY and bool(self._returned)
        if fresh_allowed and returned_allowed:
            returned_allowed = self._returned[0][0] <= self._fresh[0].group
        if returned_allowed:
            return heapq.heappop(self._returned)[-1]
        return self._fresh.popleft() if fresh_allowed else None

    def _pop_begun(self) -> Trajectory | None:
        """Pop the first returned trajectory that has tokens."""
        begun = [entry for entry in self._returned if entry[-1].segments]
        if not begun:
            return None
        first = min(begun, key=lambda entry: entry[:-1])
        self._returned.remove(first)
        heapq.heapify(self._returned)
        return first[-1]

    def _push_returned(self, trajectory: Trajectory) -> None:
        order = (trajectory.group, -trajectory.interruptions, *trajectory.key)
        heapq.heappush(self._returned, (*order, trajectory))

    def _leave_running(self, key: Key, arrow: str) -> Trajectory:
        self._expect(key in self._running, key, arrow, "running")
        before = self._running.pop(key)
        self._running_interruptions[before.interruptions] -= 1
        if not self._running_interruptions[before.interruptions]:
            del self._running_interruptions[before.interruptions]
        return before

    def _make_ready(self, trajectory: Trajectory) -> None:
        self._partnered[trajectory.key] = trajectory
        unit = [trajectory.key]
        if self.unit_size > 1:
            prompt = trajectory.prompt.id
            self._pending_in_unit[prompt] -= 1
            if self._pending_in_unit[prompt]:
                return
            del self._pending_in_unit[prompt]
            siblings = [(prompt, sample_index) for sample_index in range(self.unit_size)]
            unit = [key for key in siblings if key in self._partnered]
        for key in unit:
            self._harvestable[key] = self._partnered.pop(key)
        self._unfinished_in_group[trajectory.group] -= len(unit)
        if not self._unfinished_in_group[trajectory.group]:
            del self._unfinished_in_group[trajectory.group]

    def _undo_ready(self, left: Trajectory) -> None:
        """Make the rest of the unit that a trajectory left wait for it again."""
        prompt, size = left.prompt.id, self.unit_size
        siblings = [(prompt, index) for index in range(size)] if size > 1 else []
        unit = [key for key in siblings if key in self._harvestable]
        for key in unit:
            self._partnered[key] = self._harvestable.pop(key)
        if size > 1:
            self._pending_in_unit[prompt] = 1
        unfinished = self._unfinished_in_group.get(left.group, 0)
        self._unfinished_in_group[left.group] = unfinished + 1 + len(unit)

    def _expect(self, holds: bool, key: Key, arrow: str, state: str) -> None:
        if not holds:
            raise BufferStateError(f"{arrow} needs a trajectory that is {state}; {key} is not")


def open_group(
    prompts: Sequence[Prompt], *, group: int, samples_per_prompt: int, seed: int
) -> list[Trajectory]:
    """Fresh trajectories for the prompts, each with its own noise seed."""
    return [
        Trajectory(
            prompt=prompt,
            sample_index=sample_index,
            group=group,
            seed=mix(seed, prompt.id, sample_index),
        )
        for prompt in prompts
        for sample_index in range(samples_per_prompt)
    ]
