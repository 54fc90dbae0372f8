"""Lengths of answers: what was trained on against what the policy writes.

What the policy writes is not simply the finished answers, because long ones are interrupted more
often. It is estimated from finished and interrupted answers together (see `simulate.lengths`).
In the histograms what was trained on is a filled area, what the policy writes an outline over it,
so that the two are told apart without colour. All panels share their bins and their scales.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from sortedrl.core.events import Finish, Start
from sortedrl.core.meter import LengthBias
from sortedrl.evaluation.tables import percent
from sortedrl.report.charts.svg import (
    FOOT,
    HEADING,
    NARROW,
    WIDTH,
    Canvas,
    Frame,
    round_steps,
    round_width,
    series_class,
    short,
)
from sortedrl.report.html import figure, paragraph, remarks, section, table, unbroken
from sortedrl.report.record import Run, chart_figure, length_chart, seed_groups
from sortedrl.simulate.lengths import Stretch, Survival, stretches, written_lengths

_FAIR = 0.03
"""A length bias within this of 1 counts as none."""
_NOTABLE = 0.005
"""Share of answers not seen to their end from which it is worth a sentence."""
_NONE = "\N{EN DASH}"

_LEFT, _RIGHT, _ASIDE = 52, 16, 40
_TALL, _HEADROOM = 150, 36
_MOST = 48
_SPREAD = 12.0
"""From this many times the typical length on, lengths are drawn on a logarithmic axis."""
Shares = tuple[float, ...]
"""For each bin the share of the answers in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The lengths of one run: estimated for what the policy writes, counted for the rest."""

    written: Survival
    unseen: float
    """Share of what the policy writes that was not seen to its end: it counts as long as seen."""
    trained: Counter[int]
    finished: int
    """Answers that were complete, trained on or not."""
    truncated: int
    """Of those, the ones that ended at the token limit."""
    has_redraws: bool
    """Whether answers were discarded and generated again."""

    @property
    def bias(self) -> LengthBias | None:
        """Trained on against written; `None` while nothing is trained on."""
        count = self.trained.total()
        if not count:
            return None
        return LengthBias(
            trained_mean=sum(length * n for length, n in self.trained.items()) / count,
            reference_mean=self.written.mean,
            ks_distance=_largest_gap(self.trained, self.written),
        )


def lengths_section(runs: Sequence[Run]) -> str:
    """Histograms of each run's lengths, and the length bias as text and as numbers."""
    known = [(run, lengths) for run in runs if (lengths := lengths_of(run)) is not None]
    if not known:
        return ""
    biases = ((run.name, bias_text(run, lengths)) for run, lengths in known)
    rewards = ((run.name, text) for run, _ in known if (text := reward_text(run)))
    are_named = len(runs) > 1
    caption = (
        "The filled area is what was trained on, the outline what the policy generates when "
        "nothing interrupts it, estimated from finished and interrupted answers together. "
        "Heights are shares of answers."
    )
    return section(
        "Answer lengths",
        remarks(biases, are_named=are_named),
        figure(caption, *(_picture(known, width=width) for width in (WIDTH, NARROW))),
        _numbers(known),
        remarks(rewards, are_named=are_named),
        chart_figure(
            length_chart(runs),
            seed_groups([run.record for run in runs]),
            caption="Where the short answers of a group are trained on first, lengths rise from "
            "update to update until the group is exhausted.",
        ),
        paragraph(
            "The length bias is the mean length trained on over the mean length generated; 1 "
            "means no bias. The KS distance is the largest gap between the two cumulative "
            "distributions of lengths."
        ),
        name="lengths",
    )


def lengths_of(run: Run) -> Lengths | None:
    """The lengths of a run; `None` while no token was written."""
    seen = [stretch for stretch in stretches(run.record.events) if stretch.exit > stretch.entry]
    if not seen:
        return None
    written = written_lengths(seen)
    finishes = [event for event in run.record.events if isinstance(event, Finish)]
    return Lengths(
        written=written,
        unseen=_unseen(written, seen),
        trained=Counter(tokens for _, _, tokens in run.metrics.trained_lengths),
        finished=len(finishes),
        truncated=sum(event.reason == "length" for event in finishes),
        has_redraws=any(event.attempt for event in run.record.events if isinstance(event, Start)),
    )


def bias_text(run: Run, lengths: Lengths) -> str:
    """In a sentence or two, how what was trained on differs from what the policy writes."""
    bias = lengths.bias
    if bias is None:
        return "no updates yet."
    change = bias.ratio - 1
    if abs(change) <= _FAIR:
        text = "answers trained on are as long as what the policy generates"
    else:
        size = f"{100 * abs(change):.0f} %"
        text = f"answers trained on are {size} {'longer' if change > 0 else 'shorter'} than what "
        text += "the policy generates"
    return f"{text}{_reason(run, lengths, change=change)}.{_ends_text(lengths)}"


