"""The harness of the experiments: trials are done once, whole, within the time there is."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.__main__ import chosen, main
from experiments.bench_world import BenchWorld, Workload
from experiments.efficiency import trials as efficiency_trials
from experiments.record import Results
from experiments.trials import Deadline, Setup, Trial, assigned, merged, run_at_once, run_in_turn
from sortedrl.config.parsing import read_toml
from sortedrl.config.schedule import Schedule
from sortedrl.errors import ConfigError, DataError
from sortedrl.runs.folder import commit

ROOT = Path(__file__).parents[2]
SMALLEST = (
    "workload.slots=4",
    "workload.group=8",
    "workload.batch=4",
    "workload.max_tokens=24",
    "workload.median=6",
)


def setup(folder, **given):
    return Setup(
        table="table",
        device="cpu",
        is_small=True,
        settings={},
        results=Results(folder / "results"),
        scratch=folder / "work",
        **given,
    )


def trial(name, *, seconds=1.0, run=lambda: {"value": 1}):
    return Trial(name=name, seconds=seconds, run=run)


def broken():
    raise ZeroDivisionError


def silent(line):
    pass


def test_a_trial_that_fails_leaves_no_result_and_those_before_it_stay(tmp_path):
    where = setup(tmp_path)
    with pytest.raises(ZeroDivisionError):
        run_in_turn(
            [trial("first"), trial("second", run=broken), trial("third")],
            where,
            deadline=Deadline.after(None),
            tell=silent,
        )
    assert [record.trial for record in where.results.read("table")] == ["first"]


def test_a_trial_that_would_not_end_in_time_is_skipped_and_a_shorter_one_is_measured(tmp_path):
    where = setup(tmp_path)
    left = run_in_turn(
        [trial("long", seconds=1e6), trial("short")],
        where,
        deadline=Deadline.after(60.0),
        tell=silent,
    )
    assert left == ["long"]
    assert [record.trial for record in where.results.read("table")] == ["short"]


def test_the_first_trial_of_a_model_needs_time_to_open_it_whichever_it_is(tmp_path):
    where = setup(tmp_path)
    shared = [
        replace(trial(name, seconds=seconds), opens="model", opening_seconds=50.0)
        for name, seconds in (("long", 20.0), ("first", 5.0), ("second", 40.0))
    ]
    left = run_in_turn(shared, where, deadline=Deadline.after(60.0), tell=silent)
    assert left == ["long"]
    assert {r.trial for r in where.results.read("table")} == {"first", "second"}


def test_a_result_tells_how_to_measure_it_again(tmp_path):
    changes = ("workload.seed=1", "models.m.source=/some/where")
    where = setup(tmp_path, changes=changes, commit="abc1234")
    run_in_turn([trial("one")], where, deadline=Deadline.after(None), tell=silent)
    (record,) = where.results.read("table")
    assert (
        record.command == "python -m experiments table --device cpu --small --set workload.seed=1"
    )
    assert record.commit == "abc1234"
    assert record.numbers == {"value": 1}
    assert record.machine["cores"]


def test_a_copy_with_another_history_is_told_its_commit(monkeypatch, tmp_path):
    monkeypatch.setenv("SORTEDRL_COMMIT", "abc1234")
    assert commit(ROOT) == "abc1234"
    monkeypatch.delenv("SORTEDRL_COMMIT")
    assert commit(tmp_path) is None


def test_parallel_trials_each_have_a_process_and_a_failed_one_is_named_at_the_end(tmp_path):
    where = setup(tmp_path)
    code = {"good": "0", "bad": "7"}

    def command(name):
        mark = tmp_path / name
        return [sys.executable, "-c", f"open({str(mark)!r}, 'w'); raise SystemExit({code[name]})"]

    with pytest.raises(RuntimeError, match=r"bad failed: see .*bad\.log"):
        run_at_once(
            [trial("bad"), trial("good")],
            where,
            most=1,
            command=command,
            deadline=Deadline.after(None),
            tell=silent,
        )
    assert (tmp_path / "good").exists()
    assert (tmp_path / "bad").exists()


def test_a_broken_result_file_is_named(tmp_path):
    results = Results(tmp_path)
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "one.json").write_text("{")
    with pytest.raises(DataError, match=r"one\.json"):
        results.read("table")


def test_a_word_that_is_a_whole_name_selects_only_that_trial():
    trials = [trial("sorted-partial"), trial("sorted-partial-1"), trial("sync")]
    assert [p.name for p in chosen(trials, ["sorted-partial"])] == ["sorted-partial"]
    assert [p.name for p in chosen(trials, ["partial"])] == ["sorted-partial", "sorted-partial-1"]
    assert len(chosen(trials, [])) == 3
    with pytest.raises(ConfigError, match="see --list"):
        chosen(trials, ["nothing"])


def test_assignments_are_laid_over_the_settings():
    whole = {"workload": {"seed": 0, "slots": 8}, "seeds": [0]}
    assert merged(whole, assigned("workload.seed=1"))["workload"] == {"seed": 1, "slots": 8}
    assert merged(whole, assigned("seeds=[0, 1]"))["seeds"] == [0, 1]
    assert assigned("model=runs/warm") == {"model": "runs/warm"}
    with pytest.raises(ConfigError, match="name=value"):
        assigned("workload.seed")


def test_an_unknown_table_is_refused_with_the_nearest_name(capsys):
    assert main(["eficiency"]) == 1
    assert "efficiency" in capsys.readouterr().err


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A smallest efficiency table: its folder."""
    folder = tmp_path_factory.mktemp("experiments")
    assert main(["efficiency", *arguments(folder)]) == 0
    return folder


