"""Rules that map symptoms in the numbers to settings worth trying.

A rule reads the findings and makes proposals; the simulator decides whether they help.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sortedrl.config.schedule import EngineSettings, ModeName, Schedule
from sortedrl.evaluation.tables import percent
from sortedrl.report.advice.simulation import Forecast, IdleSlots

Changes = Mapping[str, object]
"""Settings by dotted name; `None` removes a setting."""
About = Literal["learning", "speed", "extrapolation", "memory", "note"]
"""learning: worth its price in speed. speed: only worth its gain. extrapolation: a gain outside the
range that the run has shown. memory: worth it without a gain. note: not predicted."""

_BUBBLE = 0.02
_MOST = 0.5
_DISCARDED_PER_TRAINED = 0.2
_LOW_SAMPLE_SIZE = 0.5
_TRUNCATED = 0.05
_SELDOM_FULL = 0.01
_UPDATE_SHARE = 0.4
_STEP_SHARE = 0.4
_SAVING_SHARE = 0.1

_COUPLED = "Every token stays on-policy; resumed answers need another prefill."
_PARTIAL = "Tokens of older weights are trained on, so the correction must stay on."


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A symptom, and options for one remedy, mildest first."""

    symptom: str
    options: tuple[Changes, ...] = ()
    cost: str
    about: About = "speed"
    remedy: str | None = None
    """Text of the remedy, if it is not a change of settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The settings of the run and its measured numbers."""

    schedule: Schedule
    engine: EngineSettings
    measured: Forecast
    discarded_per_trained: float
    idle: IdleSlots
    num_prompts: int
    is_group_known: bool
    """Whether `schedule.group_prompts` is known rather than guessed."""
    truncated_share: float
    """Share of the answers that ended at the token limit."""
    update_seconds: float
    """Mean seconds of an update."""
    update_share: float
    """Share of the time spent on updates and weight syncs, without saving."""
    saving_share: float
    """Share of the time spent on saving checkpoints and logs."""
    sample_size: float | None
    """Effective sample size as a share, over the last half of the updates; `None`: not logged."""
    is_mismatch_measured: bool
    step_share: float
    """Share of a full decode step that does not depend on the number of running answers."""