def _reason(run: Run, lengths: Lengths, *, change: float) -> str:
    if change >= -_FAIR:
        return ""
    if lengths.has_redraws:
        return ": long answers are interrupted and generated again"
    return "" if run.is_ended else ": short answers come first, and the run has not ended"


def _ends_text(lengths: Lengths) -> str:
    """What to know about the longest answers."""
    text = ""
    if lengths.truncated:
        share = percent(lengths.truncated / lengths.finished)
        text += f" {share} of the finished answers ended at the token limit."
    if lengths.unseen >= _NOTABLE:
        longest = lengths.written.survival[-1][0]
        text += (
            f" {percent(lengths.unseen)} of what it generates never finished and counts as "
            f"{longest:,} tokens, the longest length seen; the true lengths are longer."
        )
    return text


def _picture(known: Sequence[tuple[Run, Lengths]], *, width: int) -> str:
    """All runs in the same bins."""
    every = [n for _, known_ in known for n in (*known_.trained, *dict(known_.written.survival))]
    typical = min(lengths.written.quantile(0.5) for _, lengths in known)
    bins = length_bins(shortest=min(every), typical=typical, longest=max(every))
    shapes = []
    for run, lengths in known:
        bias, count = lengths.bias, lengths.trained.total()
        shapes.append(
            Shape(
                name=run.name,
                note=f"length bias {bias.ratio:.2f}" if bias else "no updates yet",
                written=bins.shares(_ends(lengths.written)),
                written_mean=lengths.written.mean,
                trained=bins.shares((n, times / count) for n, times in lengths.trained.items()),
                trained_mean=bias.trained_mean if bias else 0.0,
            )
        )
    title = "Lengths trained on and generated"
    return histograms(shapes, bins=bins, title=title, width=width)


def _numbers(known: Sequence[tuple[Run, Lengths]]) -> str:
    """A column for each run."""
    columns = []
    for _, lengths in known:
        bias = lengths.bias
        cells = (
            [short(bias.trained_mean), f"{bias.ratio:.2f}", f"{bias.ks_distance:.3f}"]
            if bias
            else [_NONE] * 3
        )
        at_limit = percent(lengths.truncated / lengths.finished) if lengths.finished else _NONE
        columns.append([short(lengths.written.mean), *cells, unbroken(at_limit)])
    names = (
        "mean generated",
        "mean trained on",
        "length bias",
        "KS distance",
        "at the token limit",
    )
    return table(
        ["", *(run.name for run, _ in known)],
        [[name, *row] for name, *row in zip(names, *columns, strict=True)],
        caption="Lengths in tokens",
    )


def reward_text(run: Run) -> str:
    """Mean lengths of the answers with the highest reward and of the others, if both exist."""
    lengths = {key: tokens for key, _, tokens in run.metrics.trained_lengths}
    rewarded = [(run.rewards[key], n) for key, n in lengths.items() if key in run.rewards]
    best = max((reward for reward, _ in rewarded), default=0.0)
    high = [n for reward, n in rewarded if reward == best]
    low = [n for reward, n in rewarded if reward != best]
    if not high or not low:
        return ""
    return (
        f"answers with the highest reward, {best:g}, have {short(fmean(high))} tokens "
        f"on average ({len(high):,} answers), the others {short(fmean(low))} ({len(low):,})."
    )


def _ends(written: Survival) -> Iterator[tuple[int, float]]:
    """The share of answers that end at each length."""
    before = 1.0
    for length, longer in written.survival:
        yield length, before - longer
        before = longer


def _unseen(written: Survival, seen: Sequence[Stretch]) -> float:
    """The share that ends in the estimate only because nothing longer was seen."""
    last, _ = written.survival[-1]
    exits = [stretch for stretch in seen if stretch.exit == last]
    unfinished = sum(not stretch.is_finished for stretch in exits)
    *_, (_, share) = _ends(written)
    return share * unfinished / len(exits) if exits else 0.0


