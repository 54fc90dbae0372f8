"""A small run second by second, as plain text: one row per slot, one column per second.

For runs where a decode step takes exactly one second, so that a letter is a token.
`story` tells in words what the rows show.
"""

from __future__ import annotations

from collections.abc import Sequence

from sortedrl.errors import ConfigError
from sortedrl.events import Begin, Event
from sortedrl.report.lanes import Lanes, lanes
from sortedrl.report.story import MAX_PROMPTS, letter, story

_MARGIN = 9
_BANDS = {"update": "|", "hand_over": ":", "rollout": "."}


def ticks(events: Sequence[Event]) -> str:
    """The rows of the slots, what the marks mean, and the story; without a last newline."""
    run = lanes(events)
    _check(run)
    begin = events[0]
    assert isinstance(begin, Begin)
    rows = [f"slot {slot + 1}".ljust(_MARGIN) + _row(run, slot) for slot in range(run.slots)]
    heading = f"{begin.schedule}: {run.slots} slots, {run.end - run.start:.0f} seconds"
    return "\n".join([heading, "", _scale(run), *rows, "", _legend(run), "", *story(events, run)])


def _check(run: Lanes) -> None:
    """Refuse a run that has no second-by-second picture."""
    if any(bar.decoded != bar.end - bar.start for bar in run.bars) or any(
        second % 1 for band in run.bands for second in (band.start, band.end)
    ):
        raise ConfigError(
            "a picture in ticks needs a run where every decode step takes 1 second and everything "
            "else whole seconds; choose hardware 'ticks', or draw the run as SVG"
        )
    prompts = max((bar.prompt for bar in run.bars), default=0) + 1
    if prompts > MAX_PROMPTS:
        raise ConfigError(
            f"a picture in ticks names prompts by letters, so there may be {MAX_PROMPTS}, "
            f"got {prompts}; choose the preset 'six', or draw the run as SVG"
        )


def _scale(run: Lanes) -> str:
    marks = (str(second).ljust(5) for second in range(0, int(run.end - run.start) + 1, 5))
    return ("second".ljust(_MARGIN) + "".join(marks)).rstrip()


def _row(run: Lanes, slot: int) -> str:
    row = [" "] * int(run.end - run.start)
    for band in run.bands:
        for second in range(int(band.start - run.start), int(band.end - run.start)):
            row[second] = _BANDS[band.kind]
    for bar in run.lanes[slot]:
        start = int(bar.start - run.start)
        kept = bar.decoded - bar.discarded
        for token in range(bar.decoded):
            mark = letter(bar.prompt)
            row[start + token] = mark if token < kept else mark.lower()
    return "".join(row).rstrip()


def _legend(run: Lanes) -> str:
    words = ["A: a token of prompt A"]
    if any(bar.discarded for bar in run.bars):
        words.append("a: one thrown away later")
    words += [".: idle slot", "|: update"]
    if any(band.kind == "hand_over" for band in run.bands):
        words.append(":: hand-over")
    return "   ".join(words)
