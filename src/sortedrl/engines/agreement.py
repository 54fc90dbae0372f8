"""An outside engine on trial: it must have the model that is trained, and its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from sortedrl.engines.generation import fresh_trajectories, run_to_end
from sortedrl.engines.guest import RolloutEngine
from sortedrl.engines.sampling import Sampling
from sortedrl.errors import EngineError
from sortedrl.models.plain import plain_logprobs

_TOKENS = 16
MOST_NATS = 0.3
"""The mean difference of two log-probabilities beyond which they are of two models."""


def refuse_other_model(
    engine: RolloutEngine,
    model: PreTrainedModel,
    *,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
) -> float:
    """Let the engine write a little, and compare with what the model says of it.

    Gives the mean difference of the log-probabilities; kernels differ by far less than another
    model or other weights do.
    """
    trial = fresh_trajectories(prompts, samples_per_prompt=1, seed=0)
    engine.submit_with(trial, tolerance=None, sampling=sampling, max_tokens=_TOKENS)
    gaps = []
    for answer in run_to_end(engine, [t.key for t in trial], show_progress=False):
        tokens = [*answer.prompt.tokens, *answer.tokens]
        plain_T = plain_logprobs(
            model,
            tokens,
            after=len(answer.prompt.tokens),
            temperature=sampling.temperature,
        )
        gaps.append((plain_T - torch.tensor(answer.logprobs)).abs())
    gap = torch.cat(gaps).mean().item()
    if not gap <= MOST_NATS:
        raise EngineError(
            f"{engine.name} must have the model that is trained, but its log-probabilities are "
            f"{gap:.2g} nats off on average (at most {MOST_NATS}): another model, another "
            "precision, or log-probabilities of another temperature; start it with the same model"
        )
    return gap
