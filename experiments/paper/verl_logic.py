"""Knights and Knaves for verl: rows as Parquet, and a reward function.

    sortedrl data generate knights_knaves:people=3-7,count=4500 --out kk.jsonl
    python experiments/paper/verl_logic.py kk.jsonl kk.parquet

Set verl's reward.custom_reward_function.path to this file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sortedrl.rewards.knights import logic_reward
from sortedrl.types import Prompt

_PUZZLE = ("names", "solution", "roles")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """The reward of an answer and its parts; `ground_truth` is the solution as JSON."""
    scores = logic_reward(Prompt(id=0, fields=json.loads(ground_truth)), solution_str)
    return {"score": scores.pop("reward"), **scores}


def verl_row(row: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A row of `sortedrl data generate` in verl's columns."""
    truth = json.dumps({name: row[name] for name in _PUZZLE})
    return {
        "data_source": "knights_knaves",
        "prompt": row["prompt"],
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": index},
    }


def main(source: Path, target: Path) -> None:
    """Write the rows of a JSONL file as Parquet."""
    import pyarrow
    from pyarrow import parquet

    lines = source.read_text(encoding="utf-8").splitlines()
    rows = [verl_row(json.loads(line), index) for index, line in enumerate(lines)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
