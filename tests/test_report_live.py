import io
import re
import threading
import time
from dataclasses import replace
from itertools import pairwise
from mmap import mmap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions

from report_worlds import MARKUP, NASTY
from sortedrl.config.schedule import Schedule
from sortedrl.core.events import Begin, Event, Finish, Harvest, Interrupt, Renew, Start, Update
from sortedrl.core.meter import Figures, Meter
from sortedrl.report import live_state as state_module
from sortedrl.report.lanes import lanes
from sortedrl.report.live import (
    ASCII,
    BLOCKS,
    Frame,
    LiveView,
    PlainView,
    activity,
    bar,
    fitted,
    glyphs_for,
    opened_view,
    panel,
    shown,
    sparkline,
    stacked,
    strip,
)
from sortedrl.report.live_state import (
    History,
    LiveState,
    Memory,
    OpenGroup,
    Slots,
    Snapshot,
    Source,
    Trend,
    used_memory,
)
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.settings import PRESETS, Simulation
from worlds import simulations

GLYPHS = st.sampled_from((BLOCKS, ASCII))
SHARES = st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=300)


class Watched:
    """A simulated run with a state that follows it, event by event."""

    def __init__(self, simulation: Simulation) -> None:
        self.events: list[Event] = []
        simulate(simulation, record=self.events.append)
        self.slots = simulation.engine.slots
        self.decoded = 0
        self.meter = Meter()
        self.state = LiveState(
            source(
                schedule=simulation.schedule.name,
                slots=self.slots,
                update_batch=simulation.schedule.update_batch,
                max_tokens=simulation.engine.max_tokens,
                decoded=lambda: self.decoded,
                seconds=lambda: 10.0,
            )
        )

    def take(self, event: Event) -> None:
        if isinstance(event, Finish | Harvest):
            self.decoded = event.engine_decoded
        self.meter(event)
        self.state(event)

    def snapshot(self) -> Snapshot:
        return self.state.snapshot(
            activity="writing",
            done=0.25,
            figures=self.meter.run,
            memory=Memory(used=2**30, total=None),
        )


def texts(frame: Frame) -> list[str]:
    return str(frame).split("\n")


def follow(watched: Watched) -> None:
    """The state beside plain counts, event by event."""
    ready = 0
    for event in watched.events:
        watched.take(event)
        if isinstance(event, Start | Finish | Interrupt | Harvest):
            assert watched.state.running == event.running
        ready += isinstance(event, Finish) - isinstance(event, Renew)
        ready -= len(event.trained) if isinstance(event, Update) else 0
        assert watched.state.ready == ready
    assert watched.state.running == watched.state.ready == 0
    assert watched.snapshot().group is None


@settings(max_examples=50)
@given(simulations())
def test_the_state_runs_what_the_events_say_is_running(simulation):
    follow(Watched(simulation))


def test_answers_that_are_renewed_are_no_longer_ready():
    paper = PRESETS["paper"]()
    schedule = Schedule(
        mode="coupled",
        group_prompts=16,
        samples_per_prompt=3,
        update_batch=9,
        harvest_unit="prompt",
    )
    engine = replace(paper.engine, slots=12, max_tokens=600)
    watched = Watched(replace(paper, groups=2, schedule=schedule, engine=engine))
    assert any(isinstance(event, Renew) for event in watched.events)
    follow(watched)


@settings(max_examples=50)
@given(simulations(), st.integers(0, 120), st.integers(1, 40), GLYPHS)
def test_every_moment_of_a_run_has_a_frame_that_fits(simulation, width, height, glyphs):
    watched = Watched(simulation)
    for number, event in enumerate(watched.events):
        watched.take(event)
        if number % 7:
            continue
        snapshot = watched.snapshot()
        assert len(snapshot.shares) == watched.slots
        assert sum(share is not None for share in snapshot.shares) == snapshot.running
        assert all(share is None or 0 <= share <= 1 for share in snapshot.shares)
        frame = panel(snapshot, width=width, height=height, glyphs=glyphs)
        assert 1 <= len(frame.lines) <= height
        assert all(cell_len(text) <= width for text in texts(frame))


def test_a_whole_run_shows_the_numbers_of_the_meter():
    paper = PRESETS["paper"]()
    watched = Watched(replace(paper, groups=2, engine=replace(paper.engine, slots=32)))
    for event in watched.events:
        watched.take(event)
    run = watched.meter.metrics().run
    text = str(panel(watched.snapshot(), width=100, height=30))
    assert f"bubble    {100 * run.bubble:.1f} %" in text
    assert f"{run.mean_staleness:.2f} max {run.staleness_max}" in text
    short = [f"{tokens / 1e6:.1f}M" for tokens in (run.ledger.decoded, run.ledger.trained)]
    assert f"{short[0]} = {short[1]} trained + " in text


