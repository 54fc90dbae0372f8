"""What the simulator must show on the paper's workload, and what everybody may rely on."""

import pytest

import sortedrl
from sortedrl.simulate.compare import row, simulate, variants
from sortedrl.simulate.settings import PRESETS


@pytest.fixture(scope="module")
def paper():
    from dataclasses import replace

    simulation = PRESETS["paper"]()
    outcomes = [
        simulate(replace(simulation, schedule=schedule))
        for schedule in variants(simulation.schedule)
    ]
    rows = [row(outcome, sync=outcomes[0]) for outcome in outcomes]
    return {(r["strategy"], r["mode"], r["lookahead"]): r for r in rows}


def test_sync_leaves_about_three_quarters_of_the_slots_idle(paper):
    assert 0.72 <= paper["sync", "on_policy", 0]["bubble"] <= 0.82


def test_partial_with_lookahead_fills_the_slots(paper):
    best = paper["sorted", "partial", 2]
    assert best["steady_bubble"] <= 0.01
    assert best["goodput_vs_sync"] >= 3.5


@pytest.mark.parametrize("lookahead", [0, 2])
def test_coupled_is_twice_as_fast_as_sync_without_length_bias(paper, lookahead):
    coupled = paper["sorted", "coupled", lookahead]
    assert coupled["goodput_vs_sync"] >= 2.0
    assert coupled["length_bias"] == pytest.approx(1.0, abs=0.01)
    assert coupled["max_staleness"] == 0


def test_redrawing_shortens_the_answers(paper):
    assert 0.4 <= paper["sorted", "on_policy", 0]["length_bias"] <= 0.6
    assert paper["sorted", "on_policy", 0]["discarded_tokens"] > 0


def test_without_groups_long_answers_starve_at_first(paper):
    assert paper["ungrouped", "partial", 0]["early_length_bias"] < 0.6
    assert paper["sorted", "partial", 0]["early_length_bias"] > 0.9


def test_the_peers_strategies_stand_in_the_same_table(paper):
    assert {"tail_batching", "april", "ungrouped", "posthoc"} <= {key[0] for key in paper}


def test_every_ledger_balances(paper):
    for values in paper.values():
        assert values["cached_tokens"] == 0


def test_a_longer_lookahead_never_stales_tokens_beyond_its_bound(paper):
    bound = PRESETS["paper"]().schedule.staleness_bound
    assert paper["sorted", "partial", 0]["max_staleness"] <= bound


def test_what_is_exported_is_what_is_listed():
    listed = {name: getattr(sortedrl, name) for name in sortedrl.__all__}
    assert all(callable(value) for value in listed.values())
    public = {name for name, value in vars(sortedrl).items() if isinstance(value, type)}
    assert public <= set(listed)
