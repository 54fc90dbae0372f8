"""The reward and the rows of the paper's logic set-up in verl."""

import json
import runpy
from pathlib import Path

from sortedrl.cli import main

PROGRAM = runpy.run_path(str(Path(__file__).parents[1] / "paper" / "verl_logic.py"))


def test_worked_answers_earn_the_highest_reward_and_nothing_earns_the_lowest(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    assert main(["data", "generate", "knights_knaves:people=3-7,count=5", "--out", str(path)]) == 0
    for index, line in enumerate(path.read_text().splitlines()):
        row = json.loads(line)
        made = PROGRAM["verl_row"](row, index)
        truth = made["reward_model"]["ground_truth"]
        assert PROGRAM["compute_score"]("knights_knaves", row["response"], truth)["score"] == 3.0
        assert PROGRAM["compute_score"]("knights_knaves", "so?", truth)["score"] == -3.0
        assert made["prompt"] == row["prompt"]
        assert made["extra_info"] == {"index": index}
