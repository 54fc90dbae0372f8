import pytest

from sortedrl.clock import VirtualClock, WallClock


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
    with pytest.raises(ValueError, match="only goes forward, got -1"):
        clock.advance(-1)
