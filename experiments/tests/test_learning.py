"""The learning tables: curves, rows, sums, settings, and a run that is cut and gone on with."""

import doctest
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import arithmetic, learning, learning_rows
from experiments.__main__ import merged
from experiments.arithmetic import SumSettings, prompt_of, sum_reward, sum_rows, worked
from experiments.curves import ALONG, CurvePoint, curve, mean_score, reached, written_length
from experiments.learning import (
    Arm,
    arm_numbers,
    arms,
    train_settings,
    trials,
    warm_numbers,
    warm_settings,
)
from experiments.learning_rows import (
    Cell,
    arm_rows,
    figures,
    length_table,
    score_table,
    target_key,
    target_table,
)
from experiments.record import Record, Results
from experiments.trials import ROOT, Setup
from sortedrl.config.parsing import read_toml, toml_text
from sortedrl.errors import ConfigError, DataError
from sortedrl.types import Prompt

TABLES = ("learning_logic", "learning_maths")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
SHARES = st.floats(0, 1, allow_subnormal=False)


def point(*, samples, score, length=10.0, seconds=None, trained=None):
    return CurvePoint(
        update=samples,
        samples=samples,
        trained_tokens=7 * samples,
        decoded_tokens=9 * samples,
        seconds=float(samples) if seconds is None else seconds,
        score=score,
        held_out_length=length,
        trained_length=trained,
        reward=None,
        staleness=None,
    )


CURVES = st.lists(st.tuples(st.integers(1, 500), SHARES, st.floats(1, 500)), min_size=1).map(
    lambda steps: [
        point(samples=sum(step for step, _, _ in steps[:place]), score=score, length=length)
        for place, (_, score, length) in enumerate(steps)
    ]
)


# --- what a score took ----------------------------------------------------------------------------


@given(CURVES, SHARES)
def test_a_score_is_reached_exactly_if_some_point_is_that_high(points, target):
    is_high = any(point.score >= target for point in points)
    for along in ALONG:
        assert (reached(points, target, along=along) is not None) == is_high


@given(CURVES, SHARES)
def test_it_is_reached_between_the_first_point_that_high_and_the_one_before(points, target):
    found = reached(points, target, along="samples")
    if found is not None:
        place = next(place for place, point in enumerate(points) if point.score >= target)
        assert points[max(0, place - 1)].samples <= found <= points[place].samples


@given(CURVES, SHARES, SHARES)
def test_a_higher_score_takes_no_less(points, one, other):
    low, high = (reached(points, target, along="samples") for target in sorted((one, other)))
    assert high is None or low <= high


@given(CURVES, st.floats(0.01, 0.99), st.integers(0, 100))
def test_a_point_on_the_line_between_two_changes_nothing(points, share, place):
    whole = [*points, point(samples=points[-1].samples + 8, score=1.0)]
    before, after = whole[place % len(points)], whole[place % len(points) + 1]
    between = replace(
        before,
        seconds=before.seconds + share * (after.seconds - before.seconds),
        score=before.score + share * (after.score - before.score),
    )
    finer = sorted([*whole, between], key=lambda point: point.seconds)
    for target in (0.25, 0.5, 0.9):
        expected = reached(whole, target, along="seconds")
        assert reached(finer, target, along="seconds") == pytest.approx(expected, abs=1e-6)


def test_half_way_up_is_half_way_along():
    points = [point(samples=100, score=0.2), point(samples=300, score=0.6, seconds=80.0)]
    assert reached(points, 0.4, along="samples") == pytest.approx(200)
    assert reached(points, 0.4, along="seconds") == pytest.approx(90)
    assert reached(points, 0.1, along="samples") == 100
    assert reached(points, 0.7, along="samples") is None


@given(CURVES)
def test_means_lie_within_what_they_are_means_of(points):
    scores, lengths = zip(*((p.score, p.held_out_length) for p in points), strict=True)
    assert min(scores) - 1e-9 <= mean_score(points) <= max(scores) + 1e-9
    assert min(lengths) - 1e-6 <= written_length(points) <= max(lengths) + 1e-6


def test_what_is_written_counts_by_the_samples_trained_on():
    points = [
        point(samples=0, score=0, length=10),
        point(samples=300, score=0, length=10),
        point(samples=400, score=0, length=30),
    ]
    assert written_length(points) == pytest.approx((300 * 10 + 100 * 20) / 400)


