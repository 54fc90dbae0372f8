"""The peer table on the page of results: a table for each machine, and what is not the same.

Records of two machines never share a table, and each of its arms stands under the command, the
commit and the versions it was measured with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from experiments import markdown
from experiments.peer_numbers import AGAINST, PeerRow, table, target_key
from experiments.record import Record

DIFFERENCES = (
    "TRL pads the answers of a batch to the longest of them; we pack them.",
    "TRL generates all answers of an update, then trains on them. `sync` does so too, but with "
    "our own engine; `partial` and `coupled` put new prompts into free slots.",
    "`partial` and `coupled` form their updates from the answers that are complete first, so the "
    "order of training is another. Their updates can have more answers than the batch asks for, "
    "so there can be fewer of them.",
    "`partial` trains on tokens of older weights too, and corrects them by truncated importance "
    "sampling.",
    "On a GPU TRL writes with fp32 weights under bf16 autocast, we with a bf16 copy; both learn in "
    "fp32 under autocast. With continuous batching TRL casts the weights it trains to bf16 as "
    "well. On the CPU both sides write and learn in fp32.",
    "TRL divides advantages by the standard deviation of a prompt's rewards plus 1e-4, we plus "
    "1e-6.",
    "TRL scores in its own process between generation and update; we score in a worker process "
    "while other answers are written.",
    "The random numbers of the sampling differ, so the answers do too: one seed shows how fast a "
    "side is, not which one learns better.",
    "The clock of both begins when the model is loaded and stands still while held-out puzzles "
    "are asked or weights are saved. Imports do not count.",
)
"""What is not the same on both sides, as neither can be told otherwise."""

_TRL_LIBRARIES = ("python", "trl", "torch", "transformers", "accelerate", "vllm")


def section(gpu: Sequence[Record], cpu: Sequence[Record]) -> str:
    """The table of each machine with how it was measured, then what differs, as Markdown."""
    parts = [
        f"{title}\n\n{machine_table(records)}\n\n{caption(records)}"
        for title, records in (("**On the GPU.**", gpu), ("**On the CPU, small.**", cpu))
        if _runs(records)
    ]
    listed = "\n".join(f"- {difference}" for difference in DIFFERENCES)
    parts.append(f"What is not the same on both sides:\n\n{listed}")
    return "\n\n".join(parts) + "\n"


def machine_table(records: Sequence[Record]) -> str:
    """One row for each arm that was measured on a machine."""
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
        "them, with the least and the most where they differ.",
        "Tokens are those trained on. Later is after the first updates, which warm up. A score is "
        "the share of right answers to held-out puzzles; between two evaluations its curve is "
        "taken as straight.",
    ]
    loads = [run.numbers["load"] for run in runs if "load" in run.numbers]
    if loads:
        facts.append(
            "Load of the machine in the last minute of each run, where 1 is one busy core: "
            f"{min(loads):.1f} to {max(loads):.1f}."
        )
    if not trl:
        facts.append("There is no result of TRL on this machine.")
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
    """The scores that not every run had from the start."""
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
    """How the page calls an arm."""
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
