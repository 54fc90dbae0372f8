import gzip
import json
import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.config.schedule import Schedule
from sortedrl.core.events import Begin, Event, Resume, Score, Scored, Update
from sortedrl.core.meter import measure
from sortedrl.errors import DataError
from sortedrl.report.record import RunRecord
from sortedrl.report.trace import PROCESSES, write_trace
from sortedrl.simulate.compare import simulate, variants
from sortedrl.simulate.settings import PRESETS

NAMING = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
FIELDS = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "X": {"ph", "name", "cat", "ts", "dur", "pid", "tid", "args"},
    "C": {"ph", "name", "ts", "pid", "tid", "args"},
    "i": {"ph", "name", "cat", "ts", "pid", "tid", "s", "args"},
}


def is_whole(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check(trace) -> None:
    """What the Trace Event Format asks of a file in its object form, and what we add to it."""
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    for event in events:
        assert set(event) == FIELDS[event["ph"]]
        assert is_whole(event["pid"])
        assert is_whole(event["tid"])
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["args"], dict)
        check_kind(event)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    timed = [event for event in events if event["ph"] != "M"]
    assert {(event["pid"], event["tid"]) for event in timed} <= named
    assert {event["pid"] for event in timed} <= processes
    assert not processes & {tid for _, tid in named}
    assert events[len(events) - len(timed) :] == timed
    assert all(before["ts"] <= after["ts"] for before, after in pairwise(timed))
    check_overlaps(timed)


def check_kind(event) -> None:
    if event["ph"] == "M":
        name, kind = NAMING[event["name"]]
        assert set(event["args"]) == {name}
        assert isinstance(event["args"][name], kind)
        return
    assert is_whole(event["ts"])
    assert event["ts"] >= 0
    if event["ph"] == "X":
        assert is_whole(event["dur"])
        assert event["dur"] >= 0
    elif event["ph"] == "i":
        assert event["s"] in ("g", "p", "t")
    elif event["ph"] == "C":
        assert event["args"]
        assert all(is_whole(value) for value in event["args"].values())
    for value in event["args"].values():
        assert not isinstance(value, float) or math.isfinite(value)


def check_overlaps(timed) -> None:
    threads = defaultdict(list)
    for event in timed:
        if event["ph"] == "X":
            threads[event["tid"]].append(event)
    for bars in threads.values():
        for before, after in pairwise(bars):
            assert before["ts"] + before["dur"] <= after["ts"]


def trace_of(events, path, **changes):
    record = RunRecord(**({"name": "a run", "events": events} | changes))
    summary = write_trace(record, path)
    return json.loads(path.read_text()), summary


def bars(trace, kind):
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] == kind]


def seconds(bars) -> float:
    return sum(bar["dur"] for bar in bars) / 1e6


def log_of(schedule, *, slots=6, groups=3, seed=0) -> list[Event]:
    paper = PRESETS["paper"]()
    events: list[Event] = []
    simulate(
        replace(
            paper,
            groups=groups,
            seed=seed,
            schedule=schedule,
            engine=replace(paper.engine, slots=slots, max_tokens=400),
        ),
        record=events.append,
    )
    return events


BASE = Schedule(group_prompts=8, samples_per_prompt=2, update_batch=5)
SCHEDULES = [*variants(BASE), *variants(replace(BASE, harvest_unit="prompt"), modes=("coupled",))]


@pytest.fixture(scope="module", params=SCHEDULES, ids=lambda schedule: schedule.name)
def log(request) -> list[Event]:
    return log_of(request.param)


def test_a_trace_has_the_format_and_the_sums_of_the_run(log, tmp_path):
    trace, summary = trace_of(log, tmp_path / "trace.json")
    check(trace)
    metrics = measure(log)
    tolerance = {"rel": 1e-6, "abs": 1e-6 * len(log)}
    assert seconds(bars(trace, "slots")) == pytest.approx(
        metrics.run.busy_slot_seconds, **tolerance
    )
    updates = sum(event.took_seconds for event in log if isinstance(event, Update))
    assert seconds(bars(trace, "updates")) == pytest.approx(updates, **tolerance)
    assert seconds(bars(trace, "rounds")) == pytest.approx(metrics.run.rollout_seconds, **tolerance)
    told = [bar["args"] for bar in bars(trace, "slots")]
    assert sum(bar["decoded"] for bar in told) == metrics.run.ledger.decoded
    assert sum(bar["discarded"] for bar in told) == metrics.run.ledger.discarded
    assert [bar["args"]["bubble"] for bar in bars(trace, "rounds")] == [
        pytest.approx(figures.bubble, abs=1e-6) for figures in metrics.rounds
    ]
    assert summary.seconds == metrics.run.seconds
    assert summary.counts["slots"] == len(told)
    assert summary.counts["updates"] == metrics.run.updates


