import json
import math
from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation_worlds import answer
from sortedrl.errors import DataError
from sortedrl.evaluation import statistics as intervals
from sortedrl.evaluation.results import SAMPLES, SUMMARY, ResultsWriter, read_results
from sortedrl.evaluation.statistics import Answer, Asked, summarise
from sortedrl.evaluation.tables import summary_rows

ASKED = {"sums": Asked(prompts=3, samples=2)}
SETTINGS = {"temperature": 0.6, "seed": 0}


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(intervals, "RESAMPLES", 400)


def opened(folder, *, resume=False, **changes):
    given = {"label": "model", "settings": SETTINGS, "asked": ASKED} | changes
    return ResultsWriter(folder, resume=resume, **given)


def filled(folder, answers):
    with opened(folder) as writer:
        for one in answers:
            writer.append(one)
    return folder / SAMPLES


texts = st.text(st.characters(), max_size=20)
numbers = st.floats(allow_nan=False, allow_infinity=False)
answers = st.builds(
    Answer,
    task=texts,
    prompt_id=st.integers(0, 5),
    sample_index=st.integers(0, 5),
    level=st.none() | texts,
    question=texts,
    gold=st.none() | texts,
    response=texts | st.just("\u2028\x85\r\n\x00\ud800"),
    reward=st.none() | numbers,
    parts=st.dictionaries(texts, numbers, max_size=3),
    is_correct=st.booleans(),
    num_tokens=st.integers(0, 10**6),
    finish_reason=st.sampled_from(["stop", "length"]),
    failure=st.sampled_from([None, "timeout", "memory", "died"]),
)


@given(answers=st.lists(answers, max_size=6, unique_by=lambda a: a.key))
@settings(max_examples=60)
def test_what_is_appended_comes_back_exactly(answers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    filled(folder, answers)
    evaluation = read_results(folder)
    assert list(evaluation.answers) == answers
    assert (evaluation.label, evaluation.settings, evaluation.asked) == ("model", SETTINGS, ASKED)


def test_a_run_cut_off_at_any_byte_keeps_its_complete_answers_and_can_go_on(tmp_path):
    written = [answer(0, 0), answer(0, 1, response="é 長 \\ \"'\n")]
    path = filled(tmp_path, written)
    whole = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        complete = sum(end <= length for end in ends)
        assert list(read_results(tmp_path).answers) == written[:complete]
        with opened(tmp_path, resume=True) as writer:
            assert writer.num_done == complete
            for one in written:
                if not writer.is_done(one.key):
                    writer.append(one)
        assert path.read_bytes() == whole


def test_answers_are_on_the_disk_as_soon_as_they_are_appended(tmp_path):
    writer = opened(tmp_path)
    writer.append(answer(0, 0))
    assert len(read_results(tmp_path).answers) == 1
    writer.close()


def test_the_numbers_are_in_the_summary_at_the_end(tmp_path):
    writer = opened(tmp_path)
    assert json.loads((tmp_path / SUMMARY).read_text())["estimates"] is None
    for sample in range(2):
        writer.append(answer(0, sample, is_correct=True))
    evaluation = writer.finish()
    content = json.loads((tmp_path / SUMMARY).read_text())
    assert content["label"] == "model"
    assert content["settings"] == SETTINGS
    assert content["estimates"][0]["mean"] == 1
    assert content["estimates"][0]["missing"] == 2
    assert evaluation == read_results(tmp_path)
    assert content["estimates"] == summary_rows(summarise(evaluation))
    assert sorted(path.name for path in tmp_path.iterdir()) == [SAMPLES, SUMMARY]


def test_a_folder_with_answers_is_not_overwritten(tmp_path):
    filled(tmp_path, [answer(0, 0)])
    with pytest.raises(DataError, match="already holds 1 answers; resume it \\(--resume\\)"):
        opened(tmp_path)
    assert len(read_results(tmp_path).answers) == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"label": "other"}, "model was 'model' and is 'other'"),
        ({"settings": SETTINGS | {"seed": 1}}, "seed was 0 and is 1"),
        ({"settings": SETTINGS | {"top_p": 0.9}}, "top_p was None and is 0.9"),
    ],
)
def test_answers_of_different_models_or_settings_are_not_mixed(tmp_path, changes, told):
    filled(tmp_path, [answer(0, 0)])
    with pytest.raises(DataError, match=told):
        opened(tmp_path, resume=True, **changes)


def test_more_may_be_asked_when_a_run_is_resumed(tmp_path):
    filled(tmp_path, [answer(0, 0)])
    asked = {"sums": Asked(prompts=5, samples=4), "maths": Asked(prompts=1, samples=1)}
    opened(tmp_path, resume=True, asked=asked).close()
    assert read_results(tmp_path).asked == asked


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (
            {"sums": Asked(prompts=3, samples=1)},
            "for 2 samples of sums, more than the 1 of this evaluation",
        ),
        (
            {"sums": Asked(prompts=1, samples=2)},
            "for 2 rows of sums, more than the 1 of this evaluation",
        ),
        (
            {"maths": Asked(prompts=3, samples=2)},
            "2 answers to the task sums, which this evaluation does not",
        ),
    ],
)
def test_less_cannot_be_asked_when_a_run_is_resumed(tmp_path, asked, told):
    filled(tmp_path, [answer(0, 1), answer(1, 0)])
    before = (tmp_path / SUMMARY).read_bytes()
    with pytest.raises(DataError, match=told):
        opened(tmp_path, resume=True, asked=asked)
    assert (tmp_path / SUMMARY).read_bytes() == before


