"""The part of the page about lengths: what was trained on against what the policy writes.

What the policy writes is not simply the finished answers, because long ones are interrupted more
often. It is estimated from finished and interrupted answers together (see `simulate.survival`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sortedrl.evaluation.tables import percent
from sortedrl.events import Finish, Start
from sortedrl.metrics import LengthBias
from sortedrl.report import courses
from sortedrl.report.axis import short
from sortedrl.report.histogram import Shape, histograms, length_bins
from sortedrl.report.html import table, unbroken
from sortedrl.report.record import Run
from sortedrl.report.sections.frame import course_figure, figure, framed, paragraph
from sortedrl.report.sections.remarks import remarks
from sortedrl.report.seeds import seed_groups
from sortedrl.simulate.survival import Stretch, Survival, stretches, written_lengths

_FAIR = 0.03
"""A length bias within this of 1 is told as none."""
_NOTABLE = 0.005
"""Share of answers not seen to their end from which it is worth a sentence."""
_NONE = "\N{EN DASH}"


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
    """Whether answers were thrown away and drawn again."""

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


def section(runs: Sequence[Run]) -> str:
    """Histograms of each run's lengths, and the length bias in words and numbers."""
    known = [(run, lengths) for run in runs if (lengths := lengths_of(run)) is not None]
    if not known:
        return ""
    biases = ((run.name, bias_words(run, lengths)) for run, lengths in known)
    rewards = ((run.name, words) for run, _ in known if (words := reward_words(run)))
    are_named = len(runs) > 1
    caption = (
        "The filled area is what was trained on, the outline what the policy writes when nothing "
        "interrupts it, estimated from finished and interrupted answers together. "
        "Heights are shares of answers."
    )
    return framed(
        "Lengths of answers",
        remarks(biases, are_named=are_named),
        figure(caption, _picture(known)),
        _numbers(known),
        remarks(rewards, are_named=are_named),
        course_figure(
            courses.lengths(runs),
            seed_groups([run.record for run in runs]),
            caption="Where the short answers of a group are trained on first, lengths climb from "
            "update to update until the group is used up.",
        ),
        paragraph(
            "The length bias is the mean length trained on over the mean length written; 1 is "
            "none. The KS distance is the largest gap between the two shares of answers up to a "
            "length."
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


def bias_words(run: Run, lengths: Lengths) -> str:
    """In a sentence or two, how what was trained on differs from what the policy writes."""
    bias = lengths.bias
    if bias is None:
        return "nothing was trained on yet."
    change = bias.ratio - 1
    if abs(change) <= _FAIR:
        words = "answers trained on are as long as what the policy writes"
    else:
        size = f"{100 * abs(change):.0f} %"
        words = f"answers trained on are {size} {'longer' if change > 0 else 'shorter'} than what "
        words += "the policy writes"
    return f"{words}{_reason(run, lengths, change=change)}.{_ends_words(lengths)}"


def _reason(run: Run, lengths: Lengths, *, change: float) -> str:
    if change >= -_FAIR:
        return ""
    if lengths.has_redraws:
        return ": long answers are cut off and drawn again"
    return "" if run.is_ended else ": short answers come first, and the run has not ended"


def _ends_words(lengths: Lengths) -> str:
    """What to know about the longest answers."""
    words = ""
    if lengths.truncated:
        share = percent(lengths.truncated / lengths.finished)
        words += f" {share} of the finished answers ended at the token limit."
    if lengths.unseen >= _NOTABLE:
        longest = lengths.written.survival[-1][0]
        words += (
            f" {percent(lengths.unseen)} of what it writes was not seen to its end and counts as "
            f"{longest:,} tokens, the longest seen: in truth it is longer."
        )
    return words


def _picture(known: Sequence[tuple[Run, Lengths]]) -> str:
    """All runs in the same bins."""
    every = [length for _, lengths in known for length in _all_lengths(lengths)]
    typical = min(lengths.written.quantile(0.5) for _, lengths in known)
    bins = length_bins(shortest=min(every), typical=typical, longest=max(every))
    shapes = []
    for run, lengths in known:
        bias, count = lengths.bias, lengths.trained.total()
        shapes.append(
            Shape(
                name=run.name,
                note=f"length bias {bias.ratio:.2f}" if bias else "nothing trained on yet",
                written=bins.shares(_ends(lengths.written)),
                written_mean=lengths.written.mean,
                trained=bins.shares((n, times / count) for n, times in lengths.trained.items()),
                trained_mean=bias.trained_mean if bias else 0.0,
            )
        )
    return histograms(shapes, bins=bins, title="Lengths trained on and written")


def _numbers(known: Sequence[tuple[Run, Lengths]]) -> str:
    rows: list[list[str]] = []
    for run, lengths in known:
        bias = lengths.bias
        told = (
            [short(bias.trained_mean), f"{bias.ratio:.2f}", f"{bias.ks_distance:.3f}"]
            if bias
            else [_NONE] * 3
        )
        at_limit = percent(lengths.truncated / lengths.finished) if lengths.finished else _NONE
        rows.append([run.name, short(lengths.written.mean), *told, unbroken(at_limit)])
    return table(
        ["", "mean written", "mean trained on", "length bias", "KS distance", "at the token limit"],
        rows,
        caption="Lengths in tokens",
        quiet=[False] * len(rows),
    )


def reward_words(run: Run) -> str:
    """Mean lengths of the answers with the highest reward and of the others, if both exist."""
    lengths = {key: tokens for key, _, tokens in run.metrics.trained_lengths}
    rewarded = [(run.rewards[key], n) for key, n in lengths.items() if key in run.rewards]
    best = max((reward for reward, _ in rewarded), default=0.0)
    high = [n for reward, n in rewarded if reward == best]
    low = [n for reward, n in rewarded if reward != best]
    if not high or not low:
        return ""
    return (
        f"answers with the highest reward, {best:g}, have {short(_mean(high))} tokens "
        f"on average ({len(high):,} answers), the others {short(_mean(low))} ({len(low):,})."
    )


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)


def _all_lengths(lengths: Lengths) -> Iterator[int]:
    yield from lengths.trained
    yield from (length for length, _ in lengths.written.survival)


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
