"""The ablations: one setting at a time, ledgers that balance, two halves that never mix."""

import json
import re
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest

from experiments import ablations
from experiments.__main__ import merged
from experiments.ablations import Run, fitted, learning_setup, runs, simulation, synchronous, trials
from experiments.learning import Arm, train_settings, warm_settings
from experiments.record import Record, Results
from experiments.trials import ROOT, Deadline, Setup, run_in_turn
from sortedrl.config.parsing import read_toml
from sortedrl.errors import DataError
from sortedrl.simulate.compare import simulate

SETTINGS = read_toml(ROOT / "experiments" / "ablations.toml")
KNOWN = {
    "costs": {"step_seconds": 2e-3, "update_seconds": 0.3, "update_token_seconds": 1e-5},
    "mismatch_rate": 0.0,
    "prompt_tokens": 200,
}
SIMULATED = [
    (base, change["setting"], value)
    for change in SETTINGS["simulated"]["changes"]
    for base in change["bases"]
    for value in change["values"]
]
MEASURED = list(runs(SETTINGS["measured"]))
NOWHERE = Path("nowhere")
KEPT = Results(ROOT / "experiments" / "results").read("ablations")


def trial_of(folder, *, settings=SETTINGS):
    return Setup(
        table="ablations",
        device="cpu",
        is_small=False,
        settings=settings,
        results=Results(folder / "results"),
        scratch=folder / "scratch",
    )


def flat(table, path=""):
    """A tree of settings as one row, by the path of each leaf."""
    if not isinstance(table, dict):
        return {path: table}
    parts = (flat(value, f"{path}.{name}".strip(".")) for name, value in table.items())
    return {name: value for part in parts for name, value in part.items()}


def differing(one, other):
    left, right = flat(asdict(one)), flat(asdict(other))
    return {name for name in left | right if left.get(name) != right.get(name)}


def made_simulation(base, change, *, seed=0):
    return simulation(trial_of(NOWHERE), base, change=change, known=KNOWN, seed=seed)


@cache
def trained(run):
    setup = learning_setup(trial_of(NOWHERE), run)
    arm = Arm(algorithm="ablated", name=run.name, seed=0)
    return train_settings(setup, arm, model=NOWHERE / "model")


def kept_prediction(folder, *, trial="smollm2-135m"):
    numbers = {"model": trial, "fitted_to": "sorted-coupled", **KNOWN, "rows": []}
    facts = {"command": "c", "commit": "d", "date": "e", "machine": {}, "seconds": 1.0}
    record = Record(table="prediction", trial=trial, numbers=numbers, **facts)
    Results(folder / "results").write(record)
    return record


# --- one change at a time -------------------------------------------------------------------------


@pytest.mark.parametrize(("base", "setting", "value"), SIMULATED)
def test_a_simulation_differs_from_its_base_in_one_setting(base, setting, value):
    whole = made_simulation(base, {})
    found = differing(made_simulation(base, {setting: value}), whole)
    # As many groups need more prompts where a group has more of them.
    follows = {"prompts"} if setting == "group_prompts" else set()
    assert {name.rpartition(".")[2] for name in found - follows} <= {setting}


@pytest.mark.parametrize("change", SETTINGS["simulated"]["changes"], ids=lambda c: c["setting"])
def test_the_base_is_one_of_the_values_and_all_values_differ(change):
    for base in change["bases"]:
        made = [made_simulation(base, {change["setting"]: v}) for v in change["values"]]
        assert made.count(made_simulation(base, {})) == 1
        assert len(set(made)) == len(change["values"])


@pytest.mark.parametrize("run", MEASURED, ids=lambda run: run.name)
def test_a_measured_run_differs_from_its_base_in_one_setting(run):
    found = differing(trained(run), trained(Run(base=run.base)))
    # When it is evaluated, in updates, follows from the update batch; in answers it stays the same.
    follows = {"out", "evaluation.every"}
    assert found - follows == (set() if run.setting is None else {run.setting})


def test_measured_runs_share_all_that_makes_them_comparable(tmp_path):
    every = [trained(run) for run in MEASURED]
    setup = learning_setup(trial_of(tmp_path))
    assert warm_settings(setup, 0).out == tmp_path / "scratch" / "warm-0"
    for settings in every:
        schedule, evaluation = settings.schedule, settings.evaluation
        assert evaluation.every * schedule.update_batch == 384
        assert (evaluation.tasks, evaluation.limit) == (every[0].evaluation.tasks, 96)
        assert settings.optimiser == every[0].optimiser
        prompts = int(re.search(r"count=(\d+)", settings.task)[1])
        assert prompts * schedule.samples_per_prompt == 768


def test_the_bases_of_several_answers_differ_in_the_harvest_unit_alone():
    one, other = (trained(Run(base=base)) for base in ("siblings", "whole_prompts"))
    assert differing(one, other) == {"out", "schedule.harvest_unit"}


def test_every_trial_has_a_file_name_of_its_own(tmp_path):
    names = [trial.name for trial in trials(trial_of(tmp_path))]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"(simulated|measured)-[\w.-]+", name) for name in names)


def test_the_small_sizes_can_be_planned(tmp_path):
    settings = merged(SETTINGS, SETTINGS["small"])
    assert settings["measured"]["warm"]["max_steps"] < SETTINGS["measured"]["warm"]["max_steps"]
    assert len(trials(trial_of(tmp_path, settings=settings))) > 20


