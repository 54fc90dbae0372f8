r"""The maths sets: small files in the form of each one, and all of the real ones where they are.

SORTEDRL_DATA=FOLDER pytest tests/test_maths_sets.py
"""

import json
import re
from pathlib import Path

import pytest

from sortedrl.data.maths import INSTRUCTION, MATHS_SETS, MathsSettings, maths_examples, maths_rows
from sortedrl.errors import ConfigError, DataError
from sortedrl.rewards.maths import math_reward
from sortedrl.rewards.maths.reading import boxed_answer
from sortedrl.types import Prompt

# For each set: records as its file has them, as the hub has them, and what must come of the first.
GSM8K = {
    "question": "Ann has 1,000 pens and sells half. How many are left?",
    "answer": "1000/2 = <<1000/2=500>>500 sold.\nAnd 580 is <<500+580=1080>>1,080.\n#### 1,080",
}
MATH = {
    "problem": "Find $x$.",
    "solution": r"It is $\boxed{\frac{1}{2}}$.",
    "answer": r"\frac{1}{2}",
    "subject": "Algebra",
    "level": 3,
    "unique_id": "test/algebra/1.json",
}
AIME = {"id": 60, "problem": "Find it.", "solution": r"\framebox{025}", "answer": "025", "url": "-"}
AMC = {"id": 0, "question": "How many?", "answer": 27.0, "url": "-"}
MINERVA = {
    "problem": "How long?",
    "solution": r"It is \boxed{9.6} m.",
    "type": "Physics",
    "idx": 9,
    "answer": ["9.6\n", "9.6", "9.60\n"],
}
OLYMPIAD = {
    "id": 1,
    "subfield": "Algebra",
    "context": None,
    "question": "Find all.",
    "solution": ["..."],
    "final_answer": ["$(1,8,19), (2,7,13)$,$5$"],
    "is_multiple_answer": True,
    "unit": None,
    "answer_type": "Tuple",
    "error": None,
}
SVAMP = {
    "ID": "chal-1",
    "Body": "There are 290 bananas in 2 groups",
    "Question": "How big is a group?",
    "Equation": "( 290.0 / 2.0 )",
    "Answer": 145.0,
    "Type": "Common-Division",
}
ASDIV = {
    "body": "Seven red apples and two green ones are in the basket.",
    "question": "How many apples are there?",
    "solution_type": "Addition",
    "answer": "9 (apples)",
    "formula": "7+2=9",
}
MAWPS = {"input": "Two thirds of one ?", "target": 0.6666666667, "type": "singleop", "idx": 0}

FORMS = {
    "gsm8k": [GSM8K],
    "math": [
        {"problem": "Find $x$.", "answer": r"\frac{1}{2}", "difficulty": 3.0, "type": "Algebra"},
        {**MATH, "level": "Level 3"},
    ],
    "math500": [MATH],
    "aime24": [AIME, {**AIME, "question": AIME["problem"]}],
    "amc23": [AMC, {**AMC, "answer": "27.0"}, {**AMC, "problem": AMC["question"]}],
    "minerva": [MINERVA, {"question": "How long?", "answer": "9.6"}],
    "olympiadbench": [OLYMPIAD],
    "svamp": [SVAMP, {**SVAMP, "Answer": "145"}],
    "asdiv": [ASDIV],
    "mawps": [
        MAWPS,
        {"question": MAWPS["input"], "result": "2/3", "result_float": 0.6666666667, "id": "1"},
    ],
}
GOLDS = {
    "gsm8k": "1080",
    "math": r"\frac{1}{2}",
    "math500": r"\frac{1}{2}",
    "aime24": "25",
    "amc23": "27",
    "minerva": "9.6",
    "olympiadbench": ["(1,8,19)", "(2,7,13)", "5"],
    "svamp": "145",
    "asdiv": "9",
    "mawps": "0.6666666667",
}


def write(folder, name, records, *, split=None):
    """The records in the file of a set; gives its settings."""
    split = split or next(iter(MATHS_SETS[name].files))
    path = folder / MATHS_SETS[name].files[split]
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(records))
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return MathsSettings(name=name, split=split, folder=folder)


def first_row(folder, name, record, **options):
    return maths_rows(write(folder, name, [record], **options))[0]


def test_every_set_has_its_form_here():
    assert FORMS.keys() == GOLDS.keys() == MATHS_SETS.keys()
    for found in MATHS_SETS.values():
        assert found.files.keys() <= found.hub_splits.keys()


@pytest.mark.parametrize("name", sorted(MATHS_SETS))
def test_every_set_gives_a_question_with_an_instruction_and_a_normal_gold(name, tmp_path):
    for record in FORMS[name]:
        row = first_row(tmp_path, name, record)
        (message,) = row.prompt
        assert message["role"] == "user"
        assert message["content"].endswith("\n\n" + INSTRUCTION)
        assert row.fields["answer"] == GOLDS[name]
        assert row.place == f"{tmp_path / next(iter(MATHS_SETS[name].files.values()))}:1"
        assert json.loads(json.dumps(dict(row.fields))) == row.fields


