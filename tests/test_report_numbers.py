"""The table of numbers: where the time of a run went."""

from dataclasses import asdict, astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from report_worlds import any_runs, log, run_of
from sortedrl.events import HandOver, Update
from sortedrl.report.advice.diagnosis import diagnose
from sortedrl.report.advice.observed import seconds_spent
from sortedrl.report.page import numbers_section
from sortedrl.report.record import RunRecord, measured


@given(any_runs)
def test_what_the_time_was_spent_on_adds_up_to_the_time_of_the_run(run):
    spent = astuple(seconds_spent(run.record.events, run.metrics.run))
    assert min(spent) >= 0
    assert sum(spent) == pytest.approx(run.metrics.run.seconds)


def saving(events, pause):
    """The same run, in which every update is followed by a checkpoint that takes `pause`."""
    late = 0.0
    for event in events:
        yield replace(event, seconds=event.seconds + late)
        late += pause * isinstance(event, Update)


@given(st.sampled_from(["partial", "coupled", "sync"]), st.floats(0.01, 100))
def test_time_after_an_update_is_time_of_saving(schedule, pause):
    before, after = run_of(schedule), tuple(saving(log(schedule), pause))
    run = measured(RunRecord(name="saved", events=after))
    spent = asdict(seconds_spent(after, run.metrics.run))
    plain = asdict(seconds_spent(before.record.events, before.metrics.run))
    updates = sum(isinstance(event, Update) for event in after)
    # an event follows every update but that which ends a log
    assert spent.pop("saving") == pytest.approx(pause * updates)
    assert plain.pop("saving") == pytest.approx(0, abs=1e-9)
    assert spent == pytest.approx(plain)


@pytest.mark.parametrize("schedule", ["partial", "sync"])
def test_advice_does_not_take_the_time_of_saving_for_that_of_updates(schedule):
    plain = diagnose(log(schedule))
    saved = diagnose(tuple(saving(log(schedule), 100.0)))
    assert asdict(saved.measured) == pytest.approx(asdict(plain.measured))
    remedies = {entry.remedy for entry in saved.advice}
    assert remedies == {"Raise saving.every.", *(entry.remedy for entry in plain.advice)}


def test_the_table_has_a_row_for_saving():
    events = list(log("partial"))
    place = next(n for n, event in enumerate(events) if isinstance(event, HandOver) and n > 5)
    late = [replace(event, seconds=event.seconds + 3) for event in events[place:]]
    text = numbers_section([measured(RunRecord(name="a", events=[*events[:place], *late]))])
    assert '<th scope="row">saving checkpoints and logs</th><td>3 s, ' in text
