"""The pool over engines that die, hang and dawdle; and over real ones.

An answer of the scripted engine depends on its trajectory alone. It says at once if it is called
from two threads, if it has more work than slots, or if work comes on other terms than it was
submitted with.
"""

import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sortedrl.core.buffer import Buffer
from sortedrl.core.clock import VirtualClock
from sortedrl.core.controller import Controller
from sortedrl.core.loop import Loop
from sortedrl.core.meter import measure
from sortedrl.core.randomness import mix
from sortedrl.core.recorder import Journal
from sortedrl.engines.pool import EnginePool
from sortedrl.engines.sampling import RequestLimits, Sampling
from sortedrl.errors import ConfigError, EngineError, EngineLost, RequestError
from sortedrl.simulate.costs import ticks
from sortedrl.simulate.engine import SimulatedPrompts, SimulatedTrainer
from sortedrl.types import Prompt, Segment, Step, Trajectory, Weights
from worlds import CountingScorer, schedules

IMPOSSIBLE = -1
CALLS = ("step", "submit", "interrupt", "load_weights")
WAIT_SECONDS = 20.0
ENDLESS = 1 << 30
LIMITS = RequestLimits(
    engine="scripted",
    vocabulary=ENDLESS + 1,
    context=1 << 40,
    max_tokens=ENDLESS,
    sampling=Sampling(),
)


def full_length(trajectory):
    """The tokens it has in the end."""
    if ENDLESS in trajectory.prompt.tokens:
        return ENDLESS
    return 1 + mix(trajectory.seed, trajectory.attempt) % 12


def token_of(trajectory, place):
    return mix(trajectory.seed, trajectory.attempt, place) % 1000


def full_answer(trajectory):
    """The tokens that any engine writes for it in the end."""
    return [token_of(trajectory, place) for place in range(full_length(trajectory))]


def terms_of(trajectory):
    """How a trajectory is always submitted: tolerance and sampling."""
    number = trajectory.prompt.id
    if number % 2:
        return number / 8, Sampling(temperature=0.5, max_tokens=100 + number)
    return (None if number % 4 else 0.25), None


class Scripted:
    """Writes one token for each of its answers in a step, and does what the test tells it to."""

    def __init__(self, name="scripted", *, slots=2, queue_depth=0, keeps_terms=False, extra=False):
        self.name = name
        self.slots = slots
        self.version = 0
        self.steps = 0
        self.submitted = []
        self.is_closed = False
        self.error_at = {}
        """What the next call of a name raises; an `EngineLost` stays."""
        self.hangs_at = set()
        """Names of calls that do not return before the gate is open."""
        self.holds_after = None
        """Steps after which it hangs."""
        self.gate = threading.Event()
        self.is_mute = False
        """Whether it gives nothing back once it is lost."""
        self._keeps_terms = keeps_terms
        self._room = slots + queue_depth
        self._extra = extra
        self._lost = None
        self._unreported = 0
        self._work = {}
        self._thread = None

    @property
    def request_limits(self):
        return (LIMITS,)

    def submit(self, trajectories, *, tolerance, sampling=None):
        self._take(trajectories, (tolerance, sampling))

    def step(self):
        if self.steps == self.holds_after:
            self.hangs_at.add("step")
        self._enter("step")
        self.steps += 1
        prefilled = sum(not t.segments for t in self._work.values())
        before, self._unreported = self._unreported, 0
        decoded = before + self._write()
        finished = tuple(t for t in self._work.values() if t.finish_reason)
        for trajectory in finished:
            del self._work[trajectory.key]
        return Step(finished=finished, decoded_tokens=decoded, prefilled_tokens=prefilled)

    def interrupt(self):
        if self._lost is not None and self.is_mute:
            raise self._lost
        if self._lost is None or "interrupt" in self.hangs_at:
            self._enter("interrupt")
        if self._extra:
            # As of an engine whose device runs ahead of what its steps report.
            self._unreported += self._write()
        stopped = [replace(t, finish_reason=None) for t in self._work.values()]
        self._work.clear()
        return stopped

    def load_weights(self, weights):
        self._enter("load_weights")
        assert not self._work
        self.version = weights.version

    def close(self):
        self._enter_thread()
        assert not self.is_closed
        self.is_closed = True
        if "close" in self.error_at:
            raise self.error_at["close"]

    def _take(self, trajectories, terms):
        for trajectory in trajectories:
            assert not self._keeps_terms or terms == terms_of(trajectory)
        self._enter("submit")
        if terms[0] is not None:
            # What it cached, it would write again.
            trajectories = [restamped(t, self.version) for t in trajectories]
        self.submitted += [t.key for t in trajectories]
        self._work |= {t.key: t for t in trajectories}
        assert len(self._work) <= self._room, "a member has more work than slots"

    def _enter_thread(self):
        here = threading.current_thread()
        self._thread = self._thread or here
        assert self._thread is here, "a member belongs to one thread"

    def _enter(self, call):
        self._enter_thread()
        assert not self.is_closed
        if call in self.hangs_at:
            assert self.gate.wait(WAIT_SECONDS)
            self.hangs_at.discard(call)
        if self._lost is not None:
            raise self._lost
        if call in self.error_at:
            error = self.error_at.pop(call)
            if isinstance(error, EngineLost):
                self._lost = error
            raise error

    def _write(self):
        written = 0
        for key, trajectory in self._work.items():
            if trajectory.num_tokens < full_length(trajectory):
                trajectory = lengthened(trajectory, version=self.version)
                written += 1
            if trajectory.num_tokens == full_length(trajectory):
                trajectory = replace(trajectory, finish_reason="stop")
            self._work[key] = trajectory
        return written