def test_a_curve_has_its_windows_between_evaluations(tmp_path):
    rows = [{"update": 0, "evaluation/score": 0.25, "evaluation/length": 40.0}]
    for update, (answers, tokens, stale, reward) in enumerate(
        [(10, 100, 0.0, 0.2), (30, 900, 1.0, 0.6), (20, 100, 0.5, 0.5)], start=1
    ):
        rows.append(
            {
                "update": update,
                "total/samples": 100 * update,
                "total/trained_tokens": 1000 * update,
                "total/decoded_tokens": 2000 * update,
                "total/seconds": 1.5 * update,
                "rollout/trajectories": answers,
                "rollout/trained_tokens": tokens,
                "rollout/mean_staleness": stale,
                "reward/mean": reward,
            }
        )
        if update >= 2:
            rows.append(
                {"update": update, "evaluation/score": 0.5, "evaluation/length": 50.0 + update}
            )
    write_lines(tmp_path / "metrics.jsonl", rows)
    first, second, third = curve(tmp_path)
    assert (first.samples, first.seconds, first.trained_length) == (0, 0.0, None)
    assert (second.samples, second.decoded_tokens, second.seconds) == (200, 4000, 3.0)
    assert second.trained_length == pytest.approx(1000 / 40)
    assert second.staleness == pytest.approx(0.9)
    assert second.reward == pytest.approx((10 * 0.2 + 30 * 0.6) / 40)
    assert third.trained_length == pytest.approx(100 / 20)
    assert third.held_out_length == 53.0


def test_a_run_without_a_score_has_no_curve(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"update": 1, "total/samples": 4}])
    with pytest.raises(DataError, match=r"set evaluation\.tasks"):
        curve(tmp_path)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# --- rows and pictures ----------------------------------------------------------------------------

SETTINGS = {
    "algorithms": {"ppo": {}},
    "arms": {"sync": {}, "sorted_coupled": {}, "posthoc": {}},
    "targets": [0.5],
}


def result(arm, seed, *, samples=100.0, bias=1.0, score=0.6):
    taken = {along: samples for along in ALONG}
    curve_rows = [
        {name: getattr(one, name) for name in CurvePoint.__dataclass_fields__}
        for one in (point(samples=0, score=0.2), point(samples=400, score=score, trained=9.0))
    ]
    numbers = {
        "kind": "run",
        "algorithm": "ppo",
        "arm": arm,
        "schedule": arm.replace("_", "/"),
        "seed": seed,
        "length_bias": bias,
        "reached": {"0.5": taken},
        "curve": curve_rows,
        "last_score": score,
    }
    return Record(
        table="t",
        trial=f"{arm}-{seed}",
        command="",
        commit="",
        date="",
        machine={},
        seconds=1.0,
        numbers=numbers,
    )


WARM = replace(result("sync", 0), trial="warm-0", numbers={"kind": "warm", "seed": 0})


def test_ratios_are_taken_seed_by_seed():
    records = [
        WARM,
        result("sorted_coupled", 1, samples=300.0, bias=0.9),
        result("sync", 0, samples=100.0, bias=1.0),
        result("sync", 1, samples=400.0, bias=1.2),
        result("sorted_coupled", 0, samples=50.0, bias=0.9),
    ]
    sync, coupled = arm_rows(records, SETTINGS)
    assert (sync.arm, coupled.arm, coupled.seeds) == ("sync", "sorted_coupled", (0, 1))
    assert sync.cells[target_key(0.5, "samples_ratio")].values == (1.0, 1.0)
    assert coupled.cells[target_key(0.5, "samples_ratio")].values == (0.5, 0.75)
    assert coupled.cells["bias_ratio"].values == pytest.approx((0.9, 0.75))


def test_a_seed_that_never_came_to_a_score_is_told_and_not_counted():
    records = [
        result("sync", 0),
        result("sync", 1, samples=None),
        result("sorted_coupled", 0, samples=None),
        result("sorted_coupled", 1),
    ]
    rows = arm_rows(records, SETTINGS)
    cells = [row.cells[target_key(0.5, "samples")].text(".0f") for row in rows]
    assert cells == ["100 (1 of 2 seeds)", "100 (1 of 2 seeds)"]
    assert rows[1].cells[target_key(0.5, "samples_ratio")].text(".2f") == "not reached"


@given(st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=4))
def test_a_cell_lies_between_the_least_and_the_most_it_names(values):
    cell = Cell(tuple(values))
    if cell.mean is None:
        assert cell.text(".1f") == "not reached"
    else:
        assert min(cell.known) - 1e-6 <= cell.mean <= max(cell.known) + 1e-6


def test_the_tables_have_a_line_for_each_arm_and_as_many_cells_as_titles():
    rows = arm_rows([result("sync", 0), result("posthoc", 0, score=0.75)], SETTINGS)
    for made in (score_table(rows), length_table(rows), target_table(rows, 0.5)):
        lines = made.splitlines()
        assert len({line.count("|") for line in lines}) == 1
        assert [line.split("|")[1].strip() for line in lines[2:]] == ["sync", "posthoc"]
    assert "75.0" in score_table(rows).splitlines()[3]