def test_answers_to_other_rows_are_not_mixed(tmp_path):
    one = answer(1, 0)
    filled(tmp_path, [one])
    same = [("?", None), (one.question, one.gold), ("?", None)]
    opened(tmp_path, resume=True, questions={"sums": same}).close()
    for question, gold in ((one.question, "another"), ("another", one.gold)):
        others = [same[0], (question, gold), same[2]]
        with pytest.raises(DataError, match=r"of row 2 was .* and is 'another'"):
            opened(tmp_path, resume=True, questions={"sums": others})


def test_settings_that_json_has_no_form_for_are_told_in_words(tmp_path):
    settings = {"path": tmp_path, "sizes": (1, 2)}
    opened(tmp_path, settings=settings).close()
    expected = {"path": str(tmp_path), "sizes": [1, 2]}
    assert read_results(tmp_path).settings == expected
    with pytest.raises(DataError, match="settings must be JSON"):
        opened(tmp_path, settings={"temperature": math.inf})


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_number_that_json_does_not_have_is_never_written(tmp_path, reward):
    writer = opened(tmp_path)
    with pytest.raises(DataError, match="cannot be written as JSON"):
        writer.append(answer(0, 0, reward=reward))
    writer.close()
    assert (tmp_path / SAMPLES).read_text() == ""


def test_an_answer_is_written_once(tmp_path):
    writer = opened(tmp_path)
    writer.append(answer(0, 0))
    with pytest.raises(DataError, match="already exists"):
        writer.append(answer(0, 0))
    writer.close()


GOOD = {
    "task": "sums",
    "prompt_id": 1,
    "sample_index": 0,
    "level": None,
    "question": "?",
    "gold": None,
    "response": "",
    "reward": 1.0,
    "parts": {},
    "is_correct": True,
    "num_tokens": 3,
    "finish_reason": "stop",
    "failure": None,
}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting property name"),
        ("", "Expecting value"),
        ("[]", "expected a JSON object"),
        (json.dumps(GOOD | {"rewards": 1}), "unknown field 'rewards'; did you mean 'reward'"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "gold"}), "must have the field 'gold'"),
        (json.dumps(GOOD | {"prompt_id": -1}), "prompt_id must be a whole number of at least 0"),
        (json.dumps(GOOD | {"num_tokens": True}), "num_tokens must be a whole number"),
        (json.dumps(GOOD | {"response": None}), "response must be a text"),
        (json.dumps(GOOD | {"level": 3}), "level must be a text or null"),
        (json.dumps(GOOD | {"is_correct": 1}), "is_correct must be true or false"),
        (json.dumps(GOOD | {"parts": {"a": "b"}}), "parts must be named numbers"),
        (json.dumps(GOOD | {"failure": "lost"}), "failure must be one of timeout"),
        (json.dumps(GOOD | {"finish_reason": None}), "finish_reason must be one of stop, length"),
        (json.dumps(GOOD | {"reward": math.nan}), "numbers must be finite, got NaN"),
        (json.dumps(GOOD).replace("1.0", "1e999"), "reward must be a number or null, got inf"),
        (json.dumps(GOOD | {"prompt_id": 0}), "is already in line 1"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_malformed_line_is_refused_with_file_line_and_reason(tmp_path, line, reason):
    path = filled(tmp_path, [answer(0, 0)])
    with path.open("a") as file:
        file.write(line + "\n" + json.dumps(GOOD | {"prompt_id": 9}) + "\n")
    with pytest.raises(DataError) as error:
        read_results(tmp_path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert reason in str(error.value)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = filled(tmp_path, [answer(0, 0)])
    path.write_bytes(b'"\xff"\n')
    with pytest.raises(DataError, match=r"samples.jsonl:1: not UTF-8 text"):
        read_results(tmp_path)


def test_without_a_summary_the_folder_names_the_evaluation(tmp_path):
    filled(tmp_path / "run", [answer(0, 0)])
    (tmp_path / "run" / SUMMARY).unlink()
    evaluation = read_results(tmp_path / "run")
    assert (evaluation.label, evaluation.asked) == ("run", {})


@pytest.mark.parametrize("content", ["", "[]", '{"label": 3, "settings": {}, "asked": {}}', "{}"])
def test_a_damaged_summary_is_refused(tmp_path, content):
    filled(tmp_path, [answer(0, 0)])
    (tmp_path / SUMMARY).write_text(content)
    with pytest.raises(DataError, match=r"summary.json: not the summary of an evaluation"):
        read_results(tmp_path)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", [SUMMARY, SAMPLES])
@pytest.mark.parametrize("content", ['{"mine": 1}', "x", '{\n  "labels": 3\n}\n'])
def test_files_of_others_by_our_names_are_left_alone(tmp_path, name, content, resume):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=rf"{name}: is a file that .* not replaced"):
        opened(tmp_path, resume=resume)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, content)]


def test_a_folder_without_answers_is_named(tmp_path):
    with pytest.raises(DataError, match=r"absent: .* must have samples.jsonl"):
        read_results(tmp_path / "absent")


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        opened(tmp_path / "file")


def test_parts_of_any_mapping_type_are_written(tmp_path):
    one = replace(answer(0, 0), parts=MappingProxyType({"format": 1.0}))
    filled(tmp_path, [one])
    assert read_results(tmp_path).answers[0].parts == {"format": 1.0}
