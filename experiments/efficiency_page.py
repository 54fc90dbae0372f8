"""The efficiency table on the results page, with its targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.efficiency import schedule_of
from experiments.markdown import caption, percent, table
from experiments.record import Record
from experiments.trials import ROOT
from sortedrl.config.parsing import read_toml

_HEAD = (
    "schedule",
    "groups",
    "bubble, %",
    "bubble of a group, min to max, %",
    "steady bubble, %",
    "goodput, tokens/s",
    "x sync",
    "throughput, tokens/s",
    "seconds, updates included",
    "trained tokens/s of all",
    "x sync",
)
_LEDGER = (
    "schedule",
    "decoded",
    "trained",
    "discarded",
    "kept at resumes",
    "prefilled again",
    "length bias",
    "KS distance",
    "staleness, mean and max",
    "updates",
    "update s",
    "weight sync s",
    "engine-trainer gap, nats",
)
_ORDER = ("sync", "posthoc", "sorted", "tail_batching", "april", "ungrouped")


def section(records: Sequence[Record]) -> str:
    """One pair of tables for each model."""
    parts = []
    settings = read_toml(ROOT / "experiments" / "efficiency.toml")
    arms = [schedule_of(arm, settings["workload"]).name for arm in settings["arms"]]
    for model in dict.fromkeys([*(r.numbers["model"] for r in records), *settings["run"]]):
        own = sorted((r for r in records if r.numbers["model"] == model), key=_place)
        parts += [_model(model, own)] if own else [f"### {model}"]
        done = {record.numbers["schedule"] for record in own}
        if left := [name for name in arms if name not in done]:
            parts.append(f"Not measured yet on {model}: {', '.join(left)}.")
    return "\n\n".join(parts)


def _model(model: str, records: Sequence[Record]) -> str:
    sync = next((r.numbers for r in records if r.numbers["arm"]["strategy"] == "sync"), None)
    load = records[0].numbers["workload"]
    about = (
        f"### {model} (measured)\n\n"
        f"{caption(records)}\n"
        f"Native engine, {load['precision']}, {load['slots']} slots, groups of {load['group']} "
        f"answers, update batches of {load['batch']}, forced lengths: lognormal with median "
        f"{load['median']:g} and sigma {load['sigma']:g}, at most {load['max_tokens']:,} tokens; "
        f"real updates (REINFORCE++, AdamW, learning rate {load['learning_rate']:g}), tolerance "
        f"{load['tolerance']:g} in coupled mode; seed {load['seed']}, one run each. "
        "The steady state lasts from the close of the first group to the load of the last one; it "
        "is shown if groups overlap."
    )
    rows = [_row(record.numbers, sync) for record in records]
    ledger = [_ledger(record.numbers) for record in records]
    parts = [about, table(_HEAD, rows), table(_LEDGER, ledger)]
    if sync is not None:
        parts.append(_aims(records, sync))
    return "\n\n".join(parts)


def _row(numbers: Mapping[str, Any], sync: Mapping[str, Any] | None) -> list[str]:
    run, groups = numbers["run"], numbers["group_bubbles"]
    return [
        numbers["schedule"],
        str(numbers["arm"]["groups"]),
        percent(run["bubble"]),
        f"{percent(min(groups))} - {percent(max(groups))}",
        percent(numbers["steady"]["bubble"]) if _has_steady(numbers) else "",
        f"{run['goodput']:,.0f}",
        _ratio(numbers, sync, "goodput"),
        f"{run['throughput']:,.0f}",
        f"{run['seconds']:.1f}",
        f"{run['trained_per_second']:,.0f}",
        _ratio(numbers, sync, "trained_per_second"),
    ]


def _ledger(numbers: Mapping[str, Any]) -> list[str]:
    run = numbers["run"]
    counts = ("decoded", "trained", "discarded", "kept", "prefilled_again")
    return [
        numbers["schedule"],
        *(f"{run[f'{name}_tokens']:,}" for name in counts),
        f"{numbers['length_bias']:.3f}",
        f"{numbers['length_ks']:.3f}",
        f"{run['mean_staleness']:.2f}, {run['max_staleness']}",
        str(run["updates"]),
        f"{numbers['update_seconds']:.1f}",
        f"{numbers['hand_over_seconds']:.3f}",
        f"{numbers['engine_trainer_gap']:.3f}",
    ]


def _aims(records: Sequence[Record], sync: Mapping[str, Any]) -> str:
    """The targets and the results, relative to `sync` of the same run."""
    rows = []
    for record in records:
        numbers, arm = record.numbers, record.numbers["arm"]
        ratio, bias = numbers["run"]["goodput"] / sync["run"]["goodput"], numbers["length_bias"]
        if arm["strategy"] != "sorted":
            continue
        if arm["mode"] == "partial" and _has_steady(numbers):
            bubble = numbers["steady"]["bubble"]
            rows += [
                _aim(numbers, "steady bubble at most 2 %", f"{percent(bubble)} %", bubble <= 0.02),
                _aim(numbers, "goodput at least 3 x sync", f"{ratio:.2f} x", ratio >= 3),
            ]
        if arm["mode"] == "coupled":
            rows += [
                _aim(numbers, "goodput at least 2 x sync", f"{ratio:.2f} x", ratio >= 2),
                _aim(numbers, "length bias within 2 % of 1", f"{bias:.3f}", abs(bias - 1) <= 0.02),
            ]
        if arm["mode"] == "on_policy":
            rows.append(
                _aim(
                    numbers,
                    "goodput at least 7.57 % above sync (the paper's gain in throughput)",
                    f"{100 * (ratio - 1):+.0f} %",
                    ratio >= 1.0757,
                )
            )
    return table(("schedule", "aim", "measured", "met"), rows)


def _aim(numbers: Mapping[str, Any], aim: str, measured: str, is_met: bool) -> list[str]:
    return [numbers["schedule"], aim, measured, "yes" if is_met else "no"]


def _has_steady(numbers: Mapping[str, Any]) -> bool:
    return bool(
        numbers["arm"]["lookahead"] and numbers["steady"] and numbers["steady"]["decoded_tokens"]
    )


def _ratio(numbers: Mapping[str, Any], sync: Mapping[str, Any] | None, name: str) -> str:
    return "" if sync is None else f"{numbers['run'][name] / sync['run'][name]:.2f}"


def _place(record: Record) -> tuple[int, str, int]:
    arm = record.numbers["arm"]
    return _ORDER.index(arm["strategy"]), arm["mode"], arm["lookahead"]