@settings(max_examples=50)
@given(simulations(), st.randoms(use_true_random=False))
def test_slots_are_those_of_the_lanes(simulation, random):
    """At a random event, the slots with a bar that is not over are the slots that are busy."""
    watched = Watched(simulation)
    cut = random.randrange(1, len(watched.events) + 1)
    for event in watched.events[:cut]:
        watched.take(event)
    open_before = lanes(watched.events[:cut])
    stopped = [e for e in watched.events[:cut] if isinstance(e, Finish | Interrupt)]
    per_key: dict[tuple[int, int], int] = {}
    for event in stopped:
        per_key[event.prompt, event.sample] = per_key.get((event.prompt, event.sample), 0) + 1
    busy = set()
    for bar_ in sorted(open_before.bars, key=lambda bar_: (bar_.start, bar_.end)):
        key = (bar_.prompt, bar_.sample)
        if per_key.get(key, 0):
            per_key[key] -= 1
        else:
            busy.add(bar_.slot)
    shares = watched.snapshot().shares
    assert {slot for slot, share in enumerate(shares) if share is not None} == busy


def test_answers_grow_by_what_the_engine_writes_shared_among_them():
    decoded = 100
    slots = Slots(3, decoded=lambda: decoded)
    slots.start((0, 0), cached=0)
    decoded += 10
    slots.start((1, 0), cached=50)
    decoded += 8
    assert slots.tokens() == [14, 54, None]
    slots.stop((0, 0))
    slots.start((2, 0), cached=0)
    decoded += 2
    assert slots.tokens() == [1, 55, None]


def test_work_beyond_the_slots_queues_and_takes_the_next_slot_freed():
    slots = Slots(1, decoded=lambda: 0)
    for prompt in range(3):
        slots.start((prompt, 0), cached=prompt)
    assert (slots.running, slots.assigned, slots.tokens()) == (3, 1, [0])
    slots.stop((1, 0))
    slots.stop((0, 0))
    slots.stop((9, 9))
    assert (slots.running, slots.assigned, slots.tokens()) == (1, 1, [2])


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(FINITE, max_size=1200))
def test_a_history_is_bounded_and_keeps_the_last_value_and_the_range(values):
    history = History()
    for value in [*values, float("nan"), float("inf")]:
        history.add(value)
    kept = history.values()
    assert len(kept) <= min(256, len(values))
    assert history.last == (values[-1] if values else None)
    if values:
        slack = 1e-9 * max(abs(value) for value in values)
        assert min(values) - slack <= min(kept) <= max(kept) <= max(values) + slack
    if len(values) < 256:
        assert list(kept) == values


def test_a_long_history_gives_every_update_the_same_room():
    history = History()
    for value in range(5000):
        history.add(value)
    steps = [after - before for before, after in pairwise(history.values())]
    assert set(steps[:-1]) == {32}


@given(st.lists(FINITE, max_size=200), st.integers(1, 60), GLYPHS, st.booleans())
def test_a_sparkline_has_at_most_its_width_and_rises_with_its_values(
    values, width, glyphs, from_zero
):
    drawn = sparkline(values, width, glyphs=glyphs, from_zero=from_zero)
    assert len(drawn) == min(width, len(values))
    levels = [glyphs.levels.index(char) for char in drawn]
    if len(values) <= width:
        pairs = sorted(zip(values, levels, strict=True))
        assert [level for _, level in pairs] == sorted(levels)


@given(st.floats(-1, 2), st.integers(0, 80), GLYPHS)
def test_a_bar_is_as_wide_as_asked_and_full_only_at_the_end(share, width, glyphs):
    (done, _), (rest, _) = bar(share, width, glyphs=glyphs)
    assert len(done + rest) == width
    if width and share < 1:
        assert done != glyphs.parts[-1] * width
    assert share < 1 or not rest
    assert share > 0 or not done


@given(st.lists(st.integers(0, 100), min_size=1, max_size=4), st.integers(0, 80))
def test_stacked_parts_fill_their_share(parts, width):
    whole = max(1, sum(parts))
    line = stacked([(part / whole, "x", "") for part in parts], width)
    assert sum(len(text) for text, _ in line) == (width if sum(parts) else 0)
    for (text, _), part in zip(line, parts, strict=True):
        assert abs(len(text) - width * part / whole) <= 1


