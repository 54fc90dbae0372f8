import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from report_worlds import any_runs, check_pictures, drawn, run_of, tree, whole_runs, words
from sortedrl.events import Update
from sortedrl.report.sections import tokens as tokens_module
from sortedrl.report.sections.tokens import (
    MAX_COLUMNS,
    Column,
    HeatMap,
    heat_maps,
    staleness_columns,
    staleness_section,
    staleness_text,
)


@given(any_runs)
def test_columns_hold_every_answer_at_the_staleness_of_its_oldest_token(run):
    drawn_columns = staleness_columns(run)
    figures = run.metrics.run
    answers = sum(sum(column.answers) for column in drawn_columns)
    oldest = sum(
        value * count for column in drawn_columns for value, count in enumerate(column.answers)
    )
    assert answers == figures.trajectories
    assert oldest == figures.trajectory_staleness_sum
    most = max((len(column.answers) - 1 for column in drawn_columns if column.answers), default=0)
    assert most == figures.staleness_max


@given(run=any_runs, most=st.integers(1, 6))
def test_means_of_columns_weighted_by_tokens_are_the_mean_of_the_run(run, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens_module, "MAX_COLUMNS", most)
        drawn_columns = staleness_columns(run)
    assert len(drawn_columns) <= most
    updates = [event for event in run.record.events if isinstance(event, Update)]
    assert [n for c in drawn_columns for n in range(c.first, c.last + 1)] == [
        *range(1, len(updates) + 1)
    ]
    total = 0.0
    for column in drawn_columns:
        part = updates[column.first - 1 : column.last]
        total += column.mean * sum(answer.tokens for update in part for answer in update.trained)
    tokens = run.metrics.run.ledger.trained or 1
    assert total / tokens == pytest.approx(run.metrics.run.mean_staleness)


@given(whole_runs)
def test_shares_of_a_column_add_up_to_all_its_answers(run):
    assume(run.metrics.run.staleness_max)
    page = staleness_section([run])
    shares: dict[str, int] = {}
    wholes: dict[str, int] = {}
    for _, told in drawn(page, "rect"):
        if found := re.match(
            r"(updates? [\d, to]+), staleness .* ([\d,]+) of ([\d,]+)$", told or ""
        ):
            shares[found[1]] = shares.get(found[1], 0) + int(found[2])
            wholes[found[1]] = int(found[3])
    assert shares == wholes
    assert sum(wholes.values()) == run.metrics.run.trajectories


@given(any_runs)
def test_the_mean_and_the_most_are_those_of_the_meter(run):
    figures = run.metrics.run
    told = staleness_text(run)
    if not figures.trajectories:
        assert told == "nothing was trained on yet."
    elif figures.staleness_max == 0:
        assert told == "every token was trained on by the weights that generated it."
    else:
        assert f"{figures.mean_staleness:.2f} updates old on average" in told
        assert f", {figures.staleness_max:,} at most" in told
        assert f"{figures.mean_trajectory_staleness:.2f} on average" in told


@pytest.mark.parametrize("schedule", ["sync", "on_policy", "coupled"])
def test_where_all_is_fresh_a_sentence_stands_in_place_of_a_picture(schedule):
    page = staleness_section([run_of(schedule)])
    assert words(page) == ["Every token was trained on by the weights that generated it."]
    assert not list(tree(page).iter("figure"))


def test_only_runs_with_older_tokens_are_drawn_and_keep_their_colour():
    page = staleness_section([run_of("sync", name="fresh"), run_of("partial", name="older")])
    assert next(told for _, told in drawn(page, "rect", css="series1")).startswith("older: mean ")
    assert drawn(page, "rect", css="series0") == []
    assert words(page)[0] == "fresh: every token was trained on by the weights that generated it."


def test_a_great_staleness_is_drawn_in_rows_of_several_values():
    column = Column(first=1, last=1, answers=(1, *[0] * 99, 3), mean=70.0)
    run = HeatMap(name="run", note="", columns=(column,), place=0)
    assert run.depth * run.num_rows > 100
    assert run.num_rows <= 12
    page = heat_maps([run], title="t")
    check_pictures(page)
    told = [told for _, told in drawn(page, "rect") if told and "staleness" in told]
    assert told == [
        "update 1, staleness 0 to 9: 25.0 % of the answers, 1 of 4",
        "update 1, staleness 100 to 109: 75.0 % of the answers, 3 of 4",
    ]


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.integers(0, 5), max_size=300).map(tuple).filter(any), min_size=1, max_size=8
    )
)
def test_maps_of_any_depth_stay_inside_their_picture(answers):
    drawn_columns = tuple(
        Column(first=n + 1, last=n + 1, answers=counts, mean=float(len(counts) - 1))
        for n, counts in enumerate(answers)
    )
    run = HeatMap(name="run", note="", columns=drawn_columns, place=0)
    page = heat_maps([run, run], title="t")
    check_pictures(page)
    told = [told for _, told in drawn(page, "rect") if told and ", staleness " in told]
    counts = [int(re.search(r", (\d+) of \d+$", words)[1]) for words in told]
    assert sum(counts) == 2 * sum(map(sum, answers))


def test_many_updates_become_a_bounded_number_of_columns_and_the_caption_says_so():
    run = run_of("partial", groups=60)
    updates = run.metrics.run.updates
    assert updates > MAX_COLUMNS
    assert len(staleness_columns(run)) <= MAX_COLUMNS
    assert any("updates together" in told for told in words(staleness_section([run])))
    assert not any("together" in told for told in words(staleness_section([run_of("partial")])))
