import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from report_worlds import any_runs, check_pictures, drawn, path_points, run_of, size, tree, words
from sortedrl.metrics import Ledger
from sortedrl.report.sections.tokens import flows, ledger_section, ledger_text

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
