from dataclasses import replace

import pytest

from sortedrl.errors import ConfigError
from sortedrl.simulate.settings import PRESETS
from sortedrl.simulate.tune import Search, tune

PICTURE = PRESETS["picture"]()


@pytest.fixture(scope="module")
def tuned():
    return tune(PICTURE, Search())


def test_every_candidate_runs_the_same_prompts(tuned):
    assert len(tuned.tried) > 50
    for outcome in (tuned.current, *tuned.tried):
        assert outcome.metrics.run.trajectories == 128


def test_the_front_is_what_nothing_beats_in_both_speed_and_staleness(tuned):
    def numbers(outcome):
        return outcome.metrics.run.mean_staleness, -outcome.metrics.run.trained_per_second

    for outcome in tuned.allowed:
        stale, slow = numbers(outcome)
        as_good = [o for o in tuned.allowed if numbers(o)[0] <= stale and numbers(o)[1] <= slow]
        if outcome in tuned.front:
            assert all(numbers(other) == (stale, slow) for other in as_good)
        else:
            assert any(other in tuned.front for other in as_good)


def test_the_best_is_the_least_stale_of_the_fastest(tuned):
    fastest = max(outcome.metrics.run.trained_per_second for outcome in tuned.allowed)
    assert tuned.best.metrics.run.trained_per_second >= 0.99 * fastest
    assert tuned.gain >= 1.0


def test_by_default_no_candidate_makes_larger_updates(tuned):
    assert all(o.simulation.schedule.update_batch <= 8 for o in tuned.tried)


def test_workers_side_by_side_find_the_same():
    search = Search(modes=("partial",), lookaheads=(0, 1), group_sizes=(32,))
    assert tune(PICTURE, search, workers=2) == tune(PICTURE, search, workers=1)


def test_partial_candidates_are_held_to_the_staleness_asked_for():
    limited = replace(PICTURE, schedule=replace(PICTURE.schedule, max_staleness=1))
    found = tune(limited, Search(modes=("partial",), lookaheads=(0, 2)))
    assert all(outcome.metrics.run.staleness_max <= 1 for outcome in found.tried)


@pytest.mark.parametrize(
    ("search", "workers", "said"),
    [
        (Search(modes=()), 1, "no settings are left to try"),
        (Search(update_batches=(1000,)), 1, "no settings are left to try"),
        (Search(lookaheads=(-1,)), 1, "lookahead must be at least 0, got -1"),
        (Search(), 0, "workers must be at least 1, got 0"),
    ],
)
def test_an_impossible_search_is_refused(search, workers, said):
    with pytest.raises(ConfigError, match=said):
        tune(PICTURE, search, workers=workers)
