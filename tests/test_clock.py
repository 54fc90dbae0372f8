import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.core.clock import VirtualClock, WallClock


def test_a_wall_clock_starts_near_zero_and_never_goes_back():
    clock = WallClock()
    seen = [clock.seconds() for _ in range(100)]
    assert 0 <= seen[0] < 60
    assert seen == sorted(seen)


def test_virtual_time_passes_only_where_someone_says_so():
    clock = VirtualClock()
    assert clock.seconds() == clock.seconds() == 0
    clock.advance(1.5)
    clock.advance(0)
    assert clock.seconds() == 1.5
    with pytest.raises(ValueError, match="must not go backwards, got -1"):
        clock.advance(-1)


class Hand:
    """A clock's hand that a test moves."""

    def __init__(self, now=1e6):
        self.now = now

    def __call__(self):
        return self.now


def test_a_wall_clock_goes_on_from_the_seconds_of_the_run_it_resumes():
    hand = Hand()
    clock = WallClock(start=0.1, now=hand)
    assert clock.seconds() == 0.1
    hand.now += 2
    assert clock.seconds() == 2.1


def test_a_paused_wall_clock_stands_still_and_then_goes_on():
    hand = Hand()
    clock = WallClock(now=hand)
    hand.now += 1
    with clock.paused():
        hand.now += 10
        assert clock.seconds() == 1
        with clock.paused():
            hand.now += 10
        assert clock.seconds() == 1
        hand.now += 10
    assert clock.seconds() == 1
    hand.now += 1
    assert clock.seconds() == 2


def test_a_pause_that_ends_with_an_error_ends():
    hand = Hand()
    clock = WallClock(now=hand)

    def fail():
        with clock.paused():
            hand.now += 10
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    hand.now += 1
    assert clock.seconds() == 1


@given(st.floats(0, 1e7), st.lists(st.tuples(st.floats(0, 1e4), st.booleans())))
def test_a_wall_clock_with_pauses_never_goes_back(start, passages):
    hand = Hand()
    clock = WallClock(start=start, now=hand)
    before = clock.seconds()
    assert before == start
    for seconds, is_pause in passages:
        if is_pause:
            with clock.paused():
                hand.now += seconds
            assert clock.seconds() == before
        hand.now += 0 if is_pause else seconds
        assert clock.seconds() >= before
        before = clock.seconds()
