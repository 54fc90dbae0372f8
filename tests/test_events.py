"""The log of a run on disk: written, cut, read back."""

from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.core.events import (
    Begin,
    End,
    EventFile,
    Order,
    Resume,
    Score,
    Scored,
    Update,
    from_json,
    read_events,
    to_json,
)
from sortedrl.core.meter import measure
from sortedrl.errors import DataError
from sortedrl.report.lanes import lanes, story
from sortedrl.simulate.settings import six
from worlds import run, simulations

BEGIN = Begin(seconds=0.0, schedule="sorted/partial", slots=2, seed=0)
RESUME = Resume(seconds=6.5, round=3, version=4)
SCORE = Score(
    seconds=7.0,
    round=3,
    waited_seconds=0.25,
    scored=(Scored(1, 0, 0.5, 2, 6.0, 0.5), Scored(2, 1, None, None, None, None)),
)
END = End(seconds=9.0, rounds=4, trained=6)


def write(path, events, *, keep_bytes=None):
    with closing(EventFile(path, keep_bytes=keep_bytes)) as file:
        for event in events:
            file(event)
        return file.sync()


@settings(max_examples=50)
@given(simulations())
def test_every_event_reads_back_as_it_was(simulation):
    events = [*run(simulation).events, RESUME, SCORE]
    assert [from_json(to_json(event)) for event in events] == events


@settings(max_examples=50)
@given(simulations())
def test_what_a_run_logs_is_in_order(simulation):
    order = Order()
    for event in run(simulation).events:
        order(event)


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        *((kind, 0) for kind in ("begin", "load", "start", "finish")),
        *((kind, 2) for kind in ("begin", "load", "start", "finish", "update")),
    ],
)
def test_a_line_that_is_missing_or_doubled_is_refused_with_its_place(tmp_path, kind, count):
    events = list(run(six()).events)
    place = next(number for number, event in enumerate(events) if event.kind == kind)
    write(tmp_path / "events.jsonl", events[:place] + [events[place]] * count + events[place + 1 :])
    with pytest.raises(DataError, match=r"events\.jsonl:\d+: "):
        list(read_events(tmp_path / "events.jsonl"))


def test_a_resume_is_one_line_with_seconds_round_and_version():
    assert to_json(RESUME) == '{"event":"resume","seconds":6.5,"round":3,"version":4}'


def test_of_a_watched_log_every_event_can_be_read_at_once(tmp_path):
    for is_watched in (True, False):
        with closing(EventFile(tmp_path / "events.jsonl", is_watched=is_watched)) as file:
            file(BEGIN)
            found = list(read_events(tmp_path / "events.jsonl"))
            assert found == ([BEGIN] if is_watched else [])


def test_a_new_file_takes_the_place_of_an_older_one(tmp_path):
    path = tmp_path / "events.jsonl"
    write(path, [BEGIN, RESUME])
    write(path, [BEGIN])
    assert list(read_events(path)) == [BEGIN]
    write(path, [BEGIN, END], keep_bytes=0)
    assert list(read_events(path)) == [BEGIN, END]


