"""What is trained on is not what is evaluated on: splits, and rows that two tasks share."""

import json
from dataclasses import replace

import pytest

from sortedrl.config.data import PeriodicEvaluation
from sortedrl.config.train import TrainSettings
from sortedrl.data.catalogue import open_task, shared_rows
from sortedrl.data.maths import MATHS_SETS
from sortedrl.data.rows import Row
from sortedrl.errors import ConfigError, DataError
from sortedrl.runs.tasks import opened, training_tasks

PUZZLES = "knights_knaves:people=2-3,style=compact"
TEST_ONLY = [name for name, found in MATHS_SETS.items() if "train" not in found.hub_splits]


@pytest.fixture
def folder(tmp_path):
    """The files of gsm8k, math and math500, with a question or two each."""
    files = {
        "gsm8k/train.jsonl": [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in (1, 2)],
        "gsm8k/test.jsonl": [{"question": "3 + 1?", "answer": "#### 4"}],
        "math500/test.jsonl": [{"problem": "x?", "answer": "y", "level": 1, "subject": "z"}],
    }
    for name, rows in files.items():
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "data"


def settings(task, *tasks, folder=None, **evaluation):
    return TrainSettings(
        task=task, folder=folder, evaluation=PeriodicEvaluation(tasks=tasks, **evaluation)
    )


def questions(task):
    return [row.question for row in task.rows]


def written(path, *prompts):
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return str(path)


def test_training_takes_train_and_evaluation_takes_test(folder):
    task, held_out = training_tasks(settings("gsm8k", "gsm8k", "math500", folder=folder))
    assert questions(task) == ["1 + 1?", "2 + 1?"]
    assert [questions(other) for other in held_out] == [["3 + 1?"], ["x?"]]
    task, (other,) = training_tasks(settings(f"{PUZZLES},count=4", f"{PUZZLES},count=3"))
    assert all("train" in row.place for row in task.rows)
    assert all("test" in row.place for row in other.rows)


@pytest.mark.parametrize("name", TEST_ONLY)
def test_a_set_that_has_only_test_rows_is_not_trained_on(name):
    with pytest.raises(ConfigError, match=rf"{name} has none, .* write {name}:split=test"):
        open_task(name, split="train")


def test_a_folder_without_the_split_is_named(folder):
    with pytest.raises(ConfigError, match=r"svamp has none in .*data, .* leave out the folder"):
        open_task("svamp", split="train", folder=folder)


def test_a_set_that_has_only_training_rows_is_not_evaluated_on():
    with pytest.raises(ConfigError, match=r"evaluation uses the split 'test', and math has none"):
        open_task("math", split="test")


def test_who_says_so_trains_on_test_rows_and_is_warned(folder, capsys):
    task, _ = training_tasks(settings("gsm8k:split=test", folder=folder))
    assert questions(task) == ["3 + 1?"]
    assert "warning: gsm8k:split=test trains on the split 'test'" in capsys.readouterr().err
    training_tasks(settings("gsm8k:split=train", "gsm8k:split=test", folder=folder))
    assert "warning" not in capsys.readouterr().err


def test_published_puzzles_are_told_apart_by_the_names_of_their_files(tmp_path):
    for name in ("train", "test-0", "more"):
        (tmp_path / f"{name}.parquet").write_bytes(b"no puzzles")
    for split, first in (("train", "more"), ("test", "more"), (None, "more")):
        with pytest.raises(DataError, match=f"{first}.parquet: not Parquet"):
            open_task(f"logic_rl:path={tmp_path}", split=split)
    (tmp_path / "more.parquet").unlink()
    for split, first in (("train", "train"), ("test", "test-0")):
        with pytest.raises(DataError, match=f"{first}.parquet: not Parquet"):
            open_task(f"logic_rl:path={tmp_path}", split=split)
    (tmp_path / "test-0.parquet").unlink()
    with pytest.raises(
        DataError, match=r"split 'test', found only others such as train.parquet; .* split=train"
    ):
        open_task(f"logic_rl:path={tmp_path}", split="test")