def test_a_picture_has_a_line_with_a_band_for_each_arm(tmp_path):
    records = [result(arm, seed) for arm in ("sync", "posthoc") for seed in (0, 1)]
    paths = figures(records, SETTINGS, folder=tmp_path / "img", name="maths")
    assert len(paths) == len(set(paths)) == 4
    for path in paths:
        text = path.read_text()
        assert text.startswith("<svg")
        assert {"sync", "posthoc"} <= set(re.findall(r"sync|posthoc|sorted", text))
        assert "mean of 2 seeds" in text


# --- sums -----------------------------------------------------------------------------------------


def dice(row):
    """The numbers that a prompt shows: six letters for each die."""
    places = [
        (LETTERS.index(letter) // 6, LETTERS.index(letter) % 6 + 1) for letter in row["prompt"][:-1]
    ]
    assert [place for place, _ in places] == list(range(len(places)))
    return [number for _, number in places]


def asked(row):
    return Prompt(id=0, fields={"answer": row["answer"]})


@given(st.integers(0, 1000), st.integers(4, 8), st.integers(0, 4))
def test_a_careful_teacher_always_earns_the_reward(seed, low, more):
    settings = SumSettings(count=5, terms=(low, min(8, low + more)), seed=seed)
    for row in sum_rows(settings):
        terms = dice(row)
        assert row["prompt"] == prompt_of(terms)
        assert int(row["answer"][::-1]) == sum(terms)
        assert low <= row["level"] == len(terms)
        assert sum_reward(asked(row), row["response"]) == 1


def test_a_hasty_or_careless_teacher_earns_it_now_and_then():
    for settings in (SumSettings(haste=0.2, count=200), SumSettings(slips=0.02, count=200)):
        rows = sum_rows(settings)
        earned = [sum_reward(asked(row), row["response"]) for row in rows]
        assert 0.2 < sum(earned) / len(earned) < 0.9
    hasty, careful = sum_rows(SumSettings(haste=0.2, count=200)), sum_rows(SumSettings(count=200))
    lengths = [sum(len(row["response"]) for row in rows) for rows in (hasty, careful)]
    assert lengths[0] < lengths[1]


def test_train_and_test_share_no_sum_in_any_order():
    def keys(seed, split):
        rows = sum_rows(SumSettings(count=600, terms=(4, 5), seed=seed, split=split))
        assert len({row["prompt"] for row in rows}) == 600
        return {tuple(sorted(dice(row))) for row in rows}

    assert not (keys(0, "train") | keys(1, "train")) & (keys(0, "test") | keys(1, "test"))
    assert keys(0, "train") == keys(0, "train") != keys(1, "train")


@pytest.mark.parametrize(
    "response",
    [
        "51",
        "<think></think>51",
        "<answer>51</answer>",
        "<think></think><answer>51",
        "<think></think><answer>15</answer>",
        "<think></think><answer>510</answer>",
        "<think></think><answer>51</answer>1",
        "<think></think><answer>51</answer><answer>51</answer>",
    ],
)
def test_an_answer_out_of_form_earns_nothing(response):
    question = Prompt(id=0, fields={"answer": "51"})
    assert sum_reward(question, worked([6, 6, 3], settings=SumSettings())) == 1
    assert sum_reward(question, response) == 0


def test_impossible_sums_are_refused():
    for wrong in ({"terms": (3, 5)}, {"terms": (4, 9)}, {"count": 0}, {"haste": 1.0}):
        with pytest.raises(ConfigError, match=r"sums\."):
            SumSettings(**wrong)


def test_more_sums_than_there_are_end_in_an_error():
    with pytest.raises(ConfigError, match=r"only .* were found"):
        sum_rows(SumSettings(count=400, terms=(4, 4), split="test"))


# --- the settings of the tables -------------------------------------------------------------------


def trial_of(table, tmp_path, *, is_small=False, settings=None):
    if settings is None:
        settings = read_toml(ROOT / "experiments" / f"{table}.toml")
        small = settings.pop("small")
        settings = merged(settings, small) if is_small else settings
    return Setup(
        table=table,
        device="cpu",
        is_small=is_small,
        settings=settings,
        results=Results(tmp_path / "results"),
        scratch=tmp_path / "work" / table,
    )


@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize("table", TABLES)
def test_all_arms_of_a_seed_have_the_same_prompts_and_differ_in_the_schedule_alone(
    table, is_small, tmp_path
):
    setup = trial_of(table, tmp_path, is_small=is_small)
    first = {}
    for arm in arms(setup.settings):
        settings = train_settings(setup, arm, model=Path("warm"))
        assert settings.seed == arm.seed
        plain = replace(settings.schedule, strategy="sync", mode="on_policy", lookahead=0)
        same = replace(settings, out=Path(), schedule=plain)
        assert first.setdefault((arm.algorithm, arm.seed), same) == same
        assert warm_settings(setup, arm.seed).precision == settings.precision == "float32"
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("table", TABLES)
def test_no_trial_name_contains_another(table, tmp_path):
    setup = trial_of(table, tmp_path)
    names = [trial.name for trial in trials(setup)]
    assert not [(one, other) for one in names for other in names if one != other and one in other]
    assert [name for name in names if name.startswith("warm")] == names[
        : len(setup.settings["seeds"])
    ]


@pytest.mark.parametrize("module", [arithmetic, learning, learning_rows])
def test_the_examples_in_the_docstrings_hold(module):
    found = doctest.testmod(module)
    assert (found.failed, found.attempted > 0) == (0, True)


# --- from end to end ------------------------------------------------------------------------------

MINIATURE = {
    "seeds": [3],
    "compiled": True,
    "targets": [0.5],
    "seconds": {"warm": 1, "run": 1},
    "sums": {
        "warm": {"count": 32, "terms": [4, 4], "haste": 0.3},
        "train": {"count": 16, "terms": [4, 4], "seed": 1},
        "test": {"count": 4, "terms": [4, 4], "split": "test"},
    },
    "warm": {
        "model": "tiny:hidden=16,layers=1,heads=2,seed={seed}",
        "task": "{rows}/warm.jsonl",
        "max_steps": 3,
        "batch_tokens": 256,
        "threads": 1,
    },
    "train": {
        "task": "{rows}/train.jsonl",
        "reward": "{root}/experiments/arithmetic.py:sum_reward",
        "threads": 1,
        "schedule": {"group_prompts": 8, "update_batch": 4},
        "engine": {"slots": 4, "max_tokens": 24},
        "optimiser": {"learning_rate": 1e-3},
        "rewards": {"workers": 1},
        "evaluation": {"tasks": ["{rows}/test.jsonl"], "every": 2, "temperature": 1.0},
        "saving": {"every": 1, "keep_last": 1, "keep_best": False, "answers": 0},
    },
    "algorithms": {"reinforce_pp": {"algorithm": {"name": "reinforce_pp"}}},
    "arms": {"sorted_coupled": {"strategy": "sorted", "mode": "coupled", "lookahead": 1}},
}
PIECE = Arm(algorithm="reinforce_pp", name="sorted_coupled", seed=3)


def without_time(numbers):
    """The numbers that two equal runs have in common."""
    timed = ("bubble", "idle_share", "goodput", "throughput", "trained_per_second", "reached")
    kept = {name: value for name, value in numbers.items() if name not in timed}
    kept = {name: value for name, value in kept.items() if "seconds" not in name}
    return {**kept, "curve": [{**point, "seconds": 0} for point in kept["curve"]]}


def test_a_run_that_is_killed_goes_on_and_ends_like_one_that_was_not(tmp_path):
    settings = tmp_path / "miniature.toml"
    settings.write_text(toml_text(MINIATURE))
    words = [sys.executable, "-m", "experiments", "learning_maths", "--device", "cpu"]
    words += ["--settings", str(settings), "--results", str(tmp_path / "results"), "--resume"]
    words += ["--scratch", str(tmp_path / "work"), "--only", PIECE.trial]
    process = subprocess.Popen(words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    setup = trial_of("learning_maths", tmp_path, settings=MINIATURE)
    folder = setup.scratch / PIECE.trial
    metrics = folder / "metrics.jsonl"
    try:
        # The second update is told after the first was saved.
        while process.poll() is None and not (
            metrics.exists() and '"update":2,' in metrics.read_text()
        ):
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (folder / "model").exists(), "it was cut too late"
    resumed = arm_numbers(setup, PIECE)
    assert '"event":"resume"' in (folder / "events.jsonl").read_text()
    folder.rename(tmp_path / "resumed")
    whole = arm_numbers(setup, PIECE)
    assert '"event":"resume"' not in (folder / "events.jsonl").read_text()
    assert without_time(resumed) == without_time(whole)
    assert [point["samples"] for point in whole["curve"]] == sorted(
        point["samples"] for point in whole["curve"]
    )
    assert all(a["update"] < b["update"] for a, b in pairwise(whole["curve"]))
    assert whole["curve"][-1]["samples"] == whole["trajectories"] == 16
    assert warm_numbers(setup, 3)["steps"] == 3


def test_a_warm_start_that_was_interrupted_is_made_again(tmp_path):
    setup = trial_of("learning_maths", tmp_path, settings=MINIATURE)
    assert warm_numbers(setup, 3)["steps"] == 3
    # What a killed one leaves: a run folder with some steps, and no mark that it is done.
    (warm_settings(setup, 3).out / "is_done").unlink()
    assert warm_numbers(setup, 3)["steps"] == 3