def lengthened(trajectory, *, version):
    """One token more."""
    token = token_of(trajectory, trajectory.num_tokens)
    segments = trajectory.segments
    last = Segment((token,), (0.0,), version)
    if segments and segments[-1].version == version:
        last = Segment((*segments[-1].tokens, token), (*segments[-1].logprobs, 0.0), version)
        segments = segments[:-1]
    return replace(
        trajectory, segments=(*segments, last), decoded_tokens=trajectory.decoded_tokens + 1
    )


def restamped(trajectory, version):
    if not trajectory.segments:
        return trajectory
    segment = Segment(tuple(trajectory.tokens), tuple(trajectory.logprobs), version)
    return replace(trajectory, segments=(segment,))


def answer_to(prompt, sample=0, *, tokens=(7,)):
    """An answer to be written."""
    return Trajectory(
        prompt=Prompt(id=prompt, tokens=tokens),
        sample_index=sample,
        group=0,
        seed=1000 * prompt + sample,
    )


def endless(prompt, sample=0):
    """An answer that no engine will ever have written."""
    return answer_to(prompt, sample, tokens=(ENDLESS,))


def begun(trajectory):
    """The answer with its first tokens, but for the last."""
    while trajectory.num_tokens < min(3, full_length(trajectory) - 1):
        trajectory = lengthened(trajectory, version=0)
    return trajectory


def finished_by(pool, count):
    """The next `count` answers that are complete."""
    done = {}
    while len(done) < count:
        for trajectory in pool.step().finished:
            assert trajectory.key not in done
            done[trajectory.key] = trajectory
    return done


@pytest.fixture
def open_pool():
    """Makes pools; at the end nothing hangs, all are closed and no thread is left."""
    pools, members_of_all, warnings = [], [], []
    before = set(threading.enumerate())

    def make(*members, **options):
        pools.append(EnginePool(members, warn=warnings.append, **options))
        pools[-1].warnings = warnings
        members_of_all.extend(members)
        return pools[-1]

    yield make
    for member in members_of_all:
        member.gate.set()
    for pool in pools:
        pool.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=WAIT_SECONDS)
        assert not thread.is_alive()


@dataclass(frozen=True)
class World:
    """Members, and what happens to them in which order."""

    slots: tuple
    queue_depth: int
    extra: bool
    mute: bool
    acts: tuple
    seed: int


DEATHS = st.tuples(st.just("kill"), st.integers(0, 3), st.sampled_from(CALLS))
ACTS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 8)),
    st.tuples(st.just("step"), st.integers(1, 5)),
    st.just(("interrupt",)),
    st.just(("load",)),
    DEATHS,
    st.tuples(st.just("bug"), st.integers(0, 3), st.sampled_from(("step", "interrupt"))),
)
worlds = st.builds(
    World,
    slots=st.lists(st.sampled_from((2, 3, 1)), min_size=1, max_size=4).map(tuple),
    queue_depth=st.sampled_from((0, 1, 2)),
    extra=st.booleans(),
    mute=st.booleans(),
    acts=st.lists(ACTS, min_size=5, max_size=25).map(tuple),
    seed=st.integers(0, 2**16),
)


