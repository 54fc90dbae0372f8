"""The peer table on the results page: a table for each machine, and the differences of the set-ups.

Records of two machines never share a table, and each table names the commands, commits and versions
of its arms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from experiments import markdown
from experiments.peer_numbers import AGAINST, PeerRow, table, target_key
from experiments.record import Record

DIFFERENCES = (
    "TRL pads the answers of a batch to the longest of them; we pack them.",
    "TRL generates all answers of an update, then trains on them. So does `sync`, but with the "
    "native engine; `partial` and `coupled` start new prompts in free slots.",
    "`partial` and `coupled` form updates from the answers that finish first, so the training "
    "order differs. Their updates can have more answers than the batch size, so there can be fewer "
    "of them.",
    "`partial` also trains on stale tokens, corrected by truncated importance sampling.",
    "On a GPU, TRL generates with fp32 weights under bf16 autocast, and we with a bf16 copy; both "
    "train in fp32 under autocast. With continuous batching, TRL casts the trained weights to bf16 "
    "as well. On the CPU, both generate and train in fp32.",
    "TRL divides advantages by the standard deviation of a prompt's rewards plus 1e-4, we by it "
    "plus 1e-6.",
    "TRL scores in its own process between generation and update; we score in a worker process "
    "during generation.",
    "Sampling uses different random numbers, so answers differ: one seed shows which side is "
    "faster, not which learns better.",
    "Both clocks start when the model is loaded and stop during evaluations and while weights are "
    "saved. Imports do not count.",
)
"""Differences that neither side can avoid."""

_TRL_LIBRARIES = ("python", "trl", "torch", "transformers", "accelerate", "vllm")


def section(gpu: Sequence[Record], cpu: Sequence[Record]) -> str:
    """The table of each machine with its caption, then the differences."""
    parts = [
        f"{title}\n\n{machine_table(records)}\n\n{caption(records)}"
        for title, records in (("**On the GPU.**", gpu), ("**On the CPU, small.**", cpu))
        if _runs(records)
    ]
    listed = "\n".join(f"- {difference}" for difference in DIFFERENCES)
    parts.append(f"Differences between the two sides:\n\n{listed}")
    return "\n\n".join(parts) + "\n"


def machine_table(records: Sequence[Record]) -> str:
    """One row for each arm measured on a machine."""
    rows = table(records)
    targets = _open_targets(records)
    head = ["arm", "samples", "updates", "seconds", "samples/s", f"times {_name(AGAINST)}"]
    head += ["tokens/s", "samples/s, later", "in generation, %", "first score, %", "last score, %"]
    head += [f"samples and seconds to {100 * float(target):g} %" for target in targets]
    return markdown.table(head, [_cells(row, targets) for row in rows])


def caption(records: Sequence[Record]) -> str:
    """How the runs were measured: command, commit, machine, versions, seeds."""
    runs = _runs(records)
    own = [run.machine for run in runs if not _is_trl(run)]
    trl = [run.numbers["versions"] for run in runs if _is_trl(run)]
    versions = (
        [f"sortedrl with {_versions(own, ('torch', 'transformers', 'triton'))}"] if own else []
    )
    if trl:
        versions.append(f"TRL with {_versions(trl, _TRL_LIBRARIES)}")
    facts = [
        f"Command: {_distinct(f'`{run.command}`' for run in runs)}.",
        f"Commit: {_distinct(run.commit for run in runs)} ({_distinct(run.date for run in runs)}).",
        f"Machine: {_distinct(_machine(run) for run in runs)}; {'; '.join(versions)}.",
        f"Seeds: {_distinct(str(run.numbers['seed']) for run in runs)}; a cell is the mean over "
        "seeds, with minimum and maximum if they differ.",
        "Tokens are trained tokens. Later excludes the first updates, which warm up. A score is "
        "the share of right answers to held-out puzzles, interpolated linearly between "
        "evaluations.",
    ]
    loads = [run.numbers["load"] for run in runs if "load" in run.numbers]
    if loads:
        facts.append(
            "System load in the last minute of each run (1 is one busy core): "
            f"{min(loads):.1f} to {max(loads):.1f}."
        )
    if not trl:
        facts.append("No results of TRL on this machine.")
    return "\n".join(facts)


def _cells(row: PeerRow, targets: Sequence[str]) -> list[str]:
    cells = row.cells
    ratio = cells["samples_per_second_ratio"]
    texts = [
        _name(row.arm),
        cells["samples"].text(",.0f"),
        cells["updates"].text(".3g"),
        cells["seconds"].text(".1f"),
        cells["samples_per_second"].text(".1f"),
        "not measured" if ratio.mean is None else ratio.text(".2f"),
        cells["tokens_per_second"].text(",.0f"),
        cells["later_samples_per_second"].text(".1f"),
    ]
    for name in ("generation_share", "first_score", "last_score"):
        texts.append(cells[name].scaled(100).text(".1f"))
    for target in targets:
        samples = cells[target_key(target, "samples")]
        seconds = cells[target_key(target, "seconds")].text(".2f")
        text = samples.text(",.0f")
        texts.append(text if samples.mean is None else f"{text}, {seconds} s")
    return texts


def _open_targets(records: Sequence[Record]) -> list[str]:
    """The scores that some runs had not reached at the start."""
    runs = [run.numbers for run in _runs(records)]
    return [
        target
        for target in runs[0]["reached"]
        if any(run["first_score"] < float(target) for run in runs)
    ]


def _runs(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.numbers["kind"] == "run"]


def _is_trl(record: Record) -> bool:
    return "versions" in record.numbers


def _name(arm: str) -> str:
    """The display name of an arm."""
    kind, dash, way = arm.partition("-")
    return f"TRL, {way}" if dash and kind == "trl" else f"sortedrl, {arm}"


def _machine(record: Record) -> str:
    facts = record.machine
    return f"{facts['device']}, {facts['cores']} cores, Python {facts['python']}"


def _versions(found: Sequence[Mapping[str, str]], names: Sequence[str]) -> str:
    return ", ".join(
        f"{name} {_distinct(facts[name] for facts in found if name in facts)}"
        for name in names
        if any(name in facts for facts in found)
    )


def _distinct(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))
