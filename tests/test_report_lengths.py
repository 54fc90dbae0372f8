import re
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from report_worlds import any_runs, check_pictures, drawn, run_of, size, whole_runs, words
from sortedrl.core.events import Score, Scored
from sortedrl.core.meter import ks_distance
from sortedrl.report.record import RunRecord, measured
from sortedrl.report.sections.lengths import (
    Histogram,
    RunLengths,
    bias_text,
    histograms,
    length_bins,
    lengths_of,
    lengths_section,
    reward_text,
)
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.lengths import Survival
from sortedrl.simulate.settings import PRESETS

samples = st.lists(st.integers(1, 40_000), min_size=1, max_size=60)


def bins_of(values):
    return length_bins(
        shortest=min(values), typical=sorted(values)[len(values) // 2], longest=max(values)
    )


@given(samples)
def test_every_length_falls_in_exactly_one_bin(values):
    bins = bins_of(values)
    assert list(bins.edges) == sorted(set(bins.edges))
    assert len(bins.edges) <= 50
    counted = bins.shares((value, 1.0) for value in values)
    for share, first, end in zip(counted, bins.edges[:-1], bins.edges[1:], strict=True):
        assert share == sum(first <= value < end for value in values)
    assert sum(counted) == len(values)


@given(samples)
def test_lengths_lie_on_the_axis_in_their_order(values):
    bins = bins_of(values)
    places = [bins.x(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)
    assert all(0 <= bins.x(mark) <= 1 + 1e-9 for mark in bins.marks())
    assert len(bins.marks()) <= 8


def test_the_axis_is_logarithmic_where_some_answers_are_huge():
    assert not length_bins(shortest=10, typical=80, longest=256).is_log
    assert length_bins(shortest=10, typical=80, longest=8192).is_log


@settings(max_examples=60)
@given(any_runs)
def test_shares_drawn_add_up_to_one_for_each_kind(run):
    assume(run.metrics.run.trajectories)
    page = lengths_section([run])
    told = [
        re.search(r"([\d.]+) % of the answers trained on, ([\d.]+) %", words)
        for _, words in drawn(page, "rect")
        if words and "trained on, " in words
    ]
    trained = sum(float(found[1]) for found in told)
    assert trained == pytest.approx(100, abs=0.06 * len(told))
    lengths = lengths_of(run)
    assert lengths.trained.total() == run.metrics.run.trajectories
    heights = [
        size(e, "height") for e, words in drawn(page, "rect") if words and "trained" in words
    ]
    assert max(heights) / sum(heights) == pytest.approx(
        max(float(found[1]) for found in told) / trained, abs=0.01
    )


@given(any_runs)
def test_the_mean_trained_on_is_that_of_the_meter(run):
    lengths = lengths_of(run)
    assume(lengths is not None and lengths.bias is not None)
    assert lengths.bias.trained_mean == pytest.approx(run.metrics.run.mean_length)
    assert lengths.bias.ratio == pytest.approx(run.metrics.run.mean_length / lengths.written.mean)


@given(whole_runs)
def test_the_largest_gap_is_the_ks_distance_to_a_fine_sample_of_what_is_written(run):
    lengths = lengths_of(run)
    trained = list(lengths.trained.elements())
    sample = lengths.written.sample_lengths(2000)
    assert lengths.bias.ks_distance == pytest.approx(ks_distance(trained, sample), abs=1e-3)


@pytest.mark.parametrize("trained", [1, 9])
def test_the_gap_counts_whichever_side_is_longer(trained):
    lengths = RunLengths(
        written=Survival(survival=((1, 0.75), (9, 0.0))),
        unseen=0.0,
        trained=Counter({trained: 5}),
        finished=5,
        truncated=0,
        has_redraws=False,
    )
    assert lengths.bias.ks_distance == pytest.approx({1: 0.75, 9: 0.25}[trained])
    assert lengths.bias.ratio == pytest.approx(trained / 7)
    way = {1: "86 % shorter", 9: "29 % longer"}[trained]
    assert f"trained on are {way} than" in bias_text(run_of("sync"), lengths)


@pytest.mark.parametrize("schedule", ["sync", "partial", "coupled", "lookahead", "ungrouped"])
def test_runs_that_throw_no_draw_away_train_on_what_the_policy_writes(schedule):
    run = run_of(schedule)
    bias = lengths_of(run).bias
    assert bias.ratio == pytest.approx(1)
    assert bias.ks_distance == pytest.approx(0, abs=1e-9)
    assert "as long as what the policy generates" in bias_text(run, lengths_of(run))


def paper_run(*, mode, seed=0):
    paper = PRESETS["paper"]()
    events = []
    schedule = replace(paper.schedule, mode=mode)
    outcome = simulate(replace(paper, groups=4, seed=seed, schedule=schedule), record=events.append)
    return measured(RunRecord(name="run", events=events)), outcome


def test_the_bias_of_redrawn_answers_is_found_and_told():
    run, outcome = paper_run(mode="on_policy")
    lengths = lengths_of(run)
    assert outcome.bias.ratio < 0.7
    assert lengths.bias.ratio == pytest.approx(outcome.bias.ratio, abs=0.05)
    assert lengths.bias.ks_distance == pytest.approx(outcome.bias.ks_distance, abs=0.05)
    shorter = f"{100 * (1 - lengths.bias.ratio):.0f} % shorter"
    told = bias_text(run, lengths)
    assert told.startswith(
        f"answers trained on are {shorter} than what the policy generates: long "
    )
    assert f"{100 * lengths.truncated / lengths.finished:.1f} % of the finished answers" in told


def test_the_table_tells_what_the_words_tell():
    run = run_of("on_policy")
    bias = lengths_of(run).bias
    cells = words(lengths_section([run]))
    assert f"{bias.ratio:.2f}" in cells
    assert f"{bias.ks_distance:.3f}" in cells


def test_what_was_not_seen_to_its_end_is_told():
    run, _ = paper_run(mode="on_policy")
    events = run.record.events
    harvest = next(place for place, event in enumerate(events) if event.kind == "harvest")
    stop = next(n for n in range(harvest, len(events)) if events[n].kind == "update")
    cut = measured(RunRecord(name="cut", events=events[: stop + 1]))
    lengths = lengths_of(cut)
    longest = max(e.tokens for e in events[:stop] if e.kind in ("finish", "interrupt"))
    assert 0.05 < lengths.unseen < 1
    assert lengths.unseen == pytest.approx(lengths.written.longer_than(longest - 1))
    assert f"{100 * lengths.unseen:.1f} % of what it generates never finished" in bias_text(
        cut, lengths
    )
    assert f"counts as {longest:,} tokens" in bias_text(cut, lengths)
    assert lengths_of(run_of("partial")).unseen == 0


def test_a_run_without_a_token_has_no_lengths():
    assert lengths_of(run_of("sync", share=0.0)) is None
    assert lengths_section([run_of("sync", share=0.0)]) == ""


def test_lengths_by_reward_are_told_where_answers_have_rewards():
    run = run_of("sync")
    lengths = {key: tokens for key, _, tokens in run.metrics.trained_lengths}
    ordered = sorted(lengths, key=lambda key: lengths[key])
    short, long = ordered[:10], ordered[10:]
    rewards = {key: 1.0 for key in short} | {key: 0.25 * (key[1] + 1) for key in long}
    score = Score(
        seconds=0.0,
        round=0,
        waited_seconds=0.0,
        scored=tuple(Scored(*key, reward, None, None, None) for key, reward in rewards.items()),
    )
    begin, *rest = run.record.events
    scored = measured(replace(run.record, events=[begin, score, *rest]))
    told = reward_text(scored)
    means = [sum(lengths[key] for key in part) / len(part) for part in (short, long)]
    assert "highest reward, 1, have" in told
    found = re.search(r"have ([\d.,]+) tokens .* the others ([\d.,]+) ", told)
    assert [float(mean) for mean in found.groups()] == pytest.approx(means, rel=0.01)
    assert f"({len(short)} answers)" in told
    assert f"({len(long)})" in told
    assert any(told[1:] in words_ for words_ in words(lengths_section([scored])))
    assert reward_text(run) == ""


def test_written_lengths_are_an_outline_over_what_was_trained_on():
    random = Random(0)
    values = [random.randint(1, 99) for _ in range(50)]
    bins = bins_of(values)
    counts = Counter(values)
    shares = bins.shares((n, times / 50) for n, times in counts.items())
    shape = Histogram(
        name="run",
        note="",
        written=shares,
        written_mean=50.0,
        trained=tuple(0.0 for _ in shares),
        trained_mean=0.0,
    )
    page = histograms([shape], bins=bins, title="t")
    check_pictures(page)
    assert len(drawn(page, "path")) == 1
    assert [told for _, told in drawn(page, "rect")] == ["run"]
    assert "mean trained" not in page
