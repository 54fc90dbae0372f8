"""Our rollout function in the form in which slime's contract tests call it: without arguments.

They hand over `None` for slime's arguments, and a data source that only has `get_samples`.
"""

import json
import tempfile
from pathlib import Path

from slime.utils.eval_config import EvalDatasetConfig

import slime_run  # noqa: F401  the stand-in for sglang_router
from slime_run.router import Router
from slime_run.run import arguments
from sortedrl.integrations import slime as ours


class _Contract(ours.SortedDataSource):
    """Our data source over the samples of the contract tests."""

    def __init__(self, args, given):
        super().__init__(args)
        self._given = given

    def get_samples(self, num_samples):
        groups = self._given.get_samples(num_samples)
        for group in groups:
            for sample in group:
                sample.group_index = self.sample_group_index
                sample.tokens, sample.response, sample.response_length = [5, 2], "", 0
                sample.status, sample.reward = type(sample.status).PENDING, None
            self.sample_group_index += 1
        return groups


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    """Our function, with arguments and our data source."""
    folder, router = Path(tempfile.mkdtemp()), Router()
    rows = folder / "eval.jsonl"
    rows.write_text(json.dumps({"text": "w1 <start>"}) + "\n")
    made = arguments(folder, router)
    made.eval_max_prompt_len = None
    made.eval_datasets = [
        EvalDatasetConfig(
            name="contract",
            path=str(rows),
            input_key="text",
            n_samples_per_eval_prompt=1,
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            max_response_len=16,
        )
    ]
    return ours.generate_rollout(made, rollout_id, _Contract(made, data_source), evaluation)
