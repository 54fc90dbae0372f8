"""The two engines of transformers: padded batches, and continuous batching."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
)

from engine_peers.peer import SHORT, Sample, Workload, clock, free_memory


class Generate:
    """transformers' `generate`: left-padded batches, each as long as its longest answer."""

    note = "no log-probabilities (favours it)"

    def __init__(self, model: PreTrainedModel, workload: Workload) -> None:
        """A copy of the model."""
        self._model = _without_stop_tokens(model)
        self._workload = workload

    def warm_up(self) -> None:
        """Run a few tokens of the first batch."""
        slots = self._workload.slots
        self._batch(self._workload.prompts[:slots], new_tokens=SHORT)

    def run(self, seed: int) -> Sample:
        """Run batch after batch, in the order of the requests."""
        torch.manual_seed(seed)
        workload = self._workload
        steps, began = 0, clock(workload.device)
        for start in range(0, len(workload.prompts), workload.slots):
            longest = max(workload.lengths[start : start + workload.slots])
            self._batch(workload.prompts[start : start + workload.slots], new_tokens=longest)
            steps += longest
        seconds = clock(workload.device) - began
        occupancy = workload.tokens / (steps * workload.slots)
        return Sample(seconds=seconds, tokens=workload.tokens, occupancy=occupancy, steps=steps)

    def close(self) -> None:
        """Free the copy."""
        del self._model
        free_memory(self._workload.device)

    def _batch(self, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> None:
        width = max(len(prompt) for prompt in prompts)
        tokens = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        device = self._workload.device
        model: Any = self._model
        output = model.generate(
            inputs=torch.tensor(tokens, device=device),
            attention_mask=torch.tensor(mask, device=device),
            generation_config=_sampling(max_new_tokens=new_tokens),
        )
        assert output.shape == (len(prompts), width + new_tokens), "no answer stops early"


class GenerateBatch:
    """transformers' continuous batching, through its manager, with a length per request."""

    note = "log-probabilities included"
    _block_tokens = 32

    def __init__(self, model: PreTrainedModel, workload: Workload) -> None:
        """Copy the model, since the manager replaces its attention."""
        self._model = _without_stop_tokens(model)
        self._workload = workload
        sampling = _sampling(max_new_tokens=max(workload.lengths))
        sampling.eos_token_id = -1
        self._manager: Any = self._model.init_continuous_batching(
            generation_config=sampling,
            continuous_batching_config=ContinuousBatchingConfig(
                block_size=self._block_tokens,
                num_blocks=workload.slots * (workload.longest_context // self._block_tokens + 1),
                max_batch_tokens=8 * workload.slots,
                max_requests_per_batch=workload.slots,
                allow_block_sharing=False,
                return_logprobs=True,
                seed=0,
            ),
        )

    def warm_up(self) -> None:
        """Start its thread, then generate a few tokens for each prompt."""
        self._manager.warmup()
        self._manager.start()
        self._write(self._workload.shortened())

    def run(self, seed: int) -> Sample:
        """Generate all answers; the manager continues its own random sequence."""
        return self._write(self._workload)

    def close(self) -> None:
        """Stop the thread and free the copy."""
        self._manager.stop(block=True)
        self._manager.destroy()
        del self._manager, self._model
        free_memory(self._workload.device)

    def _write(self, workload: Workload) -> Sample:
        began = clock(workload.device)
        for prompt, length in zip(workload.prompts, workload.lengths, strict=True):
            self._manager.add_request(list(prompt), max_new_tokens=length, eos_token_id=-1)
        answers: list[Any] = []
        while len(answers) < len(workload.prompts):
            answer = self._manager.get_result(timeout=1)
            if answer is not None and answer.is_finished():
                answers.append(answer)
            elif not self._manager.is_running():
                raise RuntimeError("the thread of transformers' continuous batching has died")
        seconds = clock(workload.device) - began
        for answer in answers:
            if answer.error is not None:
                raise RuntimeError(f"continuous batching failed on a request: {answer.error}")
        total = sum(len(answer.generated_tokens) for answer in answers)
        assert total == workload.tokens, f"{workload.tokens} tokens expected, got {total}"
        logprob = math.fsum(value for answer in answers for value in answer.logprobs) / total
        return Sample(seconds=seconds, tokens=total, mean_logprob=logprob)


def _without_stop_tokens(model: PreTrainedModel) -> GenerationMixin:
    duplicate = copy.deepcopy(model)
    duplicate.config.eos_token_id = None
    assert duplicate.generation_config is not None
    duplicate.generation_config.eos_token_id = None
    return cast("GenerationMixin", duplicate)


def _sampling(*, max_new_tokens: int) -> GenerationConfig:
    make: Any = GenerationConfig
    config: GenerationConfig = make(
        do_sample=True, temperature=1.0, top_k=0, pad_token_id=0, max_new_tokens=max_new_tokens
    )
    return config