# --- simulated ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("base", "setting", "value"), SIMULATED)
def test_every_simulation_balances_its_ledger_and_trains_on_every_answer(base, setting, value):
    found = made_simulation(base, {setting: value})
    # The law holds for any sizes; short answers and one group are quick.
    small = replace(
        found,
        prompts=found.schedule.group_prompts,
        engine=replace(found.engine, max_tokens=64),
        lengths=replace(found.lengths, median=16.0, mismatch_rate=0.05),
    )
    run = simulate(small).metrics.run
    assert run.ledger.decoded == run.ledger.trained + run.ledger.discarded
    assert run.trajectories == small.num_prompts * small.schedule.samples_per_prompt


@pytest.mark.parametrize(("base", "setting", "value"), SIMULATED)
def test_the_baseline_differs_in_nothing_but_the_rules(base, setting, value):
    found = made_simulation(base, {setting: value}, seed=2)
    rules = {"strategy", "mode", "lookahead", "tolerance", "harvest_unit", "max_restarts"}
    assert differing(found, synchronous(found)) <= {f"schedule.{name}" for name in rules}
    assert synchronous(found).schedule.never_interrupts


def test_a_simulated_trial_says_with_what_and_marks_its_base(tmp_path):
    kept_prediction(tmp_path)
    change = {"bases": ["coupled"], "setting": "lookahead", "values": [0, 1]}
    settings = merged(SETTINGS, {"simulated": {"groups": 1, "seeds": [4, 5], "changes": [change]}})
    setup = trial_of(tmp_path, settings=settings)
    trial = trials(setup)[0]
    run_in_turn([trial], setup, deadline=Deadline(None), tell=lambda _: None)
    (record,) = setup.results.read("ablations")
    numbers = record.numbers
    assert (numbers["kind"], numbers["fitted_to"]) == ("simulated", "sorted-coupled")
    assert [(row["value"], row["is_base"]) for row in numbers["rows"]] == [(0, True), (1, False)]
    for row in numbers["rows"]:
        assert len(row["goodput"]) == len(row["goodput_vs_sync"]) == 2
        assert all(ratio > 1 for ratio in row["goodput_vs_sync"])


def test_costs_are_those_of_the_own_results_and_else_the_kept_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(ablations, "ROOT", tmp_path)
    with pytest.raises(DataError, match="measure the table prediction first"):
        fitted(trial_of(tmp_path))
    kept_prediction(tmp_path / "experiments")
    kept_prediction(tmp_path, trial="another")
    assert fitted(trial_of(tmp_path)).trial == "smollm2-135m"
    own = replace(kept_prediction(tmp_path), commit="mine")
    Results(tmp_path / "results").write(own)
    assert fitted(trial_of(tmp_path)).commit == "mine"


# --- the page -------------------------------------------------------------------------------------


def tables(text):
    """The tables of a text, each as its lines."""
    found = re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE)
    return [table.strip().splitlines() for table in found]


def test_simulated_and_measured_numbers_never_share_a_table():
    simulated = [r for r in KEPT if r.numbers["kind"] == "simulated"]
    measured = [r for r in KEPT if r.numbers["kind"] == "measured"]
    first, second = ablations.section(KEPT).split("### MEASURED on a CPU")
    assert first.startswith("### SIMULATED")
    (own,), (other,) = tables(first), tables(second)
    assert len(own) == 2 + sum(len(r.numbers["rows"]) for r in simulated)
    assert len(other) == 2 + len(measured)
    assert own[0] != other[0]
    assert "score" not in own[0]
    assert "goodput" not in other[0]


@pytest.mark.parametrize(("kind", "absent"), [("simulated", "MEASURED"), ("measured", "SIMULATED")])
def test_a_half_without_results_has_no_part(kind, absent):
    text = ablations.section([r for r in KEPT if r.numbers["kind"] == kind])
    assert kind.upper() in text
    assert absent not in text
    assert len(tables(text)) == 1


def test_each_part_names_its_own_command_and_commit_and_what_it_cannot_say():
    records = [
        replace(r, commit=f"of-{r.numbers['kind']}") for r in KEPT if r.numbers["kind"] != "warm"
    ]
    first, second = ablations.section(records).split("### MEASURED on a CPU")
    assert "of-simulated" in first
    assert "of-measured" in second
    assert "of-measured" not in first
    assert "python -m experiments ablations" in second
    assert "supports no ranking" in second


def test_the_kept_results_are_those_of_the_settings(tmp_path):
    kept = {record.trial for record in KEPT}
    assert kept == {trial.name for trial in trials(trial_of(tmp_path))}
    for record in KEPT:
        json.dumps(record.numbers, allow_nan=False)


def test_the_ledgers_of_the_kept_results_balance():
    for record in KEPT:
        rows = record.numbers.get("rows", [record.numbers])
        for row in (row for row in rows if record.numbers["kind"] != "warm"):
            counts = [row[f"{n}_tokens"] for n in ("decoded", "trained", "discarded", "cached")]
            is_over_seeds = record.numbers["kind"] == "simulated"
            for seed in zip(*counts, strict=True) if is_over_seeds else [counts]:
                assert seed[0] == sum(seed[1:])


def test_an_infinite_tolerance_learnt_exactly_what_partial_mode_learnt():
    found = {record.trial: record.numbers for record in KEPT}
    partial, coupled = (
        found[name] for name in ("measured-partial-0", "measured-coupled-tolerance-inf-0")
    )
    for name in ("last_score", "mean_score", "decoded_tokens", "mean_staleness", "updates"):
        assert partial[name] == coupled[name]