def test_the_area_under_the_running_slots_is_the_busy_time(log, tmp_path):
    trace, _ = trace_of(log, tmp_path / "trace.json")
    points = [e for e in trace["traceEvents"] if e["name"] == "running slots"]
    area = sum(
        before["args"]["slots"] * (after["ts"] - before["ts"]) for before, after in pairwise(points)
    )
    assert points[-1]["args"]["slots"] == 0
    assert area / 1e6 == pytest.approx(measure(log).run.busy_slot_seconds, rel=1e-5)


def test_counters_of_tokens_end_with_the_ledger_and_never_fall(log, tmp_path):
    trace, _ = trace_of(log, tmp_path / "trace.json")
    ledger = measure(log).run.ledger
    for name in ("decoded", "trained", "discarded"):
        values = [
            e["args"]["tokens"] for e in trace["traceEvents"] if e["name"] == f"{name} tokens"
        ]
        assert values == sorted(values)
        assert values[-1] == getattr(ledger, name)


def test_every_group_lasts_from_its_load_to_its_close(log, tmp_path):
    trace, _ = trace_of(log, tmp_path / "trace.json")
    loads = {event.group: event.seconds for event in log if event.kind == "load"}
    closes = {g: event.seconds for event in log if isinstance(event, Update) for g in event.closed}
    assert {bar["args"]["group"]: bar["ts"] for bar in bars(trace, "groups")} == {
        group: round(1e6 * second) for group, second in loads.items()
    }
    for bar in bars(trace, "groups"):
        assert bar["ts"] + bar["dur"] == round(1e6 * closes[bar["args"]["group"]])
        assert bar["args"]["is_closed"]


@given(
    schedule=st.builds(
        Schedule,
        strategy=st.sampled_from(("sync", "sorted", "ungrouped", "april", "tail_batching")),
        mode=st.just("on_policy"),
        group_prompts=st.integers(2, 5),
        samples_per_prompt=st.integers(1, 2),
        update_batch=st.just(2),
    ),
    slots=st.integers(1, 6),
    groups=st.integers(1, 3),
    cut=st.floats(0, 1),
)
@settings(max_examples=25, deadline=None)
def test_any_run_cut_anywhere_gives_a_trace(tmp_path_factory, schedule, slots, groups, cut):
    log = log_of(schedule, slots=slots, groups=groups)
    part = log[: max(1, round(cut * len(log)))]
    trace, summary = trace_of(part, tmp_path_factory.mktemp("cut") / "trace.json")
    check(trace)
    assert summary.seconds == part[-1].seconds - part[0].seconds
    busy = measure(part).run.busy_slot_seconds
    assert seconds(bars(trace, "slots")) == pytest.approx(busy, rel=1e-6, abs=1e-6 * len(log))


def test_what_was_being_written_when_the_log_ends_is_told_as_running(tmp_path):
    log = log_of(BASE)
    cut = next(place for place, event in enumerate(log) if event.kind == "finish")
    trace, _ = trace_of(log[:cut], tmp_path / "trace.json")
    assert {bar["args"]["outcome"] for bar in bars(trace, "slots")} == {"running"}
    assert [bar["args"]["is_closed"] for bar in bars(trace, "groups")] == [False]


def scored(log, workers, took=0.25) -> list[Event]:
    """The log with a reward for every answer, given by workers while the update waits."""
    events: list[Event] = []
    for event in log:
        if isinstance(event, Update):
            began = event.seconds - event.took_seconds
            events.append(
                Score(
                    seconds=event.seconds,
                    round=event.round,
                    waited_seconds=event.seconds - began,
                    scored=tuple(
                        Scored(
                            prompt=trained.prompt,
                            sample=trained.sample,
                            reward=float(place),
                            worker=None if workers is None else place % workers,
                            start=None if workers is None else began,
                            took_seconds=None if workers is None else took,
                        )
                        for place, trained in enumerate(event.trained)
                    ),
                )
            )
        events.append(event)
    return events


def threads(trace, process):
    number = 1 + PROCESSES.index(process)
    return [
        e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name" and e["pid"] == number
    ]