NEEDED = {
    "gsm8k": ["question", "answer"],
    "math": ["problem", "answer", "difficulty", "type"],
    "math500": ["problem", "answer", "subject", "level"],
    "aime24": ["problem", "solution", "answer"],
    "amc23": ["question", "answer"],
    "minerva": ["problem", "answer"],
    "olympiadbench": ["question", "final_answer"],
    "svamp": ["Body", "Question", "Answer", "Type"],
    "asdiv": ["body", "question", "solution_type", "answer"],
    "mawps": ["input", "target"],
}


@pytest.mark.parametrize(("name", "column"), [(n, c) for n in NEEDED for c in NEEDED[n]])
def test_a_record_without_a_column_is_refused_with_its_place(name, column, tmp_path):
    record = FORMS[name][0]
    fewer = {key: value for key, value in record.items() if key != column}
    settings = write(tmp_path, name, [record, fewer])
    with pytest.raises(
        DataError, match=rf":2: must have a column .*`{column}`.*, has {next(iter(fewer))}"
    ):
        maths_rows(settings)


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_no_other_column_is_needed(name, tmp_path):
    record = {column: FORMS[name][0][column] for column in NEEDED[name]}
    assert first_row(tmp_path, name, record).fields["answer"] == GOLDS[name]


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("gsm8k", {"answer": "It is 7."}, "it has no ####"),
        ("gsm8k", {"question": " "}, "`question` must be text"),
        ("math500", {"problem": None}, "`problem` must be text"),
        ("aime24", {"answer": "x"}, "whole number, got 'x'"),
        ("amc23", {"answer": "many"}, "`answer` must be a number, got 'many'"),
        ("minerva", {"answer": []}, "must be text or a list"),
        ("minerva", {"answer": [7]}, "must hold text, got 7"),
        ("olympiadbench", {"final_answer": None}, "must be text or a list"),
        ("olympiadbench", {"error": "small"}, "error must be a number"),
        ("mawps", {"target": None}, "must be a number, got None"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_with_its_place(name, changes, reason, tmp_path):
    record = {**FORMS[name][0], **changes}
    with pytest.raises(DataError, match=r":1: .*" + re.escape(reason)):
        first_row(tmp_path, name, record)


def test_gsm8k_rows_to_train_on_carry_the_worked_solution_with_the_answer_in_a_box(tmp_path):
    row = first_row(tmp_path, "gsm8k", GSM8K, split="train")
    assert row.fields["response"] == (
        "1000/2 = 500 sold.\nAnd 580 is 1,080.\nThe answer is \\boxed{1080}."
    )
    assert "response" not in first_row(tmp_path, "gsm8k", GSM8K, split="test").fields


def test_levels_and_subjects_are_kept(tmp_path):
    assert first_row(tmp_path, "math500", MATH).fields["level"] == 3
    assert first_row(tmp_path, "math", {**MATH, "level": "Level 5"}).fields["level"] == 5
    assert "level" not in first_row(tmp_path, "math", {**MATH, "level": "Level ?"}).fields
    for name, subject in (
        ("math500", "Algebra"),
        ("minerva", "Physics"),
        ("olympiadbench", "Algebra"),
        ("svamp", "Common-Division"),
        ("asdiv", "Addition"),
        ("mawps", "singleop"),
    ):
        assert first_row(tmp_path, name, FORMS[name][0]).fields["subject"] == subject


def test_rows_of_math_that_lost_their_answer_are_left_out(tmp_path):
    lost = [{**MATH, "answer": None}, {**MATH, "answer": ""}]
    assert len(maths_rows(write(tmp_path, "math", [*lost, MATH]))) == 1


def test_other_spellings_of_a_minerva_gold_are_alternatives(tmp_path):
    fields = first_row(tmp_path, "minerva", MINERVA).fields
    assert fields["alternatives"] == ["9.60"]
    assert fields["is_measured"] is True


def test_a_minerva_question_that_tells_earlier_answers_has_its_gold_in_the_solution(tmp_path):
    problem = "First?\n\nFinal answer: The final answer is m. I hope it is correct.\n\nSecond?"
    record = {"problem": problem, "solution": r"$k=\boxed{\frac{37}{4} m}$", "answer": ["m\n"]}
    fields = first_row(tmp_path, "minerva", record).fields
    assert fields["answer"] == r"\frac{37}{4} m"
    assert "alternatives" not in fields


@pytest.mark.parametrize(
    ("written", "gold"),
    [
        ("$2n$", "2n"),
        ("1,3,5", ["1", "3", "5"]),
        (r"$90^{\circ}$,$60^{\circ}$", [r"90^\circ", r"60^\circ"]),
        ("$(2,4)$", "(2,4)"),
        (r"$(-\infty, 0) \cup\{1\}$.", r"(-\infty, 0) \cup\{1\}"),
        ("$f(x)=a x$, where $a$ is whole", "f(x)=a x, where a is whole"),
    ],
)
def test_olympiadbench_golds_come_without_dollars_and_one_by_one(written, gold, tmp_path):
    record = {**OLYMPIAD, "final_answer": [written]}
    assert first_row(tmp_path, "olympiadbench", record).fields["answer"] == gold


def test_olympiadbench_keeps_unit_error_and_context(tmp_path):
    record = {**OLYMPIAD, "unit": "km", "error": "1e-1", "context": "Long ago."}
    row = first_row(tmp_path, "olympiadbench", record)
    assert row.fields["unit"] == "km"
    assert row.fields["error"] == 0.1
    assert row.text.startswith("Long ago.\n\nFind all.")


@pytest.mark.parametrize(
    ("written", "gold", "unit"),
    [
        ("9 (apples)", "9", "apples"),
        ("14  (seats)", "14", "seats"),
        ("-(1/3)", "-(1/3)", None),
        ("3:30 p.m.", "3:30 p.m.", None),
        ("12 (pens); 4 (pads)", ["12", "4"], "pens, pads"),
    ],
)
def test_asdiv_golds_come_without_their_unit(written, gold, unit, tmp_path):
    fields = first_row(tmp_path, "asdiv", {**ASDIV, "answer": written}).fields
    assert fields["answer"] == gold
    assert fields.get("unit") == unit


def test_a_limit_takes_the_first_rows_and_an_instruction_may_be_left_out(tmp_path):
    write(tmp_path, "amc23", [{**AMC, "answer": float(number)} for number in range(5)])
    settings = MathsSettings(name="amc23", folder=tmp_path, limit=2, instruction="")
    rows = maths_rows(settings)
    assert [row.fields["answer"] for row in rows] == ["0", "1"]
    assert rows[0].text == "How many?"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"name": "gsm9k"}, "did you mean 'gsm8k'"),
        ({"name": "math500", "split": "train"}, "math500 must be test, got 'train'"),
        ({"name": "math"}, "math must be train, got 'test'"),
        ({"name": "svamp", "split": "train", "folder": Path()}, "svamp must be test"),
        ({"limit": 0}, "maths.limit must be at least 1, got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        MathsSettings(**options)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gsm8k/test\.jsonl: cannot be read"):
        maths_rows(MathsSettings(name="gsm8k", folder=tmp_path))


