import re
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.cli import main
from sortedrl.errors import DataError
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.costs import CostSettings
from sortedrl.simulate.fit import fit
from sortedrl.simulate.settings import PRESETS

small = replace(PRESETS["paper"](), groups=1)


def events_of(simulation):
    events = []
    simulate(simulation, record=events.append)
    return events


@given(
    step=st.floats(1e-3, 1e-1),
    sequence=st.floats(1e-6, 1e-3),
    cached=st.floats(1e-9, 1e-6),
    prefill=st.floats(1e-6, 1e-3),
)
@settings(max_examples=10, deadline=None)
def test_the_constants_of_a_simulated_run_are_found_again(step, sequence, cached, prefill):
    given = CostSettings(
        step_seconds=step,
        sequence_seconds=sequence,
        cached_token_seconds=cached,
        prefill_token_seconds=prefill,
    )
    fitted = fit(events_of(replace(small, costs=given)))
    for name, value in asdict(given.costs()).items():
        assert asdict(fitted.costs)[name] == pytest.approx(value, rel=1e-4), name
    assert fitted.relative_error < 1e-6


def test_a_fitted_simulator_predicts_another_strategy():
    truth = replace(small, groups=3, costs=CostSettings(hardware="h200-qwen-2.5-1.5b"))
    costs = asdict(fit(events_of(truth)).costs)
    ahead = replace(truth.schedule, lookahead=2)
    measured = simulate(replace(truth, schedule=ahead)).metrics.run
    predicted = simulate(replace(truth, schedule=ahead, costs=CostSettings(**costs))).metrics.run
    assert predicted.goodput == pytest.approx(measured.goodput, rel=1e-3)
    assert predicted.bubble == pytest.approx(measured.bubble, abs=1e-3)


def test_too_short_a_run_is_refused():
    with pytest.raises(DataError, match="too few to fit"):
        fit(events_of(PRESETS["six"]()))


def test_the_old_name_of_the_weight_sync_cost_is_refused_with_the_new_one(tmp_path, capsys):
    file = tmp_path / "old.toml"
    file.write_text("[costs]\nhand_over_seconds = 1.0\n")
    for arguments in ([str(file)], ["six", "--hand-over-seconds", "1"]):
        assert main(["simulate", *arguments]) == 2
        assert re.search("is now .*weight.sync.seconds; change it", capsys.readouterr().err)