def test_rewards_lie_on_the_threads_of_their_workers_and_are_told_at_the_slots(tmp_path):
    log = log_of(BASE)
    trace, _ = trace_of(scored(log, workers=2, took=0.001), tmp_path / "trace.json")
    check(trace)
    assert threads(trace, "rewards") == ["waiting", "worker 0", "worker 1"]
    answers = measure(log).run.trajectories
    assert len(bars(trace, "rewards")) == answers
    assert seconds(bars(trace, "rewards")) == pytest.approx(0.001 * answers)
    updates = [bar["dur"] for bar in bars(trace, "updates")]
    assert [bar["dur"] for bar in bars(trace, "waits")] == updates
    finished = [bar["args"] for bar in bars(trace, "slots") if "length" in bar["args"]]
    assert finished
    assert all("reward" in told for told in finished)


def test_rewards_that_a_worker_gives_at_the_same_time_get_a_thread_each(tmp_path):
    log = log_of(BASE)
    took = min(event.took_seconds for event in log if isinstance(event, Update))
    trace, _ = trace_of(scored(log, workers=1, took=took), tmp_path / "trace.json")
    check(trace)
    most = max(len(event.trained) for event in log if isinstance(event, Update))
    assert len(threads(trace, "rewards")) == 1 + most
    assert threads(trace, "rewards")[1:3] == ["worker 0", "worker 0 (2)"]


def test_rewards_without_times_have_no_bars(tmp_path):
    trace, _ = trace_of(scored(log_of(BASE), workers=None), tmp_path / "trace.json")
    check(trace)
    assert threads(trace, "rewards") == ["waiting"]
    assert not bars(trace, "rewards")


def test_a_resumed_run_shows_where_it_was_taken_up(tmp_path):
    log = log_of(BASE)
    place = next(place for place, event in enumerate(log) if event.kind == "update")
    resume = Resume(seconds=log[place].seconds, round=1, version=1)
    trace, summary = trace_of([*log[: place + 1], resume, *log[place + 1 :]], tmp_path / "t.json")
    check(trace)
    marks = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    assert [mark["ts"] for mark in marks] == [round(1e6 * resume.seconds)]
    assert summary.counts["resumes"] == 1


def test_bars_know_the_version_that_wrote_them(tmp_path):
    trace, _ = trace_of(log_of(BASE), tmp_path / "trace.json")
    rounds = sorted(bars(trace, "rounds"), key=lambda bar: bar["ts"])
    for bar in bars(trace, "slots"):
        place = max(i for i, rollout in enumerate(rounds) if rollout["ts"] <= bar["ts"])
        assert bar["args"]["version"] == place


def test_times_count_from_the_start_of_the_run(tmp_path):
    log = log_of(BASE)
    moved = [replace(event, seconds=event.seconds + 1000.5) for event in log]
    trace, _ = trace_of(log, tmp_path / "trace.json")
    later, _ = trace_of(moved, tmp_path / "later.json")
    check(later)
    assert len(later["traceEvents"]) == pytest.approx(len(trace["traceEvents"]), abs=5)
    assert min(bar["ts"] for bar in bars(later, "slots")) == min(
        bar["ts"] for bar in bars(trace, "slots")
    )


def test_a_packed_trace_is_the_same_trace_and_the_same_bytes_again(tmp_path):
    record = RunRecord(name="a run", events=log_of(BASE))
    write_trace(record, tmp_path / "trace.json")
    write_trace(record, tmp_path / "one.json.gz")
    write_trace(record, tmp_path / "two.json.gz")
    packed = (tmp_path / "one.json.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "trace.json").read_bytes()
    assert packed == (tmp_path / "two.json.gz").read_bytes()
    assert len(packed) < (tmp_path / "trace.json").stat().st_size / 4


def test_a_run_that_has_only_begun_is_a_trace(tmp_path):
    begin = Begin(seconds=0, schedule="sync", slots=2, seed=0)
    trace, summary = trace_of([begin], tmp_path / "trace.json")
    check(trace)
    assert summary.seconds == 0
    assert threads(trace, "slots") == ["slot 0", "slot 1"]


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path):
    record = RunRecord(name="a run", events=log_of(BASE))
    with pytest.raises(DataError, match="cannot be written"):
        write_trace(record, tmp_path / "missing" / "trace.json")
    write_trace(record, tmp_path / "trace.json")
    old = (tmp_path / "trace.json").read_bytes()
    bad = [
        replace(event, scored=[s._replace(reward=math.nan) for s in event.scored])
        if isinstance(event, Score)
        else event
        for event in scored(record.events, workers=1)
    ]
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_trace(replace(record, events=bad), tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_bytes() == old
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
