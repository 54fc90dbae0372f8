"""The buffer: every arrow it has, every arrow it has not, and going on after a restore."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.core.buffer import Buffer, Feed
from sortedrl.errors import BufferStateError
from worlds import done, fresh, written


def loaded(*keys, unit_size=1):
    """A buffer with one group of these keys."""
    buffer = Buffer(unit_size=unit_size)
    buffer.load([fresh(*key) for key in keys])
    return buffer


def started(buffer, count=1, feed=Feed.OLDEST_FIRST):
    return [t.key for t in buffer.start(count, feed=feed)]


def test_load_makes_fresh_waiting_work_and_opens_a_group():
    buffer = loaded((0, 0), (1, 0))
    assert (buffer.num_fresh, buffer.num_returned, buffer.num_waiting) == (2, 0, 2)
    assert (buffer.next_group, buffer.oldest_open_group, buffer.num_open_groups) == (1, 0, 1)


def test_start_moves_at_most_count_trajectories_to_running():
    buffer = loaded((0, 0), (1, 0), (2, 0))
    assert started(buffer, 2) == [(0, 0), (1, 0)]
    assert (buffer.num_waiting, buffer.num_running) == (1, 2)
    assert started(buffer, 5) == [(2, 0)]
    assert started(buffer, 5) == []
    assert started(buffer, 0) == []


def test_finish_makes_an_answer_harvestable_and_gives_the_value_it_was_started_with():
    buffer = loaded((0, 0))
    (begun,) = buffer.start(1, feed=Feed.OLDEST_FIRST)
    answer = done(begun, 3)
    assert buffer.finish(answer) == begun
    assert buffer.harvestable() == [answer]
    assert (buffer.num_running, buffer.num_harvestable, buffer.num_unfinished) == (0, 1, 0)


def test_put_back_makes_running_work_returned_waiting_work():
    buffer = loaded((0, 0), (1, 0))
    (begun,) = buffer.start(1, feed=Feed.OLDEST_FIRST)
    stopped = written(begun, 2, version=0)
    assert buffer.put_back(stopped) == begun
    assert (buffer.num_fresh, buffer.num_returned, buffer.num_running) == (1, 1, 0)
    assert buffer.start(1, feed=Feed.RETURNED_ONLY) == [stopped]


def test_put_back_also_renews_a_ready_answer():
    buffer = loaded((0, 0))
    (begun,) = buffer.start(1, feed=Feed.OLDEST_FIRST)
    buffer.finish(done(begun))
    assert buffer.oldest_unfinished_group is None
    assert buffer.put_back(begun) == done(begun)
    assert (buffer.num_harvestable, buffer.num_returned) == (0, 1)
    assert buffer.oldest_unfinished_group == 0


def test_take_forgets_the_answer_and_closes_the_group_with_its_last_one():
    buffer = loaded((0, 0), (1, 0))
    for begun in buffer.start(2, feed=Feed.OLDEST_FIRST):
        buffer.finish(done(begun))
    assert [t.key for t in buffer.take([(1, 0)])] == [(1, 0)]
    assert buffer.is_open(0)
    buffer.take([(0, 0)])
    assert not buffer.is_open(0)
    assert (buffer.num_trained, buffer.num_harvestable) == (2, 0)
    assert buffer.oldest_open_group is None


def test_a_unit_becomes_harvestable_with_its_last_sibling_and_in_sample_order():
    buffer = loaded((0, 0), (0, 1), (1, 0), (1, 1), unit_size=2)
    a0, a1, b0, b1 = buffer.start(4, feed=Feed.OLDEST_FIRST)
    buffer.finish(done(a1))
    buffer.finish(done(b0))
    assert buffer.num_harvestable == 0
    assert [t.key for t in buffer.partnered()] == [(0, 1), (1, 0)]
    assert buffer.num_unfinished == 4
    buffer.finish(done(a0))
    assert [t.key for t in buffer.harvestable()] == [(0, 0), (0, 1)]
    assert buffer.partnered() == [done(b0)]
    assert buffer.num_unfinished == 2
    buffer.put_back(b0)
    buffer.finish(done(b1))
    assert buffer.num_harvestable == 2
    assert [t.key for t in buffer.start(1, feed=Feed.RETURNED_ONLY)] == [(1, 0)]
    buffer.finish(done(b0))
    assert [t.key for t in buffer.harvestable()] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_older_groups_go_first_then_the_most_interrupted_then_by_id():
    buffer = Buffer()
    buffer.load([fresh(n) for n in range(4)])
    buffer.load([fresh(n, group=1) for n in range(4, 6)])
    first = buffer.start(3, feed=Feed.OLDEST_FIRST)
    for trajectory, interruptions in zip(first, (1, 2, 1), strict=True):
        buffer.put_back(replace(trajectory, interruptions=interruptions))
    assert started(buffer, 9) == [(1, 0), (0, 0), (2, 0), (3, 0), (4, 0), (5, 0)]


@pytest.mark.parametrize(
    ("feed", "order"),
    [
        (Feed.OLDEST_FIRST, [0, 1, 2, 3]),
        (Feed.FRESH_ONLY, [2, 3]),
        (Feed.RETURNED_ONLY, [0, 1]),
    ],
)
def test_a_feed_says_which_kind_of_waiting_work_goes_first(feed, order):
    buffer = loaded((0, 0), (1, 0), (2, 0), (3, 0))
    for trajectory in buffer.start(2, feed=Feed.FRESH_ONLY):
        buffer.put_back(trajectory)
    assert started(buffer, 9, feed) == [(number, 0) for number in order]


def test_an_older_group_goes_before_a_more_often_interrupted_newer_one():
    buffer = Buffer()
    buffer.load([fresh(0), fresh(1)])
    buffer.load([fresh(2, group=1)])
    a, b, c = buffer.start(3, feed=Feed.OLDEST_FIRST)
    buffer.put_back(replace(c, interruptions=5))
    assert started(buffer, 1) == [(2, 0)]
    buffer.put_back(replace(c, interruptions=6))
    buffer.put_back(replace(b, interruptions=1))
    assert started(buffer, 1) == [(1, 0)]
    assert buffer.any_running_interrupted(1)
    assert not buffer.any_running_interrupted(2)
    buffer.finish(done(a))


def test_a_waiting_answer_can_neither_finish_nor_be_put_back_nor_be_taken():
    buffer = loaded((7, 3))
    for arrow in (
        lambda: buffer.finish(done(fresh(7, 3))),
        lambda: buffer.put_back(fresh(7, 3)),
        lambda: buffer.take([(7, 3)]),
    ):
        with pytest.raises(BufferStateError, match=r"\(7, 3\)"):
            arrow()
    assert buffer.num_waiting == 1


def test_a_running_answer_cannot_be_taken():
    buffer = loaded((7, 3))
    started(buffer)
    with pytest.raises(BufferStateError, match=r"take .*\(7, 3\)"):
        buffer.take([(7, 3)])


def test_an_answer_cannot_finish_twice():
    buffer = loaded((7, 3))
    started(buffer)
    buffer.finish(done(fresh(7, 3)))
    with pytest.raises(BufferStateError, match=r"finish .*\(7, 3\)"):
        buffer.finish(done(fresh(7, 3)))


def test_an_answer_without_a_finish_reason_is_not_ready():
    buffer = loaded((7, 3))
    started(buffer)
    with pytest.raises(BufferStateError, match=r"\(7, 3\).* finish reason"):
        buffer.finish(fresh(7, 3))
    assert buffer.num_running == 1


def test_an_answer_that_waits_for_its_siblings_cannot_be_taken():
    buffer = loaded((7, 0), (7, 1), unit_size=2)
    started(buffer)
    buffer.finish(done(fresh(7, 0)))
    with pytest.raises(BufferStateError, match=r"take .*\(7, 0\)"):
        buffer.take([(7, 0)])


def test_put_back_of_a_harvestable_sibling_leaves_the_others_waiting_for_it():
    buffer = loaded((7, 0), (7, 1), (7, 2), unit_size=3)
    for begun in buffer.start(3, feed=Feed.OLDEST_FIRST):
        buffer.finish(done(begun))
    assert (buffer.num_harvestable, buffer.num_unfinished) == (3, 0)
    buffer.put_back(fresh(7, 1))
    assert [t.key for t in buffer.partnered()] == [(7, 0), (7, 2)]
    assert (buffer.num_harvestable, buffer.num_returned, buffer.num_unfinished) == (0, 1, 3)
    buffer.put_back(fresh(7, 2))
    for begun in buffer.start(2, feed=Feed.OLDEST_FIRST):
        buffer.finish(done(begun))
    assert (buffer.num_harvestable, buffer.num_unfinished) == (3, 0)
    assert len(buffer.take([(7, 0), (7, 1), (7, 2)])) == 3
    assert buffer.oldest_open_group is None


def test_a_trained_answer_is_gone():
    buffer = loaded((7, 3))
    started(buffer)
    buffer.finish(done(fresh(7, 3)))
    buffer.take([(7, 3)])
    for arrow in (
        lambda: buffer.finish(done(fresh(7, 3))),
        lambda: buffer.put_back(fresh(7, 3)),
        lambda: buffer.take([(7, 3)]),
        lambda: buffer.load([fresh(7, 3, group=1)]),
    ):
        with pytest.raises(BufferStateError, match=r"\(7, 3\)"):
            arrow()
    assert buffer.num_trained == 1


def test_a_group_is_loaded_once_in_turn_and_never_empty():
    buffer = loaded((0, 0))
    with pytest.raises(BufferStateError, match="at least one trajectory"):
        buffer.load([])
    with pytest.raises(BufferStateError, match=r"\(1, 0\) of group 0"):
        buffer.load([fresh(1, group=0)])
    with pytest.raises(BufferStateError, match=r"\(0, 0\)"):
        buffer.load([fresh(0, group=1)])
    assert (buffer.next_group, buffer.num_waiting) == (1, 1)


def test_a_group_that_holds_a_trajectory_twice_is_refused():
    with pytest.raises(BufferStateError, match=r"\(0, 0\)"):
        loaded((0, 0), (0, 0))


@pytest.mark.parametrize("keys", [[(0, 0), (5, 5)], [(0, 0), (0, 0)]])
def test_a_refused_take_loses_nothing(keys):
    buffer = loaded((0, 0))
    started(buffer)
    buffer.finish(done(fresh(0)))
    with pytest.raises(BufferStateError):
        buffer.take(keys)
    assert buffer.num_harvestable + buffer.num_trained == 1


def test_a_buffer_is_saved_only_while_nothing_runs():
    buffer = loaded((0, 0))
    started(buffer)
    with pytest.raises(BufferStateError, match="1 trajectories run"):
        buffer.state()


def test_a_saved_buffer_lists_what_it_holds():
    buffer = loaded((0, 0), (1, 0), (2, 0))
    a, b = buffer.start(2, feed=Feed.OLDEST_FIRST)
    buffer.finish(done(a))
    buffer.put_back(b)
    state = buffer.state()
    assert (state.ready, state.returned, state.fresh) == ((done(a),), (b,), (fresh(2),))
    assert (state.next_group, state.next_prompt, state.num_trained) == (1, 3, 0)


class Driver:
    """Moves a buffer along random arrows; the same random numbers give the same moves."""

    def __init__(self, buffer, random):
        self.buffer, self.random = buffer, random
        self.running = []
        self.loaded = []

    def move(self):
        """One random move; gives what there is to see afterwards."""
        arrow = self.random.choice(
            (self.load, self.start, self.start, self.finish, self.finish, self.put_back, self.take)
        )
        return arrow(), self.sight()

    def sight(self):
        buffer = self.buffer
        return (
            (buffer.num_fresh, buffer.num_returned, buffer.num_running, buffer.num_trained),
            (buffer.num_unfinished, buffer.num_open_groups, buffer.next_group),
            (buffer.oldest_open_group, buffer.oldest_unfinished_group),
            [buffer.any_running_interrupted(times) for times in range(4)],
            buffer.harvestable(),
            buffer.partnered(),
        )

    def load(self):
        group, unit = self.buffer.next_group, self.buffer.unit_size
        prompts = range(10 * group, 10 * group + self.random.randint(1, 3))
        trajectories = [fresh(p, s, group=group) for p in prompts for s in range(unit)]
        self.loaded += [t.key for t in trajectories]
        return self.buffer.load(trajectories)

    def start(self):
        feed = self.random.choice(list(Feed))
        begun = self.buffer.start(self.random.randint(0, 4), feed=feed)
        self.running += begun
        return begun

    def pick(self, things):
        return things.pop(self.random.randrange(len(things))) if things else None

    def finish(self):
        begun = self.pick(self.running)
        tokens = self.random.randint(1, 3)
        return begun and self.buffer.finish(done(begun, tokens))

    def put_back(self):
        chosen = self.random.choice(("running", "ready"))
        ready = self.buffer.partnered()
        if self.buffer.unit_size == 1:
            ready = self.buffer.harvestable()
        begun = self.pick(self.running if chosen == "running" else ready)
        if begun is None:
            return None
        again = replace(begun, interruptions=begun.interruptions + 1, finish_reason=None)
        return self.buffer.put_back(again)

    def take(self):
        ready = [t.key for t in self.buffer.harvestable()]
        return self.buffer.take(self.random.sample(ready, self.random.randint(0, len(ready))))

    def stop(self):
        while self.running:
            self.buffer.put_back(self.running.pop())


@given(st.integers(1, 3), st.integers(0, 40), st.integers(0, 2**32))
def test_a_restored_buffer_goes_on_exactly_as_the_saved_one(unit_size, moves, seed):
    original = Driver(Buffer(unit_size=unit_size), Random(seed))
    for _ in range(moves):
        original.move()
    original.stop()
    restored = Driver(Buffer.from_state(original.buffer.state()), Random(0))
    restored.random.setstate(original.random.getstate())
    assert restored.sight() == original.sight()
    for _ in range(40):
        assert restored.move() == original.move()
    original.stop()
    restored.stop()
    assert restored.buffer.state() == original.buffer.state()


@given(st.integers(1, 3), st.integers(0, 60), st.integers(0, 2**32))
def test_nothing_is_lost_and_nothing_copied_along_any_arrows(unit_size, moves, seed):
    driver = Driver(Buffer(unit_size=unit_size), Random(seed))
    trained = []
    for _ in range(moves):
        result, _ = driver.move()
        if isinstance(result, list):
            trained += [t.key for t in result if t.finish_reason is not None]
    driver.stop()
    state = driver.buffer.state()
    held = [t.key for t in (*state.fresh, *state.returned, *state.ready)]
    assert sorted(held + trained) == sorted(driver.loaded)
    assert state.num_trained == len(trained)