def arguments(folder, *more):
    words = ["--device", "cpu", "--small", "--results", str(folder / "results")]
    words += ["--scratch", str(folder / "work"), "--set", *SMALLEST]
    return [*words, *more, "--only", "tiny--sync", "tiny--sorted-coupled", "tiny--sorted-on_policy"]


def test_every_run_of_the_efficiency_table_balances_its_ledger(measured):
    records = Results(measured / "results").read("efficiency")
    assert len(records) == 3
    for record in records:
        run = record.numbers["run"]
        assert run["decoded_tokens"] == run["trained_tokens"] + run["discarded_tokens"]
        assert run["trajectories"] == record.numbers["arm"]["groups"] * 8


def test_forced_lengths_are_biased_where_answers_are_redrawn_and_nowhere_else(measured):
    records = Results(measured / "results").read("efficiency")
    bias = {record.numbers["schedule"]: record.numbers["length_bias"] for record in records}
    assert bias["sync"] == bias["sorted/coupled"] == 1
    assert bias["sorted/on_policy"] != 1


def test_8b_in_small_trains_whole_and_with_adapters_and_is_compared_with_sync(tmp_path):
    words = ["--device", "cpu", "--small", "--results", str(tmp_path / "results")]
    words += ["--scratch", str(tmp_path / "work"), "--set", "workload.max_tokens=16"]
    assert main(["eight_billion", *words, "--only", "sync", "sorted-coupled", "lora"]) == 0
    records = {r.trial: r.numbers for r in Results(tmp_path / "results").read("eight_billion")}
    assert set(records) == {"sync", "sorted-coupled", "sorted-partial-1-lora-16"}
    assert records["sync"]["ratio_to_sync"] == 1
    for numbers in records.values():
        assert numbers["run"]["trajectories"] == 32 * numbers["arm"]["groups"]
        assert numbers["run"]["updates"] >= numbers["arm"]["groups"]
        assert numbers["update_tokens_per_second"] > 0
        assert numbers["ratio_to_sync_with_updates"] > 0
        assert set(numbers["memory"]) == {"peak_gib", "reserved_gib"}


@pytest.mark.parametrize("restores", [True, False])
def test_every_run_of_a_world_really_changes_the_weights(tmp_path, restores):
    """An optimiser of the run before must not take the gradients."""
    settings = read_toml(ROOT / "experiments" / "eight_billion.toml")["small"]
    known = {n: v for n, v in settings["workload"].items() if n != "tolerance"}
    workload = Workload(
        **known, precision="bfloat16", sigma=1.2, learning_rate=0.01, restores=restores
    )
    world = BenchWorld.opened(settings["model"], workload, device="cpu")
    schedule = Schedule(strategy="sync", mode="on_policy", group_prompts=8, update_batch=8)
    weight = next(world._model.parameters())
    first = weight.detach().clone()
    for number in range(3):
        begun = first if restores else weight.detach().clone()
        world.run(schedule, groups=1, events=tmp_path / f"{number}.jsonl")
        assert not weight.equal(begun)


def test_results_are_not_measured_twice_and_not_overwritten(measured, capsys):
    before = {path: path.read_bytes() for path in (measured / "results").rglob("*.json")}
    assert main(["efficiency", *arguments(measured)]) == 1
    assert "--resume" in capsys.readouterr().err
    assert main(["efficiency", *arguments(measured, "--resume")]) == 0
    assert {path: path.read_bytes() for path in (measured / "results").rglob("*.json")} == before


def test_the_simulator_is_fitted_to_a_run_and_predicts_the_others(measured, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(measured, folder)
    words = ["--results", str(folder / "results"), "--scratch", str(folder / "work")]
    assert main(["prediction", "--device", "cpu", *words]) == 0
    (record,) = Results(folder / "results").read("prediction")
    rows = {row["schedule"]: row for row in record.numbers["rows"]}
    assert set(rows) == {"sync", "sorted/coupled", "sorted/on_policy"}
    # The number of updates and of trained answers follows from the schedule alone.
    sync = rows["sync"]
    assert sync["predicted"]["trained_tokens"] == sync["measured"]["trained_tokens"]


def test_the_budget_of_an_arm_grows_with_its_groups():
    settings = read_toml(ROOT / "experiments" / "efficiency.toml")
    where = Setup(
        table="efficiency",
        device="cuda",
        is_small=False,
        settings=settings,
        results=Results(ROOT),
        scratch=ROOT,
    )
    seconds = {trial.name: trial.seconds for trial in efficiency_trials(where)}
    assert len(seconds) == 2 * len(settings["arms"]) == 28
    name = "smollm2-135m--sorted-partial"
    assert seconds[name] < seconds[f"{name}-1"] < seconds[f"{name}-2"]


def test_no_result_names_a_place_on_somebodys_machine():
    for path in (ROOT / "experiments" / "results").rglob("*.json"):
        text = json.dumps(json.loads(path.read_text())["command"])
        assert "/" not in text.replace("./", ""), path
