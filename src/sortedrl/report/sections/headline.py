"""The top of the page: what the runs learned and what their slots did, in words."""

from __future__ import annotations

from collections.abc import Sequence

from sortedrl.evaluation.tables import percent, points
from sortedrl.report.axis import short
from sortedrl.report.html import escape, prose
from sortedrl.report.record import Run


def opening(runs: Sequence[Run], *, title: str) -> str:
    """Title, headline, a few sentences, and what a reader must not miss."""
    unfinished = "".join(
        f"<li>{escape(run.name)} was stopped before its prompts were used up, or is still going "
        f"on: {run.metrics.run.trajectories:,} answers so far.</li>"
        for run in runs
        if not run.is_ended
    )
    notes = f'<ul class="notes">{unfinished}</ul>' if unfinished else ""
    return (
        f'<header><p class="kicker">{escape(title)}</p><h1>{prose(headline(runs))}</h1>'
        f'<p class="lead">{prose(lead(runs))}</p>{notes}</header>'
    )


def headline(runs: Sequence[Run]) -> str:
    """What the best run learned; or, where nothing was evaluated, how full the slots were."""
    scored = [run for run in runs if run.scores]
    if not scored:
        run = min(runs, key=lambda run: run.metrics.run.bubble)
        return f"{run.name}: the slots were idle for {percent(run.metrics.run.bubble)} of the time"
    best = max(scored, key=lambda run: run.scores[-1].score)
    first, last = best.scores[0].score, best.scores[-1].score
    if len(best.scores) == 1:
        return f"{best.name}: {percent(last)} right answers"
    if percent(first) == percent(last):
        return f"{best.name}: right answers stay at {percent(last)}"
    return f"{best.name}: right answers go from {percent(first)} to {percent(last)}"


def lead(runs: Sequence[Run]) -> str:
    """The gain of each run, and how full the slots were."""
    gains = [
        f"{points(run.scores[-1].score - run.scores[0].score)} points for {run.name}"
        for run in runs
        if len(run.scores) > 1
    ]
    words = [f"Gain on held-out prompts: {', '.join(gains)}."] if gains else []
    by_bubble = sorted(runs, key=lambda run: -run.metrics.run.bubble)
    worst, least = by_bubble[0], by_bubble[-1]
    before, after = worst.metrics.run, least.metrics.run
    if len(runs) == 1:
        words.append(
            f"Bubble: {percent(after.bubble)} of the slot-seconds of the rollouts were idle. "
            f"Of {after.ledger.decoded:,} tokens written, {after.ledger.trained:,} were trained on "
            f"and {after.ledger.discarded:,} thrown away. "
            f"Goodput: {short(after.goodput)} tokens trained on per second of rollout."
        )
    else:
        words.append(
            f"Bubble, the idle share of the rollouts' slot-seconds: from {percent(before.bubble)} "
            f"({worst.name}) to {percent(after.bubble)} ({least.name}). Goodput, with that: from "
            f"{short(before.goodput)} to {short(after.goodput)} tokens/s."
        )
    return " ".join(words)
