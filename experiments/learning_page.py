"""The learning tables on the results page, with their charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.learning_rows import (
    LearningRow,
    arm_rows,
    figures,
    length_table,
    score_table,
    target_table,
)
from experiments.markdown import caption
from experiments.record import Record
from experiments.trials import ROOT
from sortedrl.config.parsing import read_toml

_SAMPLES, _SECONDS, _LENGTH, _ENTROPY = "score-samples", "score-seconds", "length", "entropy"


def logic(records: Sequence[Record], by_group: Sequence[Record], faster: Sequence[Record]) -> str:
    """Knights and Knaves; then whitened over groups, and with twice the learning rate."""
    parts = [_tables(records, "learning_logic")]
    if by_group:
        parts += _variant("Advantages whitened over a group", by_group)
        settings = _settings("learning_logic")
        parts += _targets(arm_rows(by_group, settings), settings)
    if faster:
        parts += _variant("Twice the learning rate", faster)
    return "\n\n".join(parts)


def _variant(title: str, records: Sequence[Record]) -> list[str]:
    rows = arm_rows(records, _settings("learning_logic"))
    return [
        f"### {title}\n\n{caption(records)}\nOtherwise as above.",
        score_table(rows),
    ]


def maths(records: Sequence[Record]) -> str:
    """Sums, with PPO and with GRPO."""
    return _tables(records, "learning_maths")


def questions(records: Sequence[Record]) -> str:
    """A pre-trained model on small questions, with natural lengths."""
    shown = [_tables(records, "learning_questions")]
    rows = arm_rows(records, _settings("learning_questions"))
    shown += [
        _picture("learning_questions", algorithm, _ENTROPY) for algorithm in _algorithms(rows)
    ]
    return "\n\n".join(shown)


def drawn(records: Sequence[Record], name: str, *, folder: Path) -> list[Path]:
    """Draw the charts that the tables show, and remove all others."""
    paths = figures(records, _settings(name), folder=folder, name=name)
    for path in paths:
        if not path.stem.endswith((*_curves(records), _LENGTH, _ENTROPY)):
            path.unlink()
    return [path for path in paths if path.exists()]


def _tables(records: Sequence[Record], name: str) -> str:
    settings = _settings(name)
    rows = arm_rows(records, settings)
    runs = [record.numbers for record in records if record.numbers["kind"] == "run"]
    seeds = sorted({run["seed"] for run in runs})
    at_once = max(run["runs_at_once"] for run in runs)
    load = "one run at a time"
    if at_once > 1:
        load = f"{at_once} concurrent runs share it, so seconds are comparable between arms only"
    parts = [
        f"{caption(records)}\nSeeds {', '.join(map(str, seeds))}: a cell is the mean over seeds, "
        f"with minimum and maximum; {load}.",
        *(
            _picture(name, algorithm, ending)
            for algorithm in _algorithms(rows)
            for ending in _curves(records)
        ),
        score_table(rows),
        *_targets(rows, settings),
        "Lengths, in tokens. *Written* are held-out answers, which are never interrupted, over the "
        "course of the run; length bias is the trained length over the written one:",
        length_table(rows),
        *(_picture(name, algorithm, _LENGTH) for algorithm in _algorithms(rows)),
    ]
    return "\n\n".join(parts)


def _targets(rows: Sequence[LearningRow], settings: Mapping[str, Any]) -> list[str]:
    """The cost to reach each score that more than one arm reached."""
    parts = []
    for target in settings["targets"]:
        costs = target_table(rows, target)
        if sum("not reached" not in line for line in costs.splitlines()[2:]) > 1:
            parts += [f"Cost to reach {100 * target:.0f} % accuracy:", costs]
    return parts


def _curves(records: Sequence[Record]) -> tuple[str, ...]:
    """Scores over samples; over seconds only on a GPU, which is used exclusively."""
    is_gpu = all("NVIDIA" in record.machine["device"] for record in records)
    return (_SAMPLES, _SECONDS) if is_gpu else (_SAMPLES,)


def _algorithms(rows: Sequence[LearningRow]) -> list[str]:
    return list(dict.fromkeys(row.algorithm for row in rows))


def _picture(name: str, algorithm: str, ending: str) -> str:
    words = f"{name.partition('_')[2]}, {algorithm}: {ending.replace('-', ' against ')}"
    return f"![{words}](img/{name}-{algorithm}-{ending}.svg)"


def _settings(name: str) -> Mapping[str, Any]:
    return read_toml(ROOT / "experiments" / f"{name}.toml")
