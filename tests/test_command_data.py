"""`sortedrl data` as a person uses it."""

import json
import os
import subprocess
import sys

import pytest

from sortedrl.cli import main


@pytest.fixture
def said(capsys):
    """Runs a command that must go well, and gives what it printed."""

    def run(*words):
        assert main(["data", *words]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys, monkeypatch):
    monkeypatch.delenv("SORTEDRL_DATA", raising=False)

    def run(*words):
        try:
            code = main(["data", *words])
        except SystemExit as error:
            code = error.code
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        return " ".join(err.split())

    return run


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt": f"question {n}", "answer": str(n), "level": 1 + n % 3} for n in range(7)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_tasks_are_listed(said):
    listed = json.loads(said("list", "--json"))
    assert {"knights_knaves", "gsm8k", "reasoning_gym"} <= set(listed)
    assert all(name in said("list") for name in listed)


def test_a_generated_task_is_read_back_as_the_same_rows(said, tmp_path):
    spec, out = "knights_knaves:people=2-3,count=6", tmp_path / "kk.jsonl"
    assert said("generate", spec, "--out", str(out)) == ""
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(written) == 6
    shown = json.loads(said("show", spec, "--count", "6", "--json"))
    key = json.dumps
    assert sorted(map(key, shown)) == sorted(key(row | {"task": spec}) for row in written)
    again = json.loads(said("show", str(out), "--count", "6", "--json"))
    assert [row | {"task": spec} for row in again] == shown


def test_the_rows_shown_come_from_all_levels(said):
    for count in range(1, 8):
        shown = json.loads(
            said("show", "knights_knaves:people=3-5,count=30", "--count", str(count), "--json")
        )
        levels = [row["level"] for row in shown]
        assert len(levels) == count
        assert len(set(levels)) == min(count, 3)


def test_rows_are_shown_as_a_person_reads_them(said, mine):
    shown = said("show", str(mine), "--count", "2")
    assert "prompt: question 0" in shown
    assert "answer: 1" in shown
    assert shown.count("──  ") == 0
    puzzle = said("show", "knights_knaves:people=2-2,count=1")
    assert "(1) " in puzzle
    assert "user:\n" in puzzle
    assert max(map(len, puzzle.splitlines())) <= 100


def test_levels_and_lengths_are_counted(said, mine):
    measured = json.loads(said("stats", str(mine), "--json"))[str(mine)]
    assert measured["rows"] == 7
    assert measured["levels"] == {"1": 3, "2": 2, "3": 2}
    assert measured["prompt_lengths"] == [len("question 0")] * 7
    assert measured["response_lengths"] == []
    drawn = said("stats", str(mine))
    assert "7 rows" in drawn
    assert "prompt length in characters: shortest 10, median 10" in drawn
    bars = [line for line in drawn.splitlines() if "█" in line]
    assert len(bars) == 4


def test_prompts_that_are_too_long_are_counted(said, mine):
    with mine.open("a") as file:
        file.write(json.dumps({"prompt": "a longer question"}) + "\n")
    words = ["stats", str(mine), "--max-prompt-tokens", "12"]
    assert json.loads(said(*words, "--json"))[str(mine)]["too_long"] == 1
    assert "1 prompts are too long" in said(*words)


def test_a_histogram_counts_every_row(said):
    spec = "knights_knaves:people=3-5,count=30"
    measured = json.loads(said("stats", spec, "--json"))[spec]
    drawn = said("stats", spec).split("response length")[1]
    counts = [int(line.split()[3]) for line in drawn.splitlines()[1:] if " to " in line]
    assert sum(counts) == 30 == len(measured["response_lengths"])


