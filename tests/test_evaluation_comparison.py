import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation_worlds import answer, chances, sampled, shifted, verdicts
from sortedrl.errors import DataError
from sortedrl.evaluation import statistics as intervals
from sortedrl.evaluation.comparison import compare
from sortedrl.evaluation.statistics import Evaluation


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(intervals, "RESAMPLES", 500)


def together(*evaluations, label="model"):
    return Evaluation(label=label, answers=[a for e in evaluations for a in e.answers])


def compared(world, *, prompts, samples, effect):
    before = chances(f"{world} {prompts}", prompts=prompts)
    after = [shifted(chance, effect) for chance in before]
    return compare(
        verdicts(sampled(f"before {world}", before, samples=samples)),
        verdicts(sampled(f"after {world}", after, samples=samples)),
    ).headline


def share_clear(worlds, *, prompts, samples, effect):
    found = [
        compared(world, prompts=prompts, samples=samples, effect=effect) for world in range(worlds)
    ]
    return sum(difference.is_clear for difference in found) / worlds


@pytest.mark.parametrize(("prompts", "samples"), [(30, 4), (200, 1)])
def test_where_nothing_changed_about_5_of_100_look_changed(prompts, samples):
    assert 0.015 <= share_clear(250, prompts=prompts, samples=samples, effect=0) <= 0.085


def test_larger_changes_are_found_more_often():
    found = [share_clear(60, prompts=100, samples=4, effect=effect) for effect in (0, 0.3, 0.8)]
    assert found[0] < 0.15 < found[1] < 0.9 < found[2]


rows = st.lists(
    st.tuples(
        st.lists(st.booleans(), min_size=1, max_size=4),
        st.lists(st.booleans(), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=10,
)


@given(rows=rows)
@settings(max_examples=60)
def test_the_other_way_round_everything_changes_sides(rows):
    old, new = verdicts([row[0] for row in rows]), verdicts([row[1] for row in rows])
    one, other = compare(old, new).parts[0], compare(new, old).parts[0]
    assert (one.num_better, one.num_worse) == (other.num_worse, other.num_better)
    assert one.num_better + one.num_worse + one.num_equal == len(rows)
    for k, difference in one.passes.items():
        back = other.passes[k]
        assert difference.change.value == pytest.approx(difference.after - difference.before)
        assert difference.change.value == pytest.approx(-back.change.value)
        assert difference.change.low <= difference.change.value <= difference.change.high
        assert (difference.before, difference.after) == (back.after, back.before)


def test_an_evaluation_does_not_differ_from_itself():
    evaluation = verdicts([[1, 0], [0, 0], [1, 1]])
    comparison = compare(evaluation, evaluation)
    assert comparison.headline.change.value == 0
    assert comparison.headline.p_value == pytest.approx(1, abs=0.1)
    assert not comparison.headline.is_clear
    assert comparison.flips == ()


def test_prompts_that_one_was_cut_off_before_are_counted_and_left_out():
    old, new = verdicts([[1], [0], [1], [1]]), verdicts([[0], [1]])
    comparison = compare(old, new)
    (part,) = comparison.parts
    assert part.num_prompts == 2
    assert (part.mean.before, part.mean.after) == (0.5, 0.5)
    assert (comparison.unpaired["sums"].before, comparison.unpaired["sums"].after) == (2, 0)


def test_pass_at_k_is_compared_where_both_have_k_answers():
    old, new = verdicts([[0, 1], [0, 0, 1, 1]]), verdicts([[1, 1, 1, 1], [1, 0, 1]])
    (part,) = compare(old, new).parts
    assert {k: d.change.num_prompts for k, d in part.passes.items()} == {1: 2, 2: 2, 3: 1}
    assert part.passes[3].before == 1


def test_flips_are_prompts_mostly_right_on_one_side_only_largest_first():
    old = verdicts([[0, 0, 1], [1, 1, 1], [0, 0, 0], [1, 1, 0]], levels=["a", "b", "a", "b"])
    new = verdicts([[0, 1, 1], [0, 0, 0], [0, 0, 1], [1, 1, 1]], levels=["a", "b", "a", "b"])
    flips = compare(old, new).flips
    assert [(flip.prompt_id, flip.level, flip.is_gain) for flip in flips] == [
        (1, "b", False),
        (0, "a", True),
    ]
    assert (flips[0].before, flips[0].after) == (1, 0)


def test_tasks_levels_and_the_macro_average_are_compared():
    def evaluation(first, second):
        return together(
            verdicts(first, task="first", levels=["2", "1"]), verdicts(second, task="second")
        )

    comparison = compare(
        evaluation([[0], [0]], [[1]] * 6), evaluation([[1], [0]], [[1]] * 3 + [[0]] * 3)
    )
    names = [(part.task, part.level, part.mean.change.value) for part in comparison.parts]
    assert names == [
        ("first", None, 0.5),
        ("first", "1", 0),
        ("first", "2", 1),
        ("second", None, -0.5),
    ]
    assert comparison.macro[1].change.value == 0
    assert comparison.headline is comparison.macro[1]
    assert [part.task for part in comparison.tasks] == ["first", "second"]


def test_a_task_that_only_one_has_is_left_out():
    both = verdicts([[1]], task="both")
    comparison = compare(both, together(both, verdicts([[1]] * 3, task="alone")))
    assert [part.task for part in comparison.parts] == ["both"]
    assert comparison.unpaired["alone"].after == 3
    assert comparison.macro == {}


@pytest.mark.parametrize(
    ("change", "what"), [({"question": "What is 2?"}, "question"), ({"gold": "7"}, "gold answer")]
)
def test_different_prompts_under_one_id_are_refused(change, what):
    old = Evaluation(label="old", answers=[answer(0), answer(1)])
    new = Evaluation(label="new", answers=[answer(0), answer(1, **change)])
    with pytest.raises(DataError, match=f"old and new, sums prompt 1: .* the {what} "):
        compare(old, new)


def test_evaluations_without_a_common_prompt_are_refused():
    old, new = verdicts([[1]], task="sums"), verdicts([[1]], task="maths")
    with pytest.raises(DataError, match=r"at least one prompt .* sums and maths"):
        compare(old, new)
    with pytest.raises(DataError, match="at least one prompt"):
        compare(Evaluation(label="a", answers=[answer(0)]), Evaluation(label="b", answers=[]))