class Bug(Exception):
    """Not a loss: something that the caller must hear of."""


class Program:
    """Runs a world, and keeps the books that the pool must agree with."""

    def __init__(self, world):
        self.world = world
        self.members = [
            Scripted(
                f"m{n}",
                slots=slots,
                queue_depth=world.queue_depth,
                keeps_terms=True,
                extra=world.extra,
            )
            for n, slots in enumerate(world.slots)
        ]
        self.warnings = []
        self.pool = EnginePool(
            self.members,
            warn=self.warnings.append,
            queue_depth=world.queue_depth,
            timeout_seconds=60,
        )
        self.at_home = deque(answer_to(n // 2, n % 2) for n in range(40))
        self.out = {}
        self.done = {}
        self.decoded = 0
        self.version = 0

    def run(self):
        for kind, *details in self.world.acts:
            getattr(self, kind)(*details)
            self.check_members()
        self.finish()

    def check_members(self):
        lost = [member for member in self.members if f"({member.name})" in "".join(self.warnings)]
        assert len(self.warnings) == len(lost)
        assert self.pool.slots == sum(m.slots for m in self.members if m not in lost)
        assert self.pool.version == self.version

    def guarded(self, call, *arguments, **options):
        """What a call gives; `None` if it raised what it may raise."""
        try:
            return call(*arguments, **options)
        except Bug:
            return None
        except EngineLost:
            assert len(self.warnings) == len(self.members), "a pool lives with its last member"
            return None

    def submit(self, count):
        for _ in range(min(count, len(self.at_home))):
            trajectory = self.at_home.popleft()
            self.out[trajectory.key] = trajectory
            tolerance, sampling = terms_of(trajectory)
            try:
                self.pool.submit([trajectory], tolerance=tolerance, sampling=sampling)
            except EngineLost:
                assert len(self.warnings) == len(self.members)
                self.at_home.append(self.out.pop(trajectory.key))

    def step(self, count):
        for _ in range(count):
            step = self.guarded(self.pool.step)
            if step is None:
                continue
            assert step.finished or step.decoded_tokens or not self.out
            self.decoded += step.decoded_tokens
            for trajectory in step.finished:
                self.check_back(trajectory)
                assert trajectory.finish_reason == "stop"
                assert trajectory.tokens == full_answer(trajectory)
                self.done[trajectory.key] = trajectory

    def interrupt(self):
        stopped = self.guarded(self.pool.interrupt)
        while stopped is None:
            stopped = self.guarded(self.pool.interrupt)
        assert [t.key for t in stopped] == sorted(self.out)
        for trajectory in stopped:
            self.check_back(trajectory)
            assert trajectory.finish_reason is None
            self.at_home.append(trajectory)
        Random(self.world.seed).shuffle(self.at_home)
        # What was written since the last step is told of now; nothing runs that could add to it.
        self.step(1)
        everything = [*self.at_home, *self.done.values()]
        assert self.decoded == sum(t.decoded_tokens for t in everything)
        if not self.world.mute:
            assert self.decoded == sum(t.num_tokens for t in everything)

    def load(self):
        self.interrupt()
        try:
            self.pool.load_weights(Weights(self.version + 1))
        except EngineLost:
            assert len(self.warnings) == len(self.members)
        else:
            self.version += 1

    def kill(self, number, call):
        member = self.members[number % len(self.members)]
        member.is_mute = self.world.mute
        member.error_at[call] = EngineLost("killed")

    def bug(self, number, call):
        member = self.members[number % len(self.members)]
        member.error_at.setdefault(call, Bug())

    def check_back(self, trajectory):
        """It was out, and has lost nothing."""
        before = self.out.pop(trajectory.key)
        assert trajectory.tokens[: before.num_tokens] == before.tokens
        assert trajectory.decoded_tokens >= before.decoded_tokens
        versions = [segment.version for segment in trajectory.segments]
        assert versions == sorted(set(versions))
        if trajectory.num_tokens > before.num_tokens:
            assert versions[-1] == self.version

    def finish(self):
        """Everything is written in the end, if a member lives to write it."""
        self.interrupt()
        for member in self.members:
            member.error_at.clear()
        self.submit(len(self.at_home))
        while self.out and len(self.warnings) < len(self.members):
            self.step(1)
        self.check_members()
        self.interrupt()
        if len(self.warnings) < len(self.members):
            assert len(self.done) == 40


@settings(max_examples=100)
@given(worlds)
@example(
    World(
        slots=(1, 1),
        queue_depth=0,
        extra=True,
        mute=False,
        acts=(("submit", 6), ("kill", 0, "step"), ("step", 5), ("load",), ("submit", 8)),
        seed=0,
    )
)
def test_nothing_is_lost_or_doubled_whatever_dies_when(world):
    program = Program(world)
    with program.pool:
        program.run()
    assert all(member.is_closed for member in program.members)
    assert not [t for t in threading.enumerate() if t.name.startswith("engine ")]


def test_work_goes_to_the_emptiest_for_its_size(open_pool):
    small, large = Scripted("small", slots=2), Scripted("large", slots=4)
    for member in (small, large):
        member.hangs_at.add("step")
    pool = open_pool(small, large)
    assert pool.slots == 6
    pool.submit([answer_to(prompt) for prompt in range(9)], tolerance=None)
    for member in (small, large):
        member.gate.set()
    finished_by(pool, 9)
    assert small.submitted[:2] == [(0, 0), (3, 0)]
    assert large.submitted[:4] == [(1, 0), (2, 0), (4, 0), (5, 0)]
    assert sorted(small.submitted + large.submitted) == [(prompt, 0) for prompt in range(9)]


def test_what_exceeds_the_slots_is_taken_by_the_first_free_slot_of_any_member(open_pool):
    stuck, free = Scripted("stuck", slots=1), Scripted("free", slots=1)
    stuck.hangs_at.add("step")
    pool = open_pool(stuck, free)
    pool.submit([answer_to(prompt) for prompt in range(5)], tolerance=None)
    assert (0, 0) not in finished_by(pool, 4)
    stuck.gate.set()
    assert finished_by(pool, 1).keys() == {(0, 0)}
    assert stuck.submitted == [(0, 0)]
    assert free.submitted == [(1, 0), (2, 0), (3, 0), (4, 0)]


def test_queued_work_waits_in_the_engines(open_pool):
    members = [Scripted(slots=1, queue_depth=1) for _ in range(2)]
    for member in members:
        member.hangs_at.add("step")
    pool = open_pool(*members, queue_depth=1)
    assert pool.slots == 2
    pool.submit([answer_to(prompt) for prompt in range(5)], tolerance=None)
    for member in members:
        member.gate.set()
    finished_by(pool, 5)
    assert [member.submitted[:2] for member in members] == [[(0, 0), (2, 0)], [(1, 0), (3, 0)]]


def test_siblings_and_resumed_answers_prefer_the_member_that_holds_their_beginning(open_pool):
    members = [Scripted(slots=3), Scripted(slots=3)]
    pool = open_pool(*members)
    work = [endless(prompt, sample) for prompt in (0, 1) for sample in (0, 1)]
    pool.submit(work, tolerance=None)
    stopped = {t.key: begun(t) for t in pool.interrupt()}
    assert [m.submitted for m in members] == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    order = [(1, 1), (1, 0), (0, 0), (0, 1)]
    pool.submit([stopped[key] for key in order], tolerance=None)
    assert pool.interrupt()
    assert [m.submitted[2:] for m in members] == [[(0, 0), (0, 1)], [(1, 1), (1, 0)]]


def test_a_full_member_does_not_keep_what_it_holds_and_new_weights_forget_all(open_pool):
    members = [Scripted(slots=1), Scripted(slots=1)]
    pool = open_pool(*members)
    pool.submit([endless(0, sample) for sample in (0, 1)], tolerance=None)
    first, second = pool.interrupt()
    pool.load_weights(Weights(1))
    pool.submit([second, first], tolerance=None)
    pool.interrupt()
    assert [m.submitted for m in members] == [[(0, 0), (0, 1)], [(0, 1), (0, 0)]]


def test_a_slow_member_does_not_hold_up_a_fast_one(open_pool):
    slow, fast = Scripted("slow", slots=1), Scripted("fast", slots=1)
    slow.hangs_at.add("step")
    pool = open_pool(slow, fast)
    pool.submit([answer_to(prompt) for prompt in range(30)], tolerance=None)
    assert (0, 0) not in finished_by(pool, 29)
    assert slow.steps == 0
    assert fast.steps >= sum(len(full_answer(answer_to(prompt))) for prompt in range(1, 30))


def test_a_step_without_work_returns_at_once(open_pool):
    pool = open_pool(Scripted(), Scripted())
    assert pool.step() == Step(finished=(), decoded_tokens=0, prefilled_tokens=0)
    assert pool.interrupt() == []


def test_the_counts_of_all_members_add_up(open_pool):
    pool = open_pool(Scripted(slots=1), Scripted(slots=1))
    work = [answer_to(prompt) for prompt in range(4)]
    pool.submit(work, tolerance=None)
    steps = []
    while sum(len(step.finished) for step in steps) < 4:
        steps.append(pool.step())
    assert sum(step.decoded_tokens for step in steps) == sum(len(full_answer(t)) for t in work)
    assert sum(step.prefilled_tokens for step in steps) == 4


def test_the_warning_says_who_is_lost_and_what_becomes_of_its_work(open_pool):
    members = [Scripted(f"server {n}", slots=slots) for n, slots in enumerate((2, 3, 4))]
    for member in members:
        member.hangs_at.add("step")
    pool = open_pool(*members)
    members[1].error_at["step"] = EngineLost("the connection was refused")
    pool.submit([answer_to(prompt) for prompt in range(9)], tolerance=None)
    for member in members:
        member.gate.set()
    finished_by(pool, 9)
    assert pool.warnings == [
        "engine 2 of 3 (server 1) is lost: the connection was refused; 3 answers continue "
        "elsewhere with their tokens so far, 6 slots are left"
    ]
    pool.close()
    assert members[1].is_closed


def test_names_can_be_given(open_pool):
    pool = open_pool(Scripted(), Scripted(), names=["http://a", "http://b"])
    assert pool.name == "pool of http://a, http://b"


def test_without_a_member_everything_can_still_be_taken_back(open_pool):
    members = [Scripted(slots=2), Scripted(slots=2)]
    pool = open_pool(*members)
    work = [endless(prompt) for prompt in range(6)]
    pool.submit(work, tolerance=None)
    while not all(member.steps for member in members):
        pool.step()
    for member in members:
        member.error_at["step"] = EngineLost("gone")
    with pytest.raises(EngineLost, match="no engine is left, all 2 are lost"):
        finished_by(pool, 6)
    with pytest.raises(EngineLost, match="no engine is left"):
        pool.submit([answer_to(7)], tolerance=None)
    with pytest.raises(EngineLost, match="no engine is left"):
        pool.load_weights(Weights(1))
    assert pool.slots == 0
    assert pool.version == 0
    stopped = pool.interrupt()
    assert [t.key for t in stopped] == [t.key for t in work]
    assert [t.num_tokens > 0 for t in stopped] == [True] * 4 + [False] * 2
    assert pool.interrupt() == []


@pytest.mark.parametrize("call", ["step", "submit"])
def test_a_member_that_hangs_is_left_behind_and_its_work_taken_as_it_was_submitted(call, open_pool):
    hung, sound = Scripted("hung", slots=2), Scripted("sound", slots=2)
    pool = open_pool(hung, sound, timeout_seconds=1, load_seconds=1)
    hung.hangs_at.add(call)
    pool.submit([begun(answer_to(prompt)) for prompt in range(6)], tolerance=None)
    done = finished_by(pool, 6)
    assert all(t.tokens == full_answer(t) for t in done.values())
    assert sum(t.decoded_tokens for t in done.values()) == sum(len(t.tokens) for t in done.values())
    assert pool.slots == 2
    assert pool.warnings == [
        "engine 1 of 2 (hung) is lost: no response for 1 s; 2 answers continue "
        "elsewhere with the tokens they came with, 2 slots are left"
    ]
    hung.gate.set()
    assert pool.interrupt() == []


def test_a_member_that_loads_weights_for_long_is_not_lost(open_pool):
    """A server may read weights for half an hour; it must not be buried meanwhile."""
    slow, sound = Scripted("slow"), Scripted("sound")
    pool = open_pool(slow, sound, timeout_seconds=0.2, load_seconds=30)
    slow.hangs_at.add("load_weights")
    threading.Timer(1.0, slow.gate.set).start()
    pool.load_weights(Weights(1))
    assert (slow.version, sound.version) == (1, 1)
    assert pool.slots == slow.slots + sound.slots
    hung = open_pool(Scripted("hung"), Scripted("other"), timeout_seconds=0.1, load_seconds=0.5)
    hung._replicas.replicas[0].engine.hangs_at.add("load_weights")
    hung.load_weights(Weights(1))
    assert hung.slots == 2


def test_a_member_that_hangs_when_interrupted_gives_its_work_back_as_it_was_submitted(open_pool):
    hung, sound = Scripted("hung", slots=1), Scripted("sound", slots=1)
    pool = open_pool(hung, sound, timeout_seconds=1)
    hung.hangs_at.add("interrupt")
    work = [begun(endless(prompt)) for prompt in range(3)]
    pool.submit(work, tolerance=None)
    while sound.steps < 3:
        pool.step()
    stopped = pool.interrupt()
    assert [t.key for t in stopped] == [t.key for t in work]
    assert stopped[0].tokens == work[0].tokens
    assert stopped[1].num_tokens >= work[1].num_tokens + 3
    assert stopped[2] == work[2]
    assert pool.slots == 1


def test_a_member_that_hangs_with_new_weights_does_not_keep_them_from_the_others(open_pool):
    hung, sound = Scripted("hung"), Scripted("sound")
    pool = open_pool(hung, sound, timeout_seconds=1, load_seconds=1)
    hung.hangs_at.add("load_weights")
    pool.load_weights(Weights(1))
    assert (pool.version, sound.version, hung.version) == (1, 1, 0)
    assert pool.slots == sound.slots


def test_a_lost_member_that_hangs_when_asked_for_its_work_is_not_waited_for(open_pool):
    lost, sound = Scripted("lost"), Scripted("sound")
    pool = open_pool(lost, sound, timeout_seconds=1)
    lost.error_at["step"] = EngineLost("broken pipe")
    lost.hangs_at.add("interrupt")
    pool.submit([answer_to(prompt) for prompt in range(4)], tolerance=None)
    finished_by(pool, 4)
    (warning,) = pool.warnings
    assert warning.startswith(
        "engine 1 of 2 (lost) is lost: broken pipe, and then no response for 1 s; "
        "2 answers continue elsewhere with the tokens they came with"
    )


def test_tokens_that_a_hung_member_told_of_stay_in_the_count_of_what_was_decoded(open_pool):
    hung, sound = Scripted("hung", slots=3), Scripted("sound", slots=1)
    pool = open_pool(hung, sound, timeout_seconds=1)
    hung.holds_after = 2
    work = [t for t in map(answer_to, range(20)) if full_length(t) > 2][:4]
    pool.submit(work, tolerance=None)
    done, decoded = {}, 0
    while len(done) < 4:
        step = pool.step()
        decoded += step.decoded_tokens
        done |= {t.key: t for t in step.finished}
    assert pool.slots == 1
    assert decoded == sum(t.decoded_tokens for t in done.values())
    assert decoded == sum(t.num_tokens for t in done.values()) + 2 * hung.slots


def test_an_impossible_trajectory_is_refused_with_all_that_came_with_it(open_pool):
    members = [Scripted(slots=1), Scripted(slots=1)]
    pool = open_pool(*members)
    pool.submit([answer_to(0), answer_to(1)], tolerance=None)
    batch = [answer_to(2), answer_to(3), answer_to(4, tokens=(IMPOSSIBLE,))]
    with pytest.raises(RequestError, match="got -1"):
        pool.submit(batch, tolerance=None)
    with pytest.raises(RequestError, match="got -1"):
        pool.submit(batch, tolerance=None, sampling=Sampling(max_tokens=5))
    assert finished_by(pool, 2).keys() == {(0, 0), (1, 0)}
    assert pool.interrupt() == []
    pool.submit(batch[:2], tolerance=None)
    assert finished_by(pool, 2).keys() == {(2, 0), (3, 0)}


def test_a_trajectory_is_taken_on_once_until_it_comes_back(open_pool):
    pool = open_pool(Scripted(slots=1))
    twice = [answer_to(0), answer_to(1), answer_to(0)]
    with pytest.raises(RequestError, match=r"trajectory \(0, 0\) is already in the pool"):
        pool.submit(twice, tolerance=None)
    pool.submit(twice[:2], tolerance=None)
    with pytest.raises(RequestError, match=r"trajectory \(1, 0\) is already in the pool"):
        pool.submit([answer_to(1)], tolerance=None)
    assert [t.key for t in pool.interrupt()] == [(0, 0), (1, 0)]


@pytest.mark.parametrize("call", CALLS)
def test_any_other_exception_reaches_the_caller_unchanged_and_loses_nothing(call, open_pool):
    members = [Scripted(slots=1), Scripted(slots=1)]
    pool = open_pool(*members)
    error = members[1].error_at[call] = Bug("what the member said")
    work = [endless(prompt) for prompt in range(4)]

    def provoke():
        if call == "load_weights":
            pool.load_weights(Weights(1))
        pool.submit(work, tolerance=None)
        if call == "interrupt":
            pool.interrupt()
        finished_by(pool, 4)

    with pytest.raises(Bug) as raised:
        provoke()
    assert raised.value is error
    assert pool.slots == 2
    assert not pool.warnings
    stopped = pool.interrupt()
    assert [t.key for t in stopped] == ([] if call == "load_weights" else [t.key for t in work])


@pytest.mark.parametrize("call", ["step", "submit"])
def test_a_member_goes_on_after_an_exception_if_the_caller_does(call, open_pool):
    member = Scripted(slots=2)
    pool = open_pool(member)
    member.error_at[call] = Bug()
    pool.submit([answer_to(0), answer_to(1), answer_to(2)], tolerance=None)
    with pytest.raises(Bug):
        finished_by(pool, 3)
    assert finished_by(pool, 3).keys() == {(0, 0), (1, 0), (2, 0)}


def test_a_member_with_other_weights_than_it_was_given_is_refused(open_pool):
    class Stubborn(Scripted):
        def load_weights(self, weights):
            pass

    pool = open_pool(Scripted(), Stubborn("stubborn"))
    with pytest.raises(EngineError, match=r"engine 2 of 2 \(stubborn\) must have .* version 3"):
        pool.load_weights(Weights(3))


def test_all_members_load_their_weights_at_the_same_time(open_pool):
    class Together(Scripted):
        meeting = threading.Barrier(3)

        def load_weights(self, weights):
            self.meeting.wait(timeout=WAIT_SECONDS)
            super().load_weights(weights)

    members = [Together() for _ in range(3)]
    pool = open_pool(*members)
    pool.load_weights(Weights(5))
    assert [member.version for member in members] == [5, 5, 5]
    assert pool.version == 5


def test_a_closed_pool_has_no_threads_and_refuses_work(open_pool):
    members = [Scripted(), Scripted()]
    pool = open_pool(*members)
    pool.submit([answer_to(0)], tolerance=None)
    with pool:
        pass
    pool.close()
    assert all(member.is_closed for member in members)
    assert not [t for t in threading.enumerate() if t.name.startswith("engine ")]
    with pytest.raises(EngineError, match="the pool is closed"):
        pool.submit([answer_to(1)], tolerance=None)


def test_one_member_that_cannot_be_closed_does_not_keep_the_others_open(open_pool):
    members = [Scripted(), Scripted()]
    members[0].error_at["close"] = Bug("cannot close")
    pool = open_pool(*members)
    with pytest.raises(Bug, match="cannot close"):
        pool.close()
    assert members[1].is_closed


def test_closing_waits_for_a_hung_member_no_longer_than_the_patience(open_pool):
    hung = Scripted("hung")
    pool = open_pool(hung, Scripted(), timeout_seconds=0.3)
    hung.hangs_at.add("submit")
    pool.submit([answer_to(0)], tolerance=None)
    pool.close()
    assert pool.warnings == ["engine 1 of 2 (hung) hangs and is abandoned without closing it"]


def test_a_pool_can_be_a_member_of_a_pool(open_pool):
    inner_members = [Scripted(slots=1), Scripted(slots=2)]
    inner_members[1].error_at["step"] = EngineLost("gone")
    inner = open_pool(*inner_members)
    inner.gate = threading.Event()
    pool = open_pool(inner, Scripted(slots=1))
    pool.submit([answer_to(prompt) for prompt in range(8)], tolerance=None)
    done = finished_by(pool, 8)
    assert all(t.tokens == full_answer(t) for t in done.values())


def test_impossible_pools_are_refused():
    one = Scripted()
    cases = {
        "at least 1 engine": [],
        "in a pool only once": [one, one],
        "weights of one version": [one, Scripted()],
    }
    cases["weights of one version"][1].version = 3
    for message, members in cases.items():
        with pytest.raises(ConfigError, match=message):
            EnginePool(members, warn=print)
    for options in ({"timeout_seconds": 0}, {"queue_depth": -1}, {"names": ["a", "b"]}):
        with pytest.raises(ConfigError):
            EnginePool([one], warn=print, **options)


def test_the_pool_needs_neither_torch_nor_numpy():
    code = (
        "import sys; import sortedrl.engines.pool; "
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@settings(max_examples=40)
@given(
    schedules(),
    st.lists(st.sampled_from((2, 1, 3)), min_size=2, max_size=4),
    st.integers(1, 15),
    st.tuples(st.sampled_from(CALLS), st.integers(0, 12), st.booleans()),
)
def test_the_loop_trains_every_prompt_once_though_a_member_dies(schedule, slots, prompts, death):
    call, after_steps, is_mute = death
    members = [Scripted(f"m{n}", slots=count) for n, count in enumerate(slots)]
    members[0].is_mute = is_mute
    warnings, events, clock = [], [], VirtualClock()
    with EnginePool(members, warn=warnings.append) as pool:
        loop = Loop(
            prompts=SimulatedPrompts(prompts, prompt_tokens=1),
            buffer=Buffer(unit_size=schedule.unit_size),
            controller=Controller(schedule),
            engine=Dying(pool, members[0], call=call, after_steps=after_steps),
            scorer=CountingScorer(),
            trainer=SimulatedTrainer(costs=ticks(), clock=clock),
            journal=Journal(events.append, clock=clock),
            seed=0,
        )
        batches = list(loop.run())
    trained = [t for batch in batches for t in batch.trajectories]
    assert len(trained) == len({t.key for t in trained}) == prompts * schedule.samples_per_prompt
    assert all(t.tokens == full_answer(t) for t in trained)
    assert len(warnings) <= 1
    ledger = measure(events).run.ledger
    assert ledger.decoded == ledger.trained + ledger.discarded == loop.journal.engine_decoded


class Dying:
    """A pool of which one member is killed after so many steps."""

    def __init__(self, pool, member, *, call, after_steps):
        self._pool = pool
        self._member = member
        self._call = call
        self._steps_left = after_steps
        self.submit = pool.submit
        self.interrupt = pool.interrupt
        self.load_weights = pool.load_weights

    @property
    def slots(self):
        return self._pool.slots

    @property
    def version(self):
        return self._pool.version

    def step(self):
        if self._steps_left == 0:
            self._member.error_at[self._call] = EngineLost("killed")
        self._steps_left -= 1
        return self._pool.step()


@cache
def native_world():
    """Work, the rules it is written by, what one engine makes of it, and two equal models.

    A module can be driven by one thread at a time, so each engine has its own.
    """
    from native_worlds import fresh_all, roll_out, tiny_model
    from sortedrl.engines.native import NativeEngine

    work = fresh_all((1, 5, 40, 12), samples=2)
    limits = {t.key: 4 + mix(t.seed) % 16 for t in work}
    options = {"max_tokens": lambda t: limits[t.key], "stop_tokens": [3, 50]}
    models = (tiny_model(), tiny_model())
    return work, options, roll_out(NativeEngine(models[0], slots=4, **options), work), models


@settings(max_examples=4)
@given(st.integers(0, 2**16), st.sampled_from((2, 1, 3)), st.booleans())
def test_two_native_engines_write_what_one_writes_to_the_bit(seed, slots, kills_one):
    from native_worlds import answer
    from sortedrl.engines.native import NativeEngine

    class Native(NativeEngine):
        is_killed = False

        def step(self):
            if self.is_killed:
                raise EngineLost("killed")
            return super().step()

    random = Random(seed)
    work, options, alone, models = native_world()
    members = [Native(model, slots=slots, **options) for model in models]
    with EnginePool(members, warn=lambda _: None, queue_depth=random.choice((0, 1))) as pool:
        pool.submit(random.sample(work, len(work)), tolerance=None)
        done, decoded = {}, 0
        while len(done) < len(work):
            for _ in range(random.choice((1, 3, 10))):
                step = pool.step()
                decoded += step.decoded_tokens
                done |= {t.key: t for t in step.finished}
            if random.random() < 0.5 and len(done) < len(work):
                stopped = list(pool.interrupt())
                assert {t.key for t in stopped} == {t.key for t in work} - done.keys()
                pool.load_weights(Weights(pool.version + 1))
                members[0].is_killed = kills_one
                random.shuffle(stopped)
                pool.submit(stopped, tolerance=random.choice((None, 0.0)))
    assert [answer(done[t.key]) for t in work] == [answer(t) for t in alone]
    assert decoded == sum(t.decoded_tokens for t in done.values())
