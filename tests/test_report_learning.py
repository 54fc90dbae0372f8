import re
from functools import cache

import pytest

from report_worlds import NASTY
from sortedrl.compare import simulate
from sortedrl.report.record import RunRecord, measured
from sortedrl.report.sections import learning
from sortedrl.simulate.presets import PRESETS


@cache
def events():
    found = []
    simulate(PRESETS["picture"](), record=found.append)
    return tuple(found)


def run(name, scores, *, seed=None, answers=100, seconds=10.0, **numbers):
    """A run that is evaluated before its first update and after each."""
    rows = [{"update": 0, "evaluation/score": scores[0]}] if scores else []
    for update, score in enumerate(scores[1:], start=1):
        totals = {
            "total/samples": answers * update,
            "total/trained_tokens": 7 * answers * update,
            "total/seconds": seconds * update,
        }
        told = {key.replace("_", "/", 1): value for key, value in numbers.items()}
        rows.append({"update": update, **totals, **told})
        rows.append({"update": update, "evaluation/score": score})
    config = None if seed is None else {"seed": seed, "out": name}
    return measured(RunRecord(name=name, events=events(), rows=rows, config=config))


def table(text):
    """The rows of the only table, with the name first."""
    return [
        re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)
        for row in re.findall(r"<tr>(.*?)</tr>", text, flags=re.DOTALL)[1:]
    ]


def titles(text):
    return re.findall(r'<text class="title"[^>]*>(.*?)</text>', text)


def test_scores_are_drawn_by_answers_by_tokens_and_by_seconds():
    text = learning.learning_section([run("a", [0.2, 0.5])])
    assert titles(text) == [
        "Accuracy on held-out prompts, by answers trained on",
        "Accuracy on held-out prompts, by tokens trained on",
        "Accuracy on held-out prompts, by seconds of training",
    ]
    for place in ("100", "700", "10"):
        assert f"a: accuracy 50.0 % at {place}</title>" in text
    assert 'class="series0 band"' not in text
    assert "one sample" in text
    assert "mean of" not in text


def test_runs_that_differ_only_in_the_seed_are_one_line_with_a_band():
    text = learning.learning_section(
        [run("mine0", [0.2, 0.4], seed=0), run("mine1", [0.2, 0.6], seed=1)]
    )
    assert "mine (mean of 2 seeds)" in text
    assert 'class="series0 band"' in text
    assert "mine: accuracy 50.0 % (40.0 % to 60.0 %) at 100</title>" in text
    assert "one sample" not in text
    assert "differ only in the seed" in text
    assert "series1" not in text


def test_numbers_of_updates_are_drawn_where_there_are_any():
    text = learning.learning_section([run("a", [0.2, 0.5], reward_mean=0.5)])
    assert titles(text)[3:] == ["Mean reward of the answers of an update"]
    assert "<details" not in text
    text = learning.learning_section([run("a", [0.2, 0.5], correction_ess=0.5, entropy_mean=0.1)])
    folded = text[text.index("<details") :]
    assert titles(folded) == ["Effective sample size of an update", "Mean entropy of a token"]
    assert "a: effective sample size 50.0 % at 1</title>" in folded


def test_the_table_says_what_each_needed_for_the_best_score_that_all_reached():
    runs = [
        run("quick", [0.2, 0.6, 0.8], answers=100, seconds=10),
        run("slow", [0.2, 0.4, 0.5, 0.6], answers=200, seconds=40),
    ]
    text = learning.learning_section(runs).replace("\N{NO-BREAK SPACE}", " ")
    assert "The highest accuracy that all runs reached is 60.0 %." in text
    assert "averaged over seeds" not in text
    assert table(text) == [["quick", "100", "700", "10"], ["slow", "600", "4,200", "120"]]


def test_a_run_that_gained_nothing_does_not_lower_the_score_and_may_not_reach_it():
    runs = [
        run("good", [0.2, 0.6]),
        run("fair", [0.2, 0.5]),
        run("flat", [0.2, 0.1]),
        run("unmeasured", []),
    ]
    text = learning.learning_section(runs).replace("\N{NO-BREAK SPACE}", " ")
    assert "The highest accuracy that all runs that improved reached is 50.0 %." in text
    assert [row[1] for row in table(text)] == ["100", "100", "not reached", "not reached"]


def test_seeds_of_a_group_reach_a_score_on_average():
    runs = [
        run("mine0", [0.0, 0.2, 0.8], seed=0, seconds=10),
        run("mine1", [0.0, 0.6, 0.6], seed=1, seconds=30),
        run("other", [0.0, 0.5, 0.4]),
    ]
    text = learning.learning_section(runs)
    assert "averaged over seeds" in text
    assert table(text) == [["mine", "200", "1,400", "40"], ["other", "100", "700", "10"]]


@pytest.mark.parametrize("scores", [[], [0.5], [0.5, 0.4]])
def test_one_that_learned_alone_has_no_table(scores):
    assert "<table" not in learning.learning_section([run("a", [0.2, 0.5]), run("b", scores)])


def test_there_is_no_section_where_nothing_was_measured():
    assert learning.learning_section([run("a", [])]) == ""


def test_rewards_are_shown_where_nothing_was_evaluated():
    rows = [{"update": 1, "reward/mean": 0.25}]
    bare = measured(RunRecord(name="a", events=events(), rows=rows))
    assert titles(learning.learning_section([bare])) == ["Mean reward of the answers of an update"]


def test_names_are_text_never_markup():
    runs = [run(NASTY, [0.1, 0.2], reward_mean=1.0), run(NASTY + "b", [0.1, 0.3])]
    text = learning.learning_section(runs)
    assert "<script" not in text
    assert "</style" not in text
