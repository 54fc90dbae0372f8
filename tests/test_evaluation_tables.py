import json

import pytest

from evaluation_worlds import verdicts
from sortedrl.evaluation import statistics as intervals
from sortedrl.evaluation.comparison import compare
from sortedrl.evaluation.statistics import Evaluation, summarise
from sortedrl.evaluation.tables import (
    comparison_rows,
    comparison_table,
    pass_table,
    summary_rows,
    summary_table,
)


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(intervals, "RESAMPLES", 400)


def two_tasks(first, second, *, label="model"):
    answers = [
        *verdicts(first, task="first", levels=["1", "2"]).answers,
        *verdicts(second, task="second").answers,
    ]
    return Evaluation(label=label, answers=answers)


OLD = two_tasks([[1, 0], [0, 0]], [[1, 1, 0, 1]] * 3, label="old")
NEW = two_tasks([[1, 1], [0, 0]], [[1, 1, 1, 1]] * 3, label="new")


def test_rows_hold_every_task_level_and_the_average_and_are_json():
    rows = summary_rows(summarise(OLD))
    assert [(row["task"], row["level"]) for row in rows] == [
        ("first", None),
        ("first", "1"),
        ("first", "2"),
        ("second", None),
        ("macro average", None),
    ]
    assert rows[0]["mean"] == 0.25
    assert rows[0]["pass@2"] == 0.5
    assert rows[3]["pass@4"] == 1
    assert rows[4]["mean"] == 0.5
    assert rows[4]["prompts"] is None
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


def test_the_table_has_a_word_for_every_column():
    columns, lines = summary_table(summarise(OLD))
    assert columns[:5] == ["task", "level", "prompts", "mean", "95 % interval"]
    assert columns[5:8] == ["pass@2", "pass@4", "reward"]
    assert all(len(line) == len(columns) for line in lines)
    assert lines[0][:4] == ["first", "", "2", "25.0 %"]
    assert lines[1][1] == "level 1"
    assert lines[-1][3] == "50.0 %"


def test_with_one_number_of_samples_the_mean_is_named_by_it():
    assert summary_table(summarise(verdicts([[1, 0, 1]])))[0][3] == "mean@3"


def test_rows_of_a_comparison_are_json_too():
    rows = comparison_rows(compare(OLD, NEW))
    assert rows[0]["mean_change"] == 0.25
    assert rows[3]["pass@4_change"] == 0
    assert rows[-1]["task"] == "macro average"
    assert rows[-1]["mean_change"] == 0.25
    assert (rows[0]["better"], rows[0]["worse"], rows[0]["equal"]) == (1, 0, 1)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


def test_the_table_of_a_comparison_names_both_models():
    columns, lines = comparison_table(compare(OLD, NEW))
    assert columns[3:6] == ["old", "new", "change"]
    assert all(len(line) == len(columns) for line in lines)
    assert lines[0][3:6] == ["25.0 %", "50.0 %", "+25.0"]


def test_changes_of_pass_at_k_are_told_where_there_are_any():
    columns, lines = pass_table(compare(OLD, NEW))
    assert columns == ["task", "level", "pass@2", "pass@4"]
    assert lines[0][2].startswith("0.0 (\N{MINUS SIGN}")
    assert lines[0][3] == ""
    assert pass_table(compare(verdicts([[1]]), verdicts([[0]])))[1] == []