@settings(max_examples=25, deadline=None)
@given(simulations(), st.randoms(use_true_random=False))
def test_a_log_with_a_line_missing_is_read_or_refused_and_measured_without_a_fault(
    simulation, random
):
    """What can be read can be measured: nothing ends in it that did not start."""
    events = list(run(simulation).events)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        write(path, events)
        assert list(read_events(path)) == events
        lines = path.read_bytes().splitlines(keepends=True)
        place, other = random.randrange(len(lines)), random.randrange(len(lines))
        changed = [*lines[:place], *lines[place + 1 :]]
        swapped = list(lines)
        swapped[place], swapped[other] = swapped[other], swapped[place]
        for content in (changed, swapped, [*lines[: place + 1], *lines[place:]]):
            path.write_bytes(b"".join(content))
            with suppress(DataError):
                found = list(read_events(path))
                if found:
                    measure(found)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"event":"resume","seconds":"6","round":3,"version":4}', "field 'seconds'"),
        ('{"event":"resume","seconds":NaN,"round":3,"version":4}', "finite"),
        ('{"event":"resume","seconds":1e999,"round":3,"version":4}', "finite"),
        ('{"event":"resume","seconds":6,"round":true,"version":4}', "field 'round'"),
        ('{"event":"resume","seconds":6,"round":{},"version":4}', "field 'round'"),
        ('{"event":"resume","seconds":6,"round":3,"version":1' + "0" * 30 + "}", "field 'version'"),
        ('{"event":"resume","seconds":6,"round":3,"version":-1}', "field 'version'"),
        ('{"event":"resume","seconds":1e300,"round":3,"version":4}', "finite"),
        ('{"event":["resume"],"seconds":6}', "unknown event"),
        (
            '{"event":"score","seconds":6,"round":3,"waited_seconds":1,"scored":[[1]]}',
            "an entry must be a list of prompt",
        ),
        (
            '{"event":"score","seconds":6,"round":3,"waited_seconds":1,'
            '"scored":[["a",0,1.0,null,null,null]]}',
            "field 'prompt'",
        ),
        (
            '{"event":"update","seconds":6,"round":3,"version":1,"took_seconds":1,"trained":[],'
            '"closed":[null]}',
            "field 'closed' must hold group numbers",
        ),
        (
            '{"event":"finish","seconds":6,"prompt":0,"sample":0,"tokens":1,"decoded":1,'
            '"reason":"tired","running":0,"engine_decoded":1,"engine_prefilled":1}',
            "unknown reason 'tired'",
        ),
        ("[" * 100_000, "must not be nested this deeply"),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_line(line, said, tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(f"{to_json(BEGIN)}\n{line}\n")
    with pytest.raises(DataError, match=r"events\.jsonl:2: ") as caught:
        list(read_events(path))
    assert said in str(caught.value)


def test_the_length_given_is_the_length_on_the_disk(tmp_path):
    path = tmp_path / "events.jsonl"
    with closing(EventFile(path)) as file:
        assert file.sync() == 0
        file(BEGIN)
        assert file.sync() == path.stat().st_size == len(to_json(BEGIN)) + 1
    with closing(EventFile(path, keep_bytes=path.stat().st_size)) as file:
        assert file.sync() == path.stat().st_size
        file(RESUME)
        assert file.sync() == path.stat().st_size == len(to_json(BEGIN) + to_json(RESUME)) + 2


def test_a_file_that_is_kept_is_cut_to_the_checkpoint_and_goes_on_there(tmp_path):
    path = tmp_path / "events.jsonl"
    kept = write(path, [BEGIN])
    write(path, [BEGIN, END, END])
    path.write_bytes(path.read_bytes() + b'{"event":"upd')
    write(path, [RESUME, END], keep_bytes=kept)
    assert list(read_events(path)) == [BEGIN, RESUME, END]


def test_a_file_that_is_missing_or_too_short_or_of_another_run_is_refused_unharmed(tmp_path):
    path = tmp_path / "events.jsonl"
    with pytest.raises(DataError, match="is missing; restore it next to the checkpoint"):
        EventFile(path, keep_bytes=10)
    assert not path.exists()
    length = write(path, [BEGIN])
    before = path.read_bytes()
    for keep_bytes in (length + 1, length - 1):
        with pytest.raises(DataError, match=f"must hold {keep_bytes} bytes.*found {length}"):
            EventFile(path, keep_bytes=keep_bytes)
        assert path.read_bytes() == before


def test_a_file_in_no_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be written"):
        EventFile(tmp_path / "none" / "events.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_is_named():
    file = EventFile(Path("/dev/full"))
    file(BEGIN)
    with pytest.raises(DataError, match="No space left on device"):
        file(END)
    with pytest.raises(DataError, match="No space left on device"):
        file.close()
    file.close()


def test_an_update_is_there_for_others_to_read_at_once(tmp_path):
    path = tmp_path / "events.jsonl"
    update = Update(seconds=1.0, round=0, version=0, took_seconds=1.0, trained=(), closed=())
    with closing(EventFile(path)) as file:
        file(BEGIN)
        file(update)
        assert list(read_events(path)) == [BEGIN, update]


@pytest.mark.parametrize("torn", [b"{", b'{"event":"begin"}', b"\x00\x00", "{'ä".encode()[:-1]])
def test_a_torn_last_line_is_left_out(tmp_path, torn):
    path = tmp_path / "events.jsonl"
    write(path, [BEGIN, RESUME])
    path.write_bytes(path.read_bytes() + torn)
    assert list(read_events(path)) == [BEGIN, RESUME]


@settings(max_examples=50)
@given(st.integers(0, 10_000))
def test_a_log_cut_at_any_byte_reads_as_its_whole_lines(length):
    events = run(six()).events
    content = "".join(to_json(event) + "\n" for event in events).encode()
    cut = content[: length % len(content)]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        path.write_bytes(cut)
        assert list(read_events(path)) == events[: cut.count(b"\n")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{\n", "Expecting property name"),
        (b"\n", "Expecting value"),
        (b"3\n", "a JSON object with a field 'event'"),
        (b'{"event":"resumed"}\n', "did you mean 'resume'"),
        (b'{"event":"resume","seconds":1.0}\n', "'resume' must have the fields seconds, round"),
        (b'{"event":"\xff"}\n', "not UTF-8"),
        (b'{"event":{},"seconds":1.0}\n', "unknown event"),
        (
            b'{"event":"resume","seconds":"1","round":3,"version":4}\n',
            "'seconds' must be a finite",
        ),
        (
            b'{"event":"resume","seconds":1e999,"round":3,"version":4}\n',
            "'seconds' must be a finite",
        ),
        (
            b'{"event":"resume","seconds":NaN,"round":3,"version":4}\n',
            "'seconds' must be a finite",
        ),
        (
            b'{"event":"resume","seconds":1,"round":true,"version":4}\n',
            "'round' must be a finite",
        ),
    ],
)
def test_a_bad_line_is_refused_with_its_number_wherever_it_stands(tmp_path, line, said):
    path = tmp_path / "events.jsonl"
    write(path, [BEGIN])
    for rest in (b"", b'{"ev'):
        path.write_bytes((to_json(BEGIN) + "\n").encode() + line + rest)
        with pytest.raises(DataError, match=f":2: .*{said}"):
            list(read_events(path))


def test_a_story_counts_skipped_updates_too_and_tells_where_the_run_was_taken_up():
    events = run(six()).events
    resumed = []
    for event in events:
        is_update = isinstance(event, Update)
        resumed.append(replace(event, version=0) if is_update else event)
        if is_update and event.version == 0:
            resumed.append(Resume(seconds=event.seconds, round=event.round, version=0))
    told = "\n".join(story(resumed, lanes(resumed)))
    assert told.count("resume from the checkpoint after update 1") == 1
    assert "update 1 trains" in told
    assert "update 2 trains" in told
    assert lanes(resumed) == lanes(events)