def test_a_data_set_of_the_hub_is_taken_by_its_split(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    reward = open_task("knights_knaves:count=1").reward
    train, test = ([{"prompt": name}] for name in ("train", "test"))
    rows = {"train": datasets.Dataset.from_list(train), "test": datasets.Dataset.from_list(test)}
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "both")
    datasets.DatasetDict({"train": rows["train"]}).save_to_disk(tmp_path / "one")
    for split in ("train", "test"):
        task = open_task(str(tmp_path / "both"), split=split, reward=reward)
        assert [row.prompt for row in task.rows] == [split]
    with pytest.raises(DataError, match=r"split 'test'.* name another split \(split=\.\.\.\)"):
        open_task(str(tmp_path / "one"), split="test", reward=reward)


def test_rows_that_are_trained_on_are_not_evaluated_on(folder, tmp_path):
    shared = r"1 of the 1 rows of gsm8k have the question of a row of gsm8k:split=test \(first: "
    with pytest.raises(ConfigError, match=shared):
        training_tasks(settings("gsm8k:split=test", "gsm8k", folder=folder))
    mine = written(tmp_path / "mine.jsonl", "one", "two", "three")
    given = replace(settings(mine, mine, limit=2), reward="maths")
    with pytest.raises(ConfigError, match=r"2 of the 2 rows .* set evaluation.shared_rows to"):
        training_tasks(given)


def test_copied_rows_are_found_under_other_instructions_and_system_messages(folder, tmp_path):
    for prompt in (
        "3 + 1?",
        "  3 +\n1? ",
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 1?"}],
        [{"role": "user", "content": "3 + 1?"}, {"role": "assistant", "content": "<think>"}],
        open_task("gsm8k", split="test", folder=folder).rows[0].prompt[0]["content"],
    ):
        mine = written(tmp_path / "mine.jsonl", "other", prompt)
        given = replace(settings(mine, "gsm8k", folder=folder), reward="maths")
        with pytest.raises(
            ConfigError, match=r"1 of the 1 rows of gsm8k have the question of a row of "
        ):
            training_tasks(given)
    other = written(tmp_path / "mine.jsonl", "other", "3 + 11?")
    training_tasks(replace(settings(other, "gsm8k", folder=folder), reward="maths"))


def test_puzzles_are_found_under_other_names():
    words, compact = (
        open_task(f"knights_knaves:people=3-4,count=20,style={style}").rows
        for style in ("words", "compact")
    )
    found = shared_rows(words, compact)
    assert found.asked == tuple(range(20))
    assert found.trained == frozenset(range(20))
    # A column that is called so and holds no puzzle does no harm.
    strange = [Row(prompt="a", fields={"statements": "(("}, place="here")]
    assert shared_rows(strange, words).asked == ()


def test_splits_of_generated_puzzles_share_nothing_whatever_their_seeds():
    trained = open_task(f"{PUZZLES},count=200,seed=1", split="train")
    asked = open_task(f"{PUZZLES},count=20,seed=2", split="test")
    assert shared_rows(trained.rows, asked.rows).asked == ()


def test_shared_rows_are_left_out_of_the_training_or_allowed(tmp_path, capsys):
    trained = written(tmp_path / "trained.jsonl", "a", "b", "c", " b", "B")
    asked = written(tmp_path / "asked.jsonl", "b", "d")
    given = replace(settings(trained, asked, shared_rows="leave_out"), reward="maths")
    task, _ = training_tasks(given)
    assert [row.prompt for row in task.rows] == ["a", "c", "B"]
    assert "1 of the 2 rows of" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"every row of .* is evaluated on"):
        training_tasks(replace(given, task=asked))
    allowed = replace(given, evaluation=replace(given.evaluation, shared_rows="allow"))
    assert len(training_tasks(allowed)[0].rows) == 5


def test_a_supervised_run_takes_train_too(folder):
    given = TrainSettings()
    task = opened("gsm8k", split="train", folder=folder, reward=None, data=given.data)
    assert all("response" in row.fields for row in task.rows)