@pytest.mark.parametrize("name", sorted(MATHS_SETS))
def test_without_a_folder_a_set_is_read_by_its_hub_name(name, monkeypatch):
    from sortedrl.data.rows import Record

    asked = []

    def read_hub(hub, *, subset, split):
        asked.append((hub, subset, split))
        yield Record(f"{hub}/{split}:1", FORMS[name][-1])

    monkeypatch.setattr("sortedrl.data.maths.read_hub", read_hub)
    found = MATHS_SETS[name]
    for split, there in found.hub_splits.items():
        (row,) = maths_rows(MathsSettings(name=name, split=split))
        assert asked.pop() == (found.hub, found.subset, there)
        assert row.place == f"{found.hub}/{there}:1"


# The real sets.

SIZES = {
    ("gsm8k", "train"): 7473,
    ("gsm8k", "test"): 1319,
    ("math", "train"): 7470,
    ("math500", "test"): 500,
    ("aime24", "test"): 30,
    ("amc23", "test"): 40,
    ("minerva", "test"): 272,
    ("olympiadbench", "test"): 675,
    ("svamp", "test"): 1000,
    ("asdiv", "test"): 2215,
    ("mawps", "test"): 2065,
}


@pytest.mark.parametrize(("name", "split"), SIZES)
def test_every_row_of_the_real_sets_is_read_and_its_gold_is_right(name, split, published_data):
    pytest.importorskip("math_verify", reason="needs math-verify: pip install 'sortedrl[maths]'")
    settings = MathsSettings(name=name, split=split, folder=published_data)
    examples = list(maths_examples(settings))
    assert len(examples) == SIZES[name, split]
    wrong = 0
    for number, (place, found) in enumerate(examples):
        prompt = Prompt(id=number, fields={"answer": found.answer, **found.fields})
        gold = found.answer if isinstance(found.answer, str) else ", ".join(found.answer)
        assert math_reward(prompt, rf"\boxed{{{gold}}}")["correct"] == 1.0, place
        if found.solution is not None and boxed_answer(found.solution):
            wrong += math_reward(prompt, found.solution)["correct"] == 0.0
    # Eight golds of Minerva correct what is boxed in the solution, or say it in another language.
    assert wrong == (8 if name == "minerva" else 0)
