import pytest

from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.errors import ConfigError


def test_the_empty_schedule_is_valid():
    assert Schedule().group_trajectories == 512


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strategy": "sorte"}, "did you mean 'sorted'"),
        ({"mode": "partail"}, "did you mean 'partial'"),
        ({"harvest_unit": "prompts"}, "did you mean 'prompt'"),
        ({"update_batch": 2048, "group_prompts": 1024}, "must lie in 1..1024"),
        ({"update_batch": 0}, "must lie in 1..512"),
        ({"group_prompts": 0}, "group_prompts must be at least 1, got 0"),
        ({"samples_per_prompt": -1}, "samples_per_prompt must be at least 1, got -1"),
        ({"lookahead": -1}, "lookahead must be at least 0, got -1"),
        ({"lookahead": 1, "strategy": "sync"}, "lookahead needs strategy 'sorted'"),
        ({"tolerance": 0.1}, "tolerance needs mode 'coupled'"),
        ({"tolerance": -0.1, "mode": "coupled"}, "tolerance must be at least 0, got -0.1"),
        ({"max_staleness": 1, "mode": "coupled"}, "max_staleness needs mode 'partial'"),
        ({"max_staleness": -1}, "max_staleness must be at least 0, got -1"),
        ({"max_staleness": 2, "strategy": "posthoc"}, "trains 4 update batches on one rollout"),
        ({"max_restarts": 0}, "max_restarts must be at least 1, got 0"),
        ({"over_launch": 0.5}, "over_launch must be at least 1, got 0.5"),
        ({"over_launch": float("inf")}, "over_launch must be a finite number, got inf"),
    ],
)
def test_what_cannot_work_is_refused_with_what_was_given(settings, said):
    with pytest.raises(ConfigError) as caught:
        Schedule(**settings)
    assert said in str(caught.value)


@pytest.mark.parametrize("settings", [{"slots": 0}, {"max_tokens": 0}])
def test_an_engine_needs_slots_and_tokens(settings):
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        EngineSettings(**settings)


def test_bounds_follow_from_the_settings():
    assert Schedule(strategy="sync", mode="on_policy").rounds_bound == 1
    assert Schedule().rounds_bound == 4
    assert Schedule(lookahead=2).rounds_bound == 20
    assert Schedule(strategy="april").rounds_bound is None
    assert Schedule().staleness_bound == 3
    assert Schedule(lookahead=2).staleness_bound == 19
    assert Schedule(lookahead=2, max_staleness=4).staleness_bound == 4
    assert Schedule(mode="coupled", lookahead=2).staleness_bound == 0
    assert Schedule(strategy="posthoc", mode="on_policy").staleness_bound == 3
    assert Schedule(strategy="ungrouped").staleness_bound is None
    assert Schedule(strategy="ungrouped", max_staleness=2).staleness_bound == 2


@pytest.mark.parametrize("name", [[], {}, 3, None, ("sync",)])
def test_a_name_of_another_type_is_refused_like_an_unknown_one(name):
    with pytest.raises(ConfigError, match=r"unknown schedule\.strategy"):
        Schedule(strategy=name)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"exact": []}, r"schedule\.exact must be true or false, got \[\]"),
        ({"update_batch": 2.5}, r"schedule\.update_batch must be a whole number, got 2\.5"),
        ({"update_batch": True}, r"schedule\.update_batch must be a whole number, got True"),
        ({"over_launch": "2"}, r"schedule\.over_launch must be a number"),
        ({"max_restarts": "2"}, r"schedule\.max_restarts must be a whole number or left out"),
    ],
)
def test_values_of_another_type_are_refused_from_python_too(values, message):
    with pytest.raises(ConfigError, match=message):
        Schedule(**values)