def test_the_prompt_that_was_asked_for_is_written(said, tmp_path, capsys):
    path, out = tmp_path / "mine.jsonl", tmp_path / "out.jsonl"
    own = {"question": "right", "prompt": "wrong", "place": "Paris", "task": "mine"}
    path.write_text(json.dumps(own | {"gold": 3}) + "\n")
    words = ["--prompt-field", "question", "--answer-field", "gold"]
    main(["data", "generate", str(path), "--out", str(out), *words])
    assert "the original column prompt is dropped" in capsys.readouterr().err
    written = json.loads(out.read_text())
    assert written == {"prompt": "right", "place": "Paris", "task": "mine", "answer": 3}
    assert json.loads(said("show", str(path), "--json", *words)) == [written]
    assert json.loads(said("show", str(out), "--json")) == [written]


def test_rows_of_others_cannot_write_to_the_terminal(said, tmp_path):
    path = tmp_path / "theirs.jsonl"
    path.write_text(json.dumps({"prompt": "a\x1b[2Jb", "\x1b]0;": "\x07", "level": "\x1b[31m"}))
    for verb in ("show", "stats"):
        assert "\x1b" not in said(verb, str(path))


def test_a_maths_set_is_shown_by_its_training_rows_where_it_has_some(said, tmp_path):
    for split in ("train", "test"):
        rows = {"question": f"{split}?", "answer": "#### 1"}
        (tmp_path / "gsm8k").mkdir(exist_ok=True)
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text(json.dumps(rows))
    assert "train?" in said("show", "gsm8k", "--folder", str(tmp_path))


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl.gz", "rows"])
def test_a_file_of_another_kind_is_called_so(refused, tmp_path, name):
    (tmp_path / name).write_text("a,b")
    assert "must end in .jsonl, .json or .parquet" in refused("show", str(tmp_path / name))


def test_a_file_without_rows_is_refused(refused, tmp_path):
    (tmp_path / "none.jsonl").write_text("\n\n")
    for verb in ("show", "stats"):
        assert "must hold at least one row" in refused(verb, str(tmp_path / "none.jsonl"))


def test_a_file_may_have_a_colon_in_its_name(said, tmp_path):
    (tmp_path / "10:30.jsonl").write_text('{"prompt": "how"}')
    assert "how" in said("show", str(tmp_path / "10:30.jsonl"))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["show"], "give at least one task"),
        (["show", "mine\udcff.jsonl"], "must be valid UTF-8 text"),
        (["show", "knights_knaves:count=1,count=2"], "option count is given twice"),
        (["stats", "knights_knaves:count=1", "--max-prompt-tokens", "0"], "at least 1, got 0"),
        (["show", "knight_knaves"], "did you mean 'knights_knaves'"),
        (["show", "knights_knaves:peple=3-4"], "did you mean 'people'"),
        (["show", "knights_knaves:people=three"], "must be a number, got 'three'"),
        (["show", "knights_knaves:people=1-4"], "in 2..8"),
        (["show", "knights_knaves:people"], "must be written option=value"),
        (["show", "knights_knaves:split=dev"], "must be one of train, test"),
        (["show", "gsm8k:split=dev"], "must be train or test"),
        (["show", "logic_rl"], "needs the path"),
        (["show", "none.jsonl"], "none.jsonl: cannot be read"),
        (["generate", "knights_knaves:count=1"], "--out"),
        (["show", "knights_knaves", "--count", "0"], "count must be at least 1"),
        (["look", "knights_knaves"], "unknown VERB 'look'"),
    ],
)
def test_bad_input_is_refused_with_the_reason(refused, words, reason):
    assert reason in refused(*words)


def test_a_malformed_file_is_refused_with_its_line(refused, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "x"}\n{"question": "y"}\n')
    assert "bad.jsonl:2: unknown column 'prompt'" in refused("show", str(path))


def test_an_encoding_without_the_characters_ends_nothing(mine):
    done = subprocess.run(
        [sys.executable, "-m", "sortedrl", "data", "show", str(mine)],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=300,
        check=True,
    )
    assert b"prompt: question 0" in done.stdout
