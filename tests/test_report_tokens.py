"""The sections about tokens: staleness, and the ledger."""

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from report_worlds import (
    any_runs,
    check_pictures,
    drawn,
    path_points,
    run_of,
    size,
    tree,
    whole_runs,
    words,
)
from sortedrl.core.events import Update
from sortedrl.core.meter import Ledger
from sortedrl.report.sections import tokens as tokens_module
from sortedrl.report.sections.tokens import (
    MAX_COLUMNS,
    Column,
    HeatMap,
    flows,
    heat_maps,
    ledger_section,
    ledger_text,
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
        assert told == "no updates yet."
    elif figures.staleness_max == 0:
        assert told == "every token was trained on by the weights that generated it."
    else:
        assert f"{figures.mean_staleness:.2f} updates old on average" in told
        assert f", {figures.staleness_max:,} at most" in told
        assert f"{figures.mean_trajectory_staleness:.2f} updates old on average" in told


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


counts = st.integers(0, 10**12)
ledgers = st.builds(
    lambda trained, discarded, cached, again: Ledger(
        decoded=trained + discarded + cached,
        trained=trained,
        discarded=discarded,
        kept=again,
        prefilled_again=again,
    ),
    counts,
    counts,
    counts,
    counts,
)


def bands(page):
    """Thickness of each band where it leaves and where it arrives, by what it tells."""
    found = []
    for element, told in drawn(page, "path"):
        points = path_points(element)
        half = len(points) // 2
        leaving, arriving = points[-1][1] - points[0][1], points[half][1] - points[half - 1][1]
        found.append((told, leaving, arriving))
    return found


@given(st.lists(ledgers, min_size=1, max_size=6))
def test_bands_are_as_thick_as_their_tokens_on_one_scale_for_all_runs(rows):
    page = flows([(f"run {place}", ledger) for place, ledger in enumerate(rows)], title="t")
    check_pictures(page)
    parts = [
        part
        for ledger in rows
        for part in (ledger.trained, ledger.discarded, ledger.cached)
        if part
    ]
    found = bands(page)
    told = [int(re.search(r": ([\d,]+) tokens", words)[1].replace(",", "")) for words, *_ in found]
    assert told == parts
    full = 128 if len(rows) <= 4 else 72
    most = max(ledger.decoded for ledger in rows) or 1
    for part, (_, leaving, arriving) in zip(parts, found, strict=True):
        assert leaving == pytest.approx(full * part / most, abs=0.03)
        assert arriving == pytest.approx(leaving, abs=0.03)


@given(ledgers)
def test_what_goes_out_is_as_thick_as_what_was_decoded(ledger):
    page = flows([("run", ledger)], title="t")
    source = next(e for e, told in drawn(page, "rect") if told.startswith("decoded: "))
    out = sum(leaving for _, leaving, _ in bands(page))
    assert max(0.75, out) == pytest.approx(size(source, "height"), abs=0.05)


@given(any_runs)
def test_the_law_is_written_out_with_the_numbers_of_the_meter(run):
    page = ledger_section([run])
    law = re.search(
        r"decoded ([\d,]+) = trained ([\d,]+) \+ discarded ([\d,]+) \+ still cached ([\d,]+)",
        "".join(tree(page).itertext()),
    )
    decoded, trained, discarded, cached = (int(n.replace(",", "")) for n in law.groups())
    ledger = run.metrics.run.ledger
    assert (decoded, trained, discarded) == (ledger.decoded, ledger.trained, ledger.discarded)
    assert decoded == trained + discarded + cached
    # the lanes follow every answer on their own way through the log
    stopped = [bar for bar in run.lanes.bars if bar.length is None]
    assert cached == sum(bar.decoded - bar.discarded for bar in stopped)


def test_resumed_work_is_told_beside_the_flow():
    page = "".join(tree(ledger_section([run_of("partial")])).itertext())
    ledger = run_of("partial").metrics.run.ledger
    assert ledger.kept
    assert f"kept at resumes {ledger.kept:,}" in page
    assert f"prefilled again {ledger.prefilled_again:,}" in page
    assert "nothing was resumed" in "".join(tree(ledger_section([run_of("sync")])).itertext())


def test_words_name_the_tokens_thrown_away_for_those_trained_on():
    run = run_of("on_policy")
    ledger = run.metrics.run.ledger
    assert ledger.discarded
    told = ledger_text(run)
    assert told.startswith(f"{100 * ledger.trained / ledger.decoded:.1f} % of the decoded")
    ratio = float(re.search(r"; ([\d.,]+) were discarded", told)[1])
    assert ratio == pytest.approx(100 * ledger.discarded / ledger.trained, rel=0.01)
    assert words(ledger_section([run_of("sync")]))[0] == "Every decoded token was trained on."


def test_words_of_a_run_that_trained_on_nothing_yet():
    run = run_of("sync")

    def told(ledger):
        figures = replace(run.metrics.run, ledger=ledger)
        return ledger_text(replace(run, metrics=replace(run.metrics, run=figures)))

    assert told(Ledger()) == "no answer has finished or been interrupted yet."
    assert told(Ledger(decoded=1200)) == "1,200 tokens decoded, none trained on yet."
    assert told(Ledger(decoded=10, trained=5)) == (
        "50.0 % of the decoded tokens were trained on; none were discarded."
    )
