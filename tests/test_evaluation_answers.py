import pytest

from evaluation_worlds import answer, verdicts
from sortedrl.errors import DataError
from sortedrl.evaluation.statistics import Asked, Evaluation, by_prompt, in_order


def test_answers_are_grouped_in_the_order_of_prompts_and_samples_whatever_their_own():
    answers = [answer(1, 1), answer(0, 0, task="maths"), answer(1, 0), answer(0, 0)]
    grouped = by_prompt(Evaluation(label="model", answers=answers))
    assert list(grouped) == ["sums", "maths"]
    assert list(grouped["sums"]) == [0, 1]
    assert [a.sample_index for a in grouped["sums"][1]] == [0, 1]


def test_tasks_come_in_the_order_asked_and_only_with_answers():
    answers = [answer(0, task=name) for name in ("a", "b", "c")]
    asked = {name: Asked(prompts=1, samples=1) for name in ("c", "none", "b")}
    evaluation = Evaluation(label="model", answers=answers, asked=asked)
    assert list(by_prompt(evaluation)) == ["c", "b", "a"]


def test_an_answer_that_is_there_twice_is_refused():
    evaluation = Evaluation(label="model", answers=[answer(3, 1), answer(3, 1)])
    with pytest.raises(DataError, match=r"model, sums prompt 3: .* once, got the samples \[1, 1\]"):
        by_prompt(evaluation)


@pytest.mark.parametrize(
    ("change", "what"),
    [({"question": "?"}, "question"), ({"gold": None}, "gold answer"), ({"level": "2"}, "level")],
)
def test_siblings_that_contradict_each_other_are_refused(change, what):
    evaluation = Evaluation(label="model", answers=[answer(0, 0), answer(0, 1, **change)])
    with pytest.raises(DataError, match=f"share one {what}"):
        by_prompt(evaluation)


def test_levels_are_ordered_by_the_numbers_in_their_names():
    assert in_order(["10", "9", "1"]) == ["1", "9", "10"]
    assert in_order(["7 people", "10 people"]) == ["7 people", "10 people"]
    assert in_order(["hard", "easy", "3"]) == ["easy", "hard", "3"]


def test_the_key_of_an_answer_is_its_task_prompt_and_sample():
    assert verdicts([[1, 0]]).answers[1].key == ("sums", 0, 1)
