"""The table of numbers: where the time of a run went."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from report_worlds import any_runs, log, run_of
from sortedrl.events import HandOver, Update
from sortedrl.report.page import numbers_section, seconds_spent
from sortedrl.report.record import RunRecord, measured


@given(any_runs)
def test_what_the_time_was_spent_on_adds_up_to_the_time_of_the_run(run):
    spent = seconds_spent(run)
    assert all(seconds >= 0 for seconds in spent.values())
    assert sum(spent.values()) == pytest.approx(run.metrics.run.seconds)


@given(st.sampled_from(["partial", "coupled", "sync"]), st.floats(0.01, 100))
def test_time_after_an_update_is_time_of_saving(schedule, pause):
    """The same run, in which every update is followed by a checkpoint that takes `pause`."""
    events, late = [], 0.0
    for event in log(schedule):
        events.append(replace(event, seconds=event.seconds + late))
        late += pause * isinstance(event, Update)
    run = measured(RunRecord(name="saved", events=events))
    spent, before = seconds_spent(run), seconds_spent(run_of(schedule))
    updates = sum(isinstance(event, Update) for event in events)
    assert spent.pop("saving checkpoints and logs") == pytest.approx(pause * updates)
    assert before.pop("saving checkpoints and logs") == pytest.approx(0, abs=1e-9)
    assert spent == pytest.approx(before)


def test_the_table_has_a_row_for_saving():
    events = list(log("partial"))
    place = next(n for n, event in enumerate(events) if isinstance(event, HandOver) and n > 5)
    late = [replace(event, seconds=event.seconds + 3) for event in events[place:]]
    text = numbers_section([measured(RunRecord(name="a", events=[*events[:place], *late]))])
    assert '<th scope="row">saving checkpoints and logs</th><td>3 s, ' in text
