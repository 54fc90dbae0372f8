"""What follows from other settings where nobody chose it, in files, flags and arguments alike."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from run_worlds import said
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.config.sizes import SIZES, changed_names, size_line, sized, with_siblings
from sortedrl.config.train import TrainSettings
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.settings import Simulation


def settings_with(samples=1, **schedule):
    unit = "prompt" if samples > 1 else "trajectory"
    return TrainSettings(
        schedule=Schedule(samples_per_prompt=samples, harvest_unit=unit, **schedule)
    )


@given(st.integers(1, 5000), st.integers(1, 300))
def test_derived_sizes_are_whole_prompts_that_the_data_has(num_rows, samples):
    found = sized(settings_with(samples), num_rows=num_rows, chosen=frozenset())
    schedule = found.schedule
    assert schedule.update_batch % samples == 0
    assert schedule.group_prompts <= num_rows
    assert schedule.group_trajectories % schedule.update_batch == 0 or num_rows < 32
    assert schedule.update_batch <= max(128, samples)
    assert 1 <= found.engine.slots <= 128


def test_a_large_set_keeps_the_sizes_of_the_paper():
    found = sized(TrainSettings(), num_rows=17_000, chosen=frozenset())
    assert found == TrainSettings()


@pytest.mark.parametrize("samples", [1, 8])
@pytest.mark.parametrize("num_rows", [64, 200])
def test_a_small_set_is_several_updates_without_idle_slots(num_rows, samples):
    found = sized(settings_with(samples), num_rows=num_rows, chosen=frozenset())
    run = simulate(Simulation(prompts=num_rows, schedule=found.schedule, engine=found.engine))
    assert run.metrics.run.updates >= 8
    assert run.metrics.run.bubble < 0.55


def test_what_is_chosen_stays():
    chosen = TrainSettings(
        schedule=Schedule(group_prompts=8, update_batch=4), engine=EngineSettings(slots=99)
    )
    assert sized(chosen, num_rows=64, chosen=changed_names(chosen)) == chosen
    found = sized(
        settings_with(update_batch=16), num_rows=64, chosen=frozenset({"schedule.update_batch"})
    )
    assert (found.schedule.group_prompts, found.schedule.update_batch) == (64, 16)
    found = sized(
        settings_with(group_prompts=4, update_batch=1),
        num_rows=640,
        chosen=frozenset({"schedule.group_prompts"}),
    )
    assert (found.schedule.group_prompts, found.schedule.update_batch) == (4, 4)


def test_the_line_names_what_was_derived_and_nothing_else():
    found = sized(TrainSettings(), num_rows=64, chosen=frozenset({"engine.slots"}))
    line = size_line(found, num_rows=64, chosen=frozenset({"engine.slots"}))
    assert line == (
        "for 64 rows with 1 answer each: schedule.group_prompts = 32, "
        "schedule.update_batch = 8 (set them to change)"
    )
    assert size_line(found, num_rows=64, chosen=frozenset(SIZES)) is None


@pytest.mark.parametrize("name", ["grpo", "dapo", "rloo", "dr_grpo", "reinforce_pp_baseline"])
def test_an_algorithm_that_compares_siblings_brings_them(name):
    tables = {"algorithm": {"name": name}}
    assert with_siblings(tables)["schedule"] == {"samples_per_prompt": 8, "harvest_unit": "prompt"}
    chosen = with_siblings({**tables, "schedule": {"samples_per_prompt": 4}})
    assert chosen["schedule"] == {"samples_per_prompt": 4, "harvest_unit": "prompt"}
    assert with_siblings(tables, chosen=frozenset({"schedule.samples_per_prompt"}))["schedule"] == {
        "harvest_unit": "prompt"
    }


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp", "gpo", 3])
def test_other_algorithms_bring_nothing(name):
    assert with_siblings({"algorithm": {"name": name}}) == {"algorithm": {"name": name}}


@pytest.mark.usefixtures("here")
def test_a_dry_run_says_what_is_derived_from_file_and_flags(capsys, tmp_path):
    words = ["--rows", "64", "--prompt-tokens", "20", "--card", "h100", "--dry-run", "--json"]
    _, err = said(capsys, ["train", "--algorithm", "grpo", *words])
    assert "for 64 rows with 8 answers each: schedule.group_prompts = 32" in err
    config = tmp_path / "c.toml"
    config.write_text('[algorithm]\nname = "grpo"\n[engine]\nslots = 5\n')
    _, err = said(capsys, ["train", "--eval-tasks", "gsm8k", str(config), *words])
    assert "schedule.update_batch = 64 (set" in err
    _, err = said(capsys, ["train", str(config), "--samples", "1", *words], code=2)
    assert "samples_per_prompt must be at least 2, got 1" in err