@given(SHARES, st.integers(1, 90), st.integers(1, 4), GLYPHS, st.booleans())
def test_the_strip_keeps_to_its_rows_and_shows_idle_slots(shares, width, rows, glyphs, is_rollout):
    lines = strip(shares, width, rows=rows, glyphs=glyphs, is_rollout=is_rollout)
    assert len(lines) <= rows
    assert all(sum(len(text) for text, _ in line) <= width for line in lines)
    tint = "idle" if is_rollout else "faint"
    pieces = [piece for line in lines for piece in line]
    idle = sum(text.count(glyphs.idle) for text, of in pieces if of == tint)
    asked = sum(share is None for share in shares)
    per_cell = -(-len(shares) // (width * rows))
    if width // len(shares) > 4:
        assert idle == asked * (min(16, width // len(shares)) - 1)
    elif per_cell == 1:
        assert idle == asked
    else:
        assert abs(idle - asked / per_cell) <= 1


def test_a_thousand_slots_take_four_rows_and_their_idle_ones_stand_together():
    shares = [None if slot % 8 == 0 else slot / 1024 for slot in range(1024)]
    lines = strip(shares, 88, rows=4, glyphs=BLOCKS, is_rollout=True)
    text = "".join(text for line in lines for text, _ in line)
    assert len(lines) == 4
    assert text == "".join(sorted(text, key="█▇▆▅▄▃▂▁·".index))
    assert text.count("·") / len(text) == pytest.approx(1 / 8, abs=0.01)


TEXTS = st.text(st.characters(codec="utf-8"), max_size=60) | st.sampled_from(
    (NASTY, *MARKUP, "\x1b[2J\x1b]0;title\x07", "a\r\nb\tc", "数字と漢字" * 9)
)


@given(TEXTS, st.integers(0, 60), GLYPHS)
def test_text_from_outside_is_shown_and_does_nothing(nasty, width, glyphs):
    snapshot = Snapshot(activity=nasty, schedule=nasty, shares=(0.5, None), running=1)
    frame = panel(snapshot, width=width, height=10, glyphs=glyphs)
    assert all(char.isprintable() for text in texts(frame) for char in text)
    assert all(cell_len(text) <= width for text in texts(frame))
    if glyphs is ASCII:
        assert str(frame).isascii()


def test_brackets_are_no_markup():
    snapshot = Snapshot(activity="[red]no markup[/red]")
    console = Console(file=io.StringIO(), width=60)
    console.print(panel(snapshot, width=60, height=5))
    assert "[red]no markup[/red]" in console.file.getvalue()


def test_what_is_cut_says_so():
    assert fitted([("abc", ""), ("defgh", "name")], 6, cut="…") == (("abc", ""), ("de…", "name"))
    assert fitted([("abc", ""), ("d", "")], 4, cut="…") == (("abc", ""), ("d", ""))
    assert fitted([("abc", "")], 0, cut="…") == ()


def test_an_encoding_without_blocks_gets_letters():
    assert [glyphs_for(name) for name in ("utf-8", "latin-1", "ascii", "no such encoding")] == [
        BLOCKS,
        ASCII,
        ASCII,
        ASCII,
    ]
    assert shown("naïve", ASCII) == "na?ve"
    assert shown("naïve", BLOCKS) == "naïve"


FULL = Snapshot(
    activity="update 3: 5 answers ready, 3 being generated",
    done=0.25,
    seconds=100.0,
    schedule="sorted/coupled +1",
    updates=2,
    skipped=1,
    round=4,
    is_rollout=True,
    running=3,
    shares=(0.0, 0.5, None, 1.0),
    ready=5,
    update_batch=8,
    group=OpenGroup(number=1, trained=6, total=16, num_younger=1),
    figures=Figures(),
    trends={"reward": Trend(values=(0.0, 0.5, 1.0), last=1.0)},
    memory=Memory(used=3 * 2**29, total=80 * 2**30),
)


def test_a_panel_says_everything():
    assert texts(panel(FULL, width=80, height=24)) == [
        "sorted/coupled +1  update 3, 1 skipped  round 5  3 of 4 slots busy",
        "update 3: 5 answers ready, 3 being generated",
        "slots     ─────────────── ━━━━━━━╸─────── ··············· ━━━━━━━━━━━━━━━",
        "update    ━━━━━━━━━━━━━━━━━━━━━━━━━╸─────────────── 5 ready, 8 needed",
        "group 2   ━━━━━━━━━━━━━━━────────────────────────── 6 of 16 trained, 1 more open",
        "run       ━━━━━━━━━━─────────────────────────────── 25.0 %, 1:40, 5:00 left",
        "reward    1.000      ▁▅█                bubble    0.0 %",
        "goodput   0/s                           staleness 0.00 max 0",
        "memory    1.5 of 80 GiB",
        "decoded    0 = 0 trained + 0 discarded + 0 cached",
    ]


def test_the_lines_that_matter_most_stay_where_there_are_few():
    whole = texts(panel(FULL, width=80, height=24))
    assert texts(panel(FULL, width=80, height=1)) == [whole[2]]
    assert texts(panel(FULL, width=80, height=2)) == whole[1:3]
    assert texts(panel(FULL, width=80, height=3)) == [*whole[1:3], whole[5]]


def test_a_run_that_is_loading_says_so():
    assert texts(panel(Snapshot(activity="loading"), width=40, height=9))[0] == "loading"


def test_slots_are_no_bubble_while_nothing_is_rolled_out():
    idle = replace(FULL, shares=(None,) * 64, is_rollout=False)
    tints = {tint for line in panel(idle, width=100, height=24).lines for _, tint in line}
    assert "idle" not in tints
    rollout = replace(idle, is_rollout=True)
    tints = {tint for line in panel(rollout, width=100, height=24).lines for _, tint in line}
    assert "idle" in tints


def test_before_the_first_answer_progress_is_measured_against_the_limit():
    decoded = 0
    state = LiveState(source(slots=2, max_tokens=100, decoded=lambda: decoded))
    common = {"seconds": 0, "prompt": 0, "sample": 0}
    state(
        Start(
            **common, round=0, group=0, attempt=0, prompt_tokens=1, cached=20, dropped=0, running=1
        )
    )
    decoded = 5
    asked = {"activity": "", "done": 0, "figures": None, "memory": None}
    assert state.snapshot(**asked).shares == (0.25, None)
    decoded = 180
    assert state.snapshot(**asked).shares == (1.0, None)


def test_rows_become_courses_and_what_is_missing_is_left_out():
    state = LiveState(source(slots=1, max_tokens=1))
    for row in (
        {"update": 1, "reward/mean": 0.5, "skipped_steps": 0.0},
        {"update": 2, "reward/mean": None, "skipped_steps": 1.0},
        {"update": 3, "reward/mean": 0.75, "name": "words"},
        {"evaluation/score": 0.4},
    ):
        state.updated(row)
    snapshot = state.snapshot(activity="", done=0, figures=None, memory=None)
    assert snapshot.skipped == 1
    assert snapshot.trends == {
        "reward": Trend(values=(0.5, 0.75), last=0.75),
        "score": Trend(values=(0.4,), last=0.4),
    }


def test_memory_is_that_of_this_process():
    before = used_memory("cpu").used
    # New pages from the system: what was freed before might be used again without growing.
    ballast = mmap(-1, 64 << 20)
    ballast.write(b"x" * len(ballast))
    assert used_memory("cpu").used - before > len(ballast) / 2
    assert used_memory("cuda").used > 0
    ballast.close()


def test_memory_is_told_where_the_system_has_no_such_file(tmp_path, monkeypatch):
    here = used_memory("cpu").used
    monkeypatch.setattr(state_module, "_STATM", tmp_path / "absent")
    assert used_memory("cpu").used >= here / 2


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def console(width: int = 80, height: int = 24, **environment: str) -> Console:
    made = Console(
        file=Terminal(), force_terminal=True, _environ={"TERM": "xterm-256color", **environment}
    )
    made.size = ConsoleDimensions(width, height)
    return made


def source(**changes) -> Source:
    return Source(
        **{
            "schedule": "sorted/coupled",
            "slots": 4,
            "update_batch": 2,
            "max_tokens": 10,
            "device": "cpu",
            "decoded": lambda: 0,
            "seconds": lambda: 1.0,
            "figures": Figures,
            **changes,
        }
    )


BEGIN = Begin(seconds=0, schedule="sorted/coupled", slots=4, seed=0)


def test_a_frame_is_written_only_when_it_shows_something_new():
    on = console()
    with LiveView(on, seconds_per_frame=None) as view:
        view.advance("loading", 0.0)
        view.refresh()
        assert "loading" in on.file.getvalue()
        written = len(on.file.getvalue())
        view.refresh()
        assert len(on.file.getvalue()) == written
        view.watch(source())
        view(BEGIN)
        view.refresh()
        assert "0 of 4 slots busy" in on.file.getvalue()
        on.size = ConsoleDimensions(50, 10)
        written = len(on.file.getvalue())
        view.refresh()
        assert len(on.file.getvalue()) > written


def test_lines_are_told_above_the_panel_and_stay_when_it_goes():
    on = console()
    with LiveView(on, seconds_per_frame=None) as view:
        view.advance("busy", 0.5)
        view.refresh()
        view.tell("after update 1: [task] 50 %\nand \x1b[2J more")
    assert shows(on.file.getvalue()) == ["after update 1: [task] 50 %", "and �[2J more"]


def test_a_long_line_that_is_told_is_not_broken():
    on = console(width=20)
    with LiveView(on, seconds_per_frame=None) as view:
        view.tell("x" * 50)
    assert "x" * 50 in on.file.getvalue()


def shows(written: str) -> list[str]:
    """What a terminal shows in the end, of the few codes that are written to it."""
    rows, row = [""], 0
    for code in re.findall(r"\x1b\[[?\d;]*[a-zA-Z]|[^\x1b]", written):
        if code == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif code == "\x1b[1A":
            row -= 1
        elif code == "\x1b[2K":
            rows[row] = ""
        elif not code.startswith("\x1b") and code != "\r":
            rows[row] += code
    return [text for text in rows if text]


def test_without_colours_nothing_is_coloured():
    on = console(NO_COLOR="1")
    with LiveView(on, seconds_per_frame=None) as view:
        view.watch(source())
        view(BEGIN)
        view.refresh()
    assert "38;" not in on.file.getvalue()
    assert "slots" in on.file.getvalue()


def test_the_view_draws_by_itself_until_it_is_left():
    on, drawn = console(), threading.Event()

    def seconds() -> float:
        drawn.set()
        return 1.0

    with LiveView(on, seconds_per_frame=0.001) as view:
        view.watch(source(seconds=seconds))
        assert drawn.wait(10)
    assert "live view" not in {thread.name for thread in threading.enumerate()}
    assert shows(on.file.getvalue()) == []


def test_a_line_can_be_told_in_the_middle_of_an_event():
    """As the handler of a signal does, while the view draws."""
    on = console()
    view = LiveView(on, seconds_per_frame=0.0001)

    def figures() -> Figures:
        time.sleep(0.002)  # so that the other thread comes to where it waits
        view.tell("stopping")
        return Figures()

    update = Update(seconds=0, round=0, version=0, took_seconds=0, trained=(), closed=())
    events = threading.Thread(target=lambda: [view(update) for _ in range(50)], daemon=True)
    # Left only when all went well: two threads that wait for each other cannot be joined.
    view.__enter__()
    view.watch(source(figures=figures, seconds=time.monotonic))
    events.start()
    events.join(20)
    assert not events.is_alive()
    view.__exit__(None, None, None)
    assert shows(on.file.getvalue()) == ["stopping"] * 50


def test_an_update_begins_with_the_numbers_of_its_rollout():
    told = []
    with LiveView(console(), seconds_per_frame=None) as view:
        view.watch(source(figures=lambda: told.append("asked") or Figures()))
        for _ in range(3):
            view(BEGIN)
        assert len(told) == 1
        view.refresh()
        view(BEGIN)
        view(Update(seconds=0, round=0, version=0, took_seconds=0, trained=(), closed=()))
        assert len(told) == 3


def test_away_from_a_terminal_there_are_plain_lines(capsys):
    with opened_view() as view:
        assert isinstance(view, PlainView)
        view.advance("loading", 0.0)
        view.watch(source())
        view(BEGIN)
        view.updated({"reward/mean": 1.0})
        view.tell("a line")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "a line\n")


@pytest.mark.parametrize(
    ("environment", "is_live"),
    [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"TERM": "unknown"}, False)],
)
def test_only_a_terminal_that_can_draw_gets_a_picture(monkeypatch, environment, is_live):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stderr", Terminal())
    with opened_view() as view:
        assert isinstance(view, LiveView) == is_live


def test_a_file_that_passes_for_a_terminal_gets_no_picture(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with opened_view() as view:
        assert isinstance(view, PlainView)


def test_activities_follow_the_round():
    six = PRESETS["six"]()
    events: list[Event] = []
    simulate(replace(six, schedule=Schedule(group_prompts=6, update_batch=6)), record=events.append)
    said = [activity(event) for event in events if activity(event)]
    assert said == ["waiting for the rewards of 6 answers", "trained on 6 answers"]
