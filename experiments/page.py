"""Builds docs/results.md and its appendix from the result files.

Each section is a table module's `section` over its records, followed by the hand-written discussion
in its Markdown file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments import (
    ablations,
    efficiency_page,
    eight_billion,
    grpo_trl,
    learning_page,
    learning_rates,
    learning_seeds,
    long_run,
    natural,
    paper,
    peer,
    prediction,
)
from experiments.record import Record, Results
from experiments.summary import summary
from experiments.trials import ROOT
from sortedrl.cli.arguments import parse
from sortedrl.core.files import write_whole
from sortedrl.report.terminal import tell

HELP = """Write docs/results.md and docs/result-tables.md from the results.

--results and --out build the same pages from your own measurements.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of the appendix, and its folders of results."""

    title: str
    folders: tuple[str, ...]
    text: Callable[..., str]
    """Builds the tables from the records, one argument per folder."""
    readings: str
    """The Markdown file with the discussion."""


SECTIONS = (
    Section(
        title="Efficiency",
        folders=("efficiency",),
        text=efficiency_page.section,
        readings="efficiency",
    ),
    Section(
        title="Forty groups, the whole run",
        folders=("long_run",),
        text=long_run.section,
        readings="long_run",
    ),
    Section(
        title="8 billion weights on one card",
        folders=("eight_billion",),
        text=eight_billion.section,
        readings="eight_billion",
    ),
    Section(
        title="The simulator's predictions",
        folders=("prediction",),
        text=prediction.section,
        readings="prediction",
    ),
    Section(
        title="Lengths of the model's own",
        folders=("natural",),
        text=natural.section,
        readings="natural",
    ),
    Section(
        title="Learning: a pre-trained model, with lengths of its own",
        folders=("learning_questions",),
        text=learning_page.questions,
        readings="learning_questions",
    ),
    Section(
        title="Learning: logic",
        folders=("learning_logic", "learning_logic_group", "learning_logic_2e-4"),
        text=learning_page.logic,
        readings="learning_logic",
    ),
    Section(
        title="Learning: order and freshness",
        folders=("learning_seeds",),
        text=learning_seeds.section,
        readings="learning_seeds",
    ),
    Section(
        title="Learning: small batches and other rates",
        folders=("learning_rates",),
        text=learning_rates.section,
        readings="learning_rates",
    ),
    Section(
        title="Learning: arithmetic",
        folders=("learning_maths",),
        text=learning_page.maths,
        readings="learning_maths",
    ),
    Section(
        title="Ablations", folders=("ablations",), text=ablations.section, readings="ablations"
    ),
    Section(title="Against TRL", folders=("peer", "peer_cpu"), text=peer.section, readings="peer"),
    Section(
        title="SortedGRPOTrainer against TRL with vLLM",
        folders=("grpo_trl",),
        text=grpo_trl.section,
        readings="grpo_trl",
    ),
    Section(
        title="The paper's own set-ups (predicted)",
        folders=("paper",),
        text=paper.section,
        readings="paper",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Input and output paths."""

    results: Path = ROOT / "experiments" / "results"
    """Folder of the results."""
    out: Path = ROOT / "docs" / "results.md"
    """The page; the appendix is written next to it, charts to the folder img."""


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    given = parse(Arguments, arguments, prog="python -m experiments page", description=HELP)
    results = Results(given.results)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(given.out, summary(results).encode())
    appendix = given.out.parent / "result-tables.md"
    write_whole(appendix, page(results).encode())
    for path in pictures(results, given.out.parent / "img"):
        tell(f"wrote {path}")
    tell(f"wrote {given.out} and {appendix}")
    return 0


def page(results: Results) -> str:
    """The appendix: all sections that have results."""
    parts = [(ROOT / "experiments" / "page.md").read_text(encoding="utf-8")]
    for section in SECTIONS:
        records = [results.read(folder) for folder in section.folders]
        if any(records):
            parts.append(f"## {section.title}\n\n{section.text(*records)}\n")
            parts += _readings(section)
    return "\n".join(parts)


def pictures(results: Results, folder: Path) -> list[Path]:
    """Draw the learning curves."""
    drawn: list[Path] = []
    for name in ("learning_questions", "learning_logic", "learning_maths"):
        records: Sequence[Record] = results.read(name)
        if records:
            drawn += learning_page.drawn(records, name, folder=folder)
    return drawn


def _readings(section: Section) -> list[str]:
    path = ROOT / "experiments" / f"{section.readings}.md"
    return [path.read_text(encoding="utf-8")] if path.exists() else []
