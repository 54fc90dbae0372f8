"""docs/results.md: each claim with one table, one chart, and its limits.

The tables are built from the same records as the appendix (docs/result-tables.md); the text around
them is in summary.md, with one placeholder per name of `TABLES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

from experiments import grpo_trl, learning_rates
from experiments.learning_seeds import difference
from experiments.markdown import percent, table
from experiments.record import Record, Results
from experiments.trials import ROOT

_SHOWN = ("sync", "sorted/on_policy", "sorted/coupled", "sorted/partial +1")
_NAMES = {"smollm2-135m": "SmolLM2-135M", "qwen2_5-1_5b": "Qwen2.5-1.5B shape"}


def summary(results: Results) -> str:
    """The page: `summary.md` with a table for each placeholder `{name}`.

    Tables without results are marked as not measured.
    """
    text = (ROOT / "experiments" / "summary.md").read_text(encoding="utf-8")
    for name, (folder, made) in TABLES.items():
        records = results.read(folder)
        text = text.replace(f"{{{name}}}", made(records) if records else "Not measured.")
    return text


def _speed(records: Sequence[Record]) -> str:
    rows = []
    for model in dict.fromkeys(record.numbers["model"] for record in records):
        own = {r.numbers["schedule"]: r.numbers for r in records if r.numbers["model"] == model}
        base = own["sync"]["run"]["trained_per_second"]
        for name in _SHOWN:
            numbers = own[name]
            rows.append(
                [
                    _NAMES.get(model, model),
                    name,
                    percent(numbers["run"]["bubble"]),
                    f"{numbers['run']['trained_per_second']:,.0f}",
                    f"{numbers['run']['trained_per_second'] / base:.2f}",
                    f"{numbers['length_bias']:.2f}",
                    f"{numbers['run']['mean_staleness']:.2f}",
                ]
            )
    head = (
        "model",
        "schedule",
        "slots idle, %",
        "trained tokens/s, updates included",
        "x sync",
        "length bias",
        "mean staleness",
    )
    return table(head, rows)


def _eight(records: Sequence[Record]) -> str:
    rows = [
        [
            record.numbers["schedule"],
            percent(record.numbers["run"]["bubble"]),
            f"{record.numbers['run']['trained_per_second']:,.0f}",
            f"{record.numbers['ratio_to_sync_with_updates']:.2f}",
            f"{record.numbers['memory']['peak_gib']:.0f}",
        ]
        for record in sorted(records, key=lambda record: _order(record.numbers["schedule"]))
    ]
    head = (
        "schedule",
        "slots idle, %",
        "trained tokens/s, updates included",
        "x sync",
        "peak memory, GiB",
    )
    return table(head, rows)


def _by_arm(records: Sequence[Record]) -> dict[str, dict[int, Mapping[str, Any]]]:
    """The numbers of each schedule by seed."""
    arms: dict[str, dict[int, Mapping[str, Any]]] = {}
    for record in records:
        numbers = record.numbers
        if numbers["kind"] == "run":
            arms.setdefault(numbers["schedule"], {})[numbers["seed"]] = numbers
    return arms


def _questions(records: Sequence[Record]) -> str:
    arms = _by_arm(records)
    sync = arms["sync"]
    rows = []
    for name, runs in sorted(arms.items(), key=lambda arm: _order(arm[0])):
        shared = [seed for seed in runs if seed in sync]
        taken = {
            along: mean(
                runs[seed]["reached"]["0.4"][along] / sync[seed]["reached"]["0.4"][along]
                for seed in shared
            )
            for along in ("samples", "seconds")
        }
        rows.append(
            [
                name,
                str(len(runs)),
                percent(mean(run["last_score"] for run in runs.values())),
                "" if name == "sync" else difference(runs, sync, "last_score"),
                f"{taken['samples']:.2f}",
                f"{taken['seconds']:.2f}",
                percent(mean(run["bubble"] for run in runs.values())),
                f"{mean(run['last_held_out_length'] for run in runs.values()):.0f}",
            ]
        )
    head = (
        "schedule",
        "seeds",
        "final accuracy, %",
        "against sync, points",
        "samples to 40 %, of sync's",
        "seconds to 40 %, of sync's",
        "slots idle, %",
        "tokens of an answer at the end",
    )
    return table(head, rows)


def _seeds(records: Sequence[Record]) -> str:
    runs = [record for record in records if record.numbers.get("algorithm") == "rate_1e-4"]
    arms = _by_arm(runs)
    rows = [
        [
            name,
            str(len(own)),
            percent(mean(run["last_score"] for run in own.values())),
            *(
                "" if name == other else difference(own, arms[other], "last_score")
                for other in ("sync", "minibatch")
            ),
            f"{mean(run['mean_staleness'] for run in own.values()):.2f}",
            percent(mean(run["bubble"] for run in own.values())),
        ]
        for name, own in sorted(arms.items(), key=lambda arm: _order(arm[0]))
    ]
    head = (
        "schedule",
        "seeds",
        "final accuracy, %",
        "against sync, points",
        "against minibatch, points",
        "mean staleness",
        "slots idle, %",
    )
    return table(head, rows)


def _rates(records: Sequence[Record]) -> str:
    runs = [record for record in records if record.numbers["kind"] == "run"]
    shown = [learning_rates.HEAD, *learning_rates.rows(runs)]
    without = [learning_rates.HEAD.index(name) for name in ("deviation", "mean over the run, %")]
    head, *rows = [[cell for n, cell in enumerate(line) if n not in without] for line in shown]
    return table(head, rows)


def _grpo_trl(records: Sequence[Record]) -> str:
    return table(grpo_trl.HEAD, grpo_trl.rows(records))


def _predictions(records: Sequence[Record]) -> str:
    rows = []
    for record in records:
        found = [row for row in record.numbers["rows"] if row["schedule"] != "sorted/coupled"]
        bubbles = [100 * (r["predicted"]["bubble"] - r["measured"]["bubble"]) for r in found]
        goodputs = [100 * (r["predicted"]["goodput"] / r["measured"]["goodput"] - 1) for r in found]
        rows.append(
            [
                _NAMES.get(record.numbers["model"], record.numbers["model"]),
                str(len(found)),
                f"{mean(map(abs, bubbles)):.1f} (at most {max(map(abs, bubbles)):.1f})",
                f"{mean(map(abs, goodputs)):.1f} (at most {max(map(abs, goodputs)):.1f})",
            ]
        )
    head = ("model", "schedules predicted", "error of the bubble, points", "error of goodput, %")
    return table(head, rows)


def _order(name: str) -> tuple[int, str]:
    first = ("sync", "minibatch", "posthoc")
    return (first.index(name) if name in first else len(first), name)


TABLES: dict[str, tuple[str, Callable[[Sequence[Record]], str]]] = {
    "speed": ("efficiency", _speed),
    "eight": ("eight_billion", _eight),
    "questions": ("learning_questions", _questions),
    "seeds": ("learning_seeds", _seeds),
    "rates": ("learning_rates", _rates),
    "trl": ("grpo_trl", _grpo_trl),
    "predictions": ("prediction", _predictions),
}
"""The placeholders of `summary.md`: the folder of results, and the function for the table."""