def mean_sample_size(rows: Sequence[Mapping[str, object]]) -> float | None:
    """The effective sample size over the last half of the updates."""
    sizes = [row.get("correction/ess") for row in rows]
    known = [float(size) for size in sizes if isinstance(size, int | float)]
    later = known[len(known) // 2 :]
    return sum(later) / len(later) if later else None


def proposals(found: Findings) -> Iterator[Proposal]:
    """Everything worth trying, in no particular order."""
    for rule in (_sample_size, _tail, _not_sorted, _discarded, _never_full, _updates, _more_slots):
        yield from rule(found)
    yield from _truncated(found)
    yield from _saving(found)


def _tail(found: Findings) -> Iterator[Proposal]:
    """The last long answers of a group run alone: open the next group early."""
    idle, ahead = found.idle, found.schedule.lookahead
    is_tail = idle.tail_share >= _MOST
    if found.schedule.strategy != "sorted" or found.measured.bubble < _BUBBLE or not is_tail:
        return
    yield Proposal(
        symptom=f"{percent(found.measured.bubble)} of the slot-seconds of the rollout were idle, "
        f"and {percent(idle.tail_share)} of these in the tail of a group: nothing was waiting "
        "while its last long answers ran.",
        options=tuple({"schedule.lookahead": ahead + more} for more in (1, 2)),
        cost="More groups are open at a time, so an answer may wait through more updates.",
    )


def _not_sorted(found: Findings) -> Iterator[Proposal]:
    """Slots wait for the longest answer of a batch: train on complete ones."""
    schedule, idle = found.schedule, found.idle
    if schedule.strategy == "sorted" or found.measured.bubble < _BUBBLE:
        return
    waits = (
        "each update waited for the longest answer of its batch"
        if schedule.never_interrupts
        else f"strategy {schedule.strategy} did not fill them"
    )
    symptom = (
        f"{percent(found.measured.bubble)} of the slot-seconds of the rollout were idle, "
        f"{percent((idle.tail + idle.ending) / idle.total)} of these with nothing waiting: "
        f"{waits}."
    )
    modes: tuple[ModeName, ...] = ("coupled", "partial")
    for mode in modes:
        to_sorted = {"schedule.strategy": "sorted", **_to_mode(found, mode)}
        if not found.is_group_known:
            to_sorted["schedule.group_prompts"] = schedule.group_prompts
        yield Proposal(
            symptom=symptom,
            options=(to_sorted, *({**to_sorted, "schedule.lookahead": n} for n in (1, 2))),
            cost=f"{_mode_cost(found, mode)} Short answers are trained on before long ones. "
            "Each freed slot is refilled with its own prefill; many small prefills may cost more "
            "than the large ones of this run.",
            about="extrapolation" if schedule.never_interrupts else "speed",
        )


def _discarded(found: Findings) -> Iterator[Proposal]:
    """Tokens are discarded: keep them."""
    schedule, share = found.schedule, found.discarded_per_trained
    if share < _DISCARDED_PER_TRAINED or schedule.never_interrupts:
        return
    symptom = f"{share:.2f} tokens were discarded for each token trained on"
    if schedule.max_staleness is not None:
        yield Proposal(
            symptom=f"{symptom}: max_staleness {schedule.max_staleness} drops older ones.",
            options=({"schedule.max_staleness": 2 * schedule.max_staleness + 1},),
            cost=_PARTIAL,
        )
    if schedule.mode != "coupled":
        yield Proposal(
            symptom=f"{symptom}.",
            options=(_to_mode(found, "coupled"),),
            cost=_mode_cost(found, "coupled"),
        )
    if schedule.mode != "partial":
        yield Proposal(
            symptom=f"{symptom}.",
            options=(_to_mode(found, "partial"),),
            cost=_mode_cost(found, "partial")
            + (
                " A larger schedule.tolerance is a compromise between the two."
                if schedule.mode == "coupled"
                else ""
            ),
        )


def _sample_size(found: Findings) -> Iterator[Proposal]:
    """Stale tokens have little weight: train on fresher ones, at some cost in speed."""
    size, schedule, oldest = found.sample_size, found.schedule, found.measured.max_staleness
    if size is None or size >= _LOW_SAMPLE_SIZE:
        return
    symptom = f"The effective sample size is {percent(size)} of the trained tokens"
    if oldest == 0:
        yield Proposal(
            symptom=f"{symptom}, although no token is stale.",
            remedy="Reduce the engine-trainer mismatch: check gap/mean, and the precision of the "
            "rollout weights and the logits.",
            cost="None; not related to the schedule.",
            about="note",
        )
        return
    symptom += (
        f", with tokens {found.measured.mean_staleness:.1f} versions stale on average and "
        f"at most {oldest}."
    )
    if schedule.mode == "partial" and not schedule.never_interrupts:
        yield Proposal(
            symptom=symptom,
            options=({"schedule.max_staleness": oldest // 2},),
            cost="Older tokens are discarded and generated again. A stricter correction.max_ratio "
            "bounds the importance weights instead, at no cost in speed.",
            about="learning",
        )
    changes: Changes = _to_mode(found, "coupled")
    if schedule.splits_rollouts:
        changes = {"schedule.strategy": "sorted", **changes}
    yield Proposal(
        symptom=symptom,
        options=(changes,),
        cost=_mode_cost(found, "coupled"),
        about="learning",
    )


def _never_full(found: Findings) -> Iterator[Proposal]:
    """More slots than work: load more prompts, or use fewer slots."""
    idle, schedule, slots = found.idle, found.schedule, found.engine.slots
    if idle.full_share >= _SELDOM_FULL or not idle.peak:
        return
    symptom = (
        f"The {slots} slots were all busy in {percent(idle.full_share)} of the rollout; "
        f"at most {idle.peak} answers ran at a time."
    )
    larger = [schedule.group_prompts * factor for factor in (2, 4)]
    if schedule.strategy == "sorted" or schedule.splits_rollouts:
        yield Proposal(
            symptom=symptom,
            options=tuple(
                {"schedule.group_prompts": size} for size in larger if size <= found.num_prompts
            ),
            cost="A group stays open for more updates before the next prompts are loaded.",
        )
    if idle.peak < slots:
        yield Proposal(
            symptom=symptom,
            options=({"engine.slots": idle.peak},),
            cost="None; the KV cache of the unused slots is freed.",
            about="memory",
        )


def _updates(found: Findings) -> Iterator[Proposal]:
    """Little of the time is rollout: make fewer updates."""
    schedule, share = found.schedule, found.update_share
    if share < _UPDATE_SHARE:
        return
    options: list[Changes] = []
    for batch in (2 * schedule.update_batch, 4 * schedule.update_batch):
        prompts = -(-batch // schedule.samples_per_prompt)
        if prompts > found.num_prompts:
            break
        options.append(
            {"schedule.update_batch": batch}
            if batch <= schedule.group_trajectories
            else {"schedule.update_batch": batch, "schedule.group_prompts": prompts}
        )
    yield Proposal(
        symptom=f"{percent(share)} of the time went to updates and weight syncs, "
        f"{found.update_seconds:.2g} s per update.",
        options=tuple(options),
        cost="Fewer and larger updates for the same answers.",
    )


def _more_slots(found: Findings) -> Iterator[Proposal]:
    """A step hardly gets slower with more answers: generate more at a time.

    Not if interrupted answers are resampled: more slots would then discard more.
    """
    is_redrawn = found.schedule.mode in ("on_policy", "redraw")
    if is_redrawn and not found.schedule.never_interrupts:
        return
    if found.idle.full_share < _MOST or found.step_share < _STEP_SHARE:
        return
    slots = found.engine.slots
    yield Proposal(
        symptom=f"All {slots} slots were busy in {percent(found.idle.full_share)} of the rollout, "
        f"and {percent(found.step_share)} of the step time does not depend on how many are.",
        options=({"engine.slots": 2 * slots},),
        cost="The KV cache must hold them. The costs were fitted with fewer concurrent answers, "
        "and a compute-bound device gains less.",
        about="extrapolation",
    )


def _truncated(found: Findings) -> Iterator[Proposal]:
    """Answers are truncated: report it."""
    if found.truncated_share < _TRUNCATED:
        return
    yield Proposal(
        symptom=f"{percent(found.truncated_share)} of the answers ended at the limit of "
        f"{found.engine.max_tokens:,} tokens.",
        remedy="Raise engine.max_tokens, if these answers would finish on their own.",
        cost="Not predicted: the log does not show how long they would become. They would lengthen "
        "the tail and need more KV cache.",
        about="note",
    )


def _saving(found: Findings) -> Iterator[Proposal]:
    """Checkpoints take a large share of the time: save less often."""
    if found.saving_share < _SAVING_SHARE:
        return
    yield Proposal(
        symptom=f"{percent(found.saving_share)} of the time went to saving checkpoints and logs.",
        remedy="Raise saving.every.",
        cost="A run that is killed repeats the updates since its last checkpoint.",
        about="note",
    )


def _to_mode(found: Findings, mode: ModeName) -> dict[str, object]:
    """The change of mode, without settings that the new mode does not accept."""
    changes: dict[str, object] = {}
    # If nothing is interrupted, the current mode has no effect, so the new one is always named.
    if mode != found.schedule.mode or found.schedule.never_interrupts:
        changes["schedule.mode"] = mode
    if mode != "coupled" and found.schedule.tolerance is not None:
        changes["schedule.tolerance"] = None
    if mode != "partial" and found.schedule.max_staleness is not None:
        changes["schedule.max_staleness"] = None
    return changes


def _mode_cost(found: Findings, mode: ModeName) -> str:
    if mode == "partial":
        return _PARTIAL
    if found.is_mismatch_measured:
        return _COUPLED
    return (
        f"{_COUPLED} The survival rate of cached tokens is assumed (fp32 weights); "
        "rollout weights in bf16 lose more."
    )
