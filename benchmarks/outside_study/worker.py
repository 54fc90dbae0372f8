"""The verdict inside vLLM's worker: cached tokens are compared with the choice there.

It replaces a private method of vLLM's model runner, which other versions may not have. The worker
must live in this process, because the gaps it finds are read here.

Axes: P cached positions of one answer, V tokens of the vocabulary, Q = P as our sampling calls it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sortedrl.engines.native.noise import stream
from sortedrl.engines.native.sampling import Draw, choose
from sortedrl.types import Trajectory

GAPS: dict[tuple[int, int], float] = {}
"""By how many nats a cached token fell short, by (stream, position), from inside the worker."""


def watch_prompt_pass(worker: Any, *, is_on: bool = True) -> None:  # noqa: ANN401
    """Compare cached tokens with the choice inside the worker, from now on or no longer."""
    runner = worker.model_runner
    original = type(runner)._get_prompt_logprobs_dict

    def hooked(hidden: Tensor, scheduled: dict[str, int]) -> object:
        for request_id in runner.num_prompt_logprobs:
            if request_id in scheduled:
                _compare(runner, runner.requests[request_id], hidden, scheduled[request_id])
        return original(runner, hidden, scheduled)

    runner._get_prompt_logprobs_dict = hooked if is_on else original.__get__(runner)


def kept_in_worker(trajectory: Trajectory) -> int:
    """How many cached tokens stand by the gaps the worker found."""
    key = stream(trajectory.seed, trajectory.attempt)
    gaps = [GAPS[key, position] for position in range(trajectory.num_tokens)]
    return next((p for p, gap in enumerate(gaps) if gap > 0), len(gaps))


def _compare(runner: Any, request: Any, hidden: Tensor, scheduled: int) -> None:  # noqa: ANN401
    tokens = request.prompt_token_ids
    facts = request.sampling_params.extra_args
    answer_start = len(tokens) - facts["cached"]
    start = request.num_computed_tokens
    after = range(max(start + 1, answer_start), min(start + scheduled, len(tokens) - 1) + 1)
    if not after:
        return
    index = runner.input_batch.req_id_to_index[request.req_id]
    offset = int(runner.query_start_loc.np[index]) - start - 1
    logits_PV = runner.model.compute_logits(hidden[offset + after.start : offset + after.stop])
    positions = [place - answer_start for place in after]
    draw = Draw(
        streams_Q=torch.full((len(after),), facts["stream"]),
        positions_Q=torch.tensor(positions),
        inverse_temperatures_Q=torch.full((len(after),), facts["inverse_temperature"]),
        expected_Q=torch.tensor(tokens[after.start : after.stop]),
    )
    gaps = choose(logits_PV.float(), draw).gaps_Q.tolist()
    GAPS.update({(facts["stream"], p): gap for p, gap in zip(positions, gaps, strict=True)})