def _largest_gap(trained: Counter[int], written: Survival) -> float:
    """The largest difference between the shares of answers up to a length."""
    count = trained.total()
    ends = dict(_ends(written))
    gap = difference = 0.0
    for length in sorted({*trained, *ends}):
        difference += trained[length] / count - ends.get(length, 0.0)
        gap = max(gap, abs(difference))
    return gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """Neighbouring bins: bin `i` holds the lengths from `edges[i]` to below `edges[i + 1]`."""

    edges: tuple[int, ...]
    is_log: bool

    def x(self, length: float) -> float:
        """The place of a length on the axis, 0 to 1."""
        first, last = self.edges[0], self.edges[-1]
        if self.is_log:
            return math.log(length / first) / math.log(last / first)
        return (length - first) / (last - first)

    def shares(self, weights: Iterable[tuple[int, float]]) -> Shares:
        """The sums of the weights of lengths in each bin."""
        sums = [0.0] * (len(self.edges) - 1)
        for length, weight in weights:
            sums[bisect_right(self.edges, length) - 1] += weight
        return tuple(sums)

    def marks(self) -> list[int]:
        """Round lengths on the axis."""
        first, last = self.edges[0], self.edges[-1]
        if not self.is_log:
            return [int(mark) for mark in round_steps(last, count=6) if mark >= first]
        steps = [m * 10**power for power in range(9) for m in (1, 2, 5)]
        marks = [step for step in steps if first <= step <= last]
        return marks if len(marks) <= 7 else marks[::2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The lengths of one run; each mean belongs to shares that are not all 0."""

    name: str
    note: str
    written: Shares
    written_mean: float
    trained: Shares
    trained_mean: float


def length_bins(*, shortest: int, typical: float, longest: int) -> Bins:
    """Bins for all these lengths: round and even ones, or of even ratio where some are huge."""
    shortest = max(1, shortest)
    if longest <= _SPREAD * typical:
        width = round_width(longest + 1, bins=_MOST)
        return Bins(edges=tuple(range(0, longest + width + 1, width)), is_log=False)
    ratio = ((longest + 1) / shortest) ** (1 / _MOST)
    edges = {round(shortest * ratio**place) for place in range(_MOST)}
    return Bins(edges=(*sorted(edges - {longest + 1}), longest + 1), is_log=True)


def histograms(shapes: Sequence[Shape], *, bins: Bins, title: str, width: int = WIDTH) -> str:
    """The lengths of runs as a picture for a page, two beside each other where it is wide."""
    across = 1 if len(shapes) == 1 or width < WIDTH else 2
    wide = (width - (across - 1) * _ASIDE) / across
    pitch = HEADING + _HEADROOM + _TALL + FOOT
    canvas = Canvas(width, pitch * math.ceil(len(shapes) / across), label=title)
    most = max((share for s in shapes for share in (*s.written, *s.trained)), default=0.0) or 1.0
    for place, shape in enumerate(shapes):
        left = (wide + _ASIDE) * (place % across)
        top = pitch * (place // across) + HEADING
        whole = Frame(left=left, right=left + wide - _RIGHT, top=top, floor=top + 1)
        whole.draw_name(canvas, shape.name, note=shape.note, css=series_class(place))
        top += _HEADROOM
        frame = replace(whole, left=left + _LEFT, top=top, floor=top + _TALL, y_end=most)
        heights = round_steps(100 * most, count=3)
        frame.draw_heights(canvas, [(mark / 100, f"{short(mark)} %") for mark in heights])
        places = [(bins.x(mark), short(mark)) for mark in bins.marks()]
        label = "tokens, on a logarithmic scale" if bins.is_log else "tokens"
        frame.draw_places(canvas, places, label=label)
        _draw_shape(canvas, shape, bins=bins, frame=frame, css=series_class(place))
    return canvas.inline()


def _draw_shape(canvas: Canvas, shape: Shape, *, bins: Bins, frame: Frame, css: str) -> None:
    edges = [frame.x(bins.x(edge)) for edge in bins.edges]
    outline = [(edges[0], frame.floor)]
    for place, written in enumerate(shape.written):
        trained = shape.trained[place]
        first, last = bins.edges[place], bins.edges[place + 1] - 1
        range_text = f"{first:,} to {last:,} tokens" if first < last else f"{first:,} tokens"
        outline += [(x, frame.y(written)) for x in edges[place : place + 2]]
        if trained:
            canvas.rect(
                edges[place],
                frame.y(trained),
                width=edges[place + 1] - edges[place],
                height=frame.floor - frame.y(trained),
                css=css,
                title=f"{range_text}: {percent(trained)} of the answers trained on, "
                f"{percent(written)} of what the policy generates",
            )
    with canvas.group(title=f"{shape.name}: what the policy generates"):
        canvas.path([*outline, (edges[-1], frame.floor)], css="curve whisker")
    if any(shape.written):
        _draw_mean(
            canvas, "generated", shape.written_mean, bins=bins, frame=frame, row=1, css="whisker"
        )
    if any(shape.trained):
        _draw_mean(
            canvas, "trained", shape.trained_mean, bins=bins, frame=frame, row=2, css="guide"
        )


def _draw_mean(
    canvas: Canvas, what: str, mean: float, *, bins: Bins, frame: Frame, row: int, css: str
) -> None:
    """A line at the mean from its label down to the axis; each kind has its own row for labels."""
    x = frame.x(bins.x(mean))
    y = frame.top - _HEADROOM + 15 * row
    is_left = x < frame.x(0.5)
    text = f"mean {what} {short(mean)}"
    canvas.line(x, y - 9, x2=x, y2=frame.floor, css=css)
    canvas.text(
        x + (5 if is_left else -5),
        y,
        content=text,
        css="head",
        anchor="start" if is_left else "end",
    )
