"""Weights for an engine in another process: a folder per version, with one safetensors file.

The folder of a version is complete as soon as it exists under its name; older versions are removed.
`refuse_other_model` checks that an external engine has the model that is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from sortedrl.engines.generation import RolloutEngine, fresh_trajectories, run_to_end
from sortedrl.engines.sampling import Sampling
from sortedrl.errors import EngineError
from sortedrl.models.attention_interface import plain_logprobs
from sortedrl.types import Weights

_WEIGHTS = "model.safetensors"


def export_weights(weights: Weights, folder: Path) -> Path:
    """Write the tensors of a version below `folder`; returns the folder that holds them."""
    target, unfinished = folder / f"version-{weights.version}", folder / "unfinished"
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        save_file(named_tensors(weights), unfinished / _WEIGHTS)
        for old in folder.glob("version-*"):
            _remove(old)
        unfinished.rename(target)
    except (OSError, SafetensorError) as error:
        _remove(unfinished)
        raise EngineError(
            f"cannot write the weights to {folder}: {error}; it needs room for all weights, "
            "and every engine must be able to read it"
        ) from error
    return target


def remove_exported(folder: Path) -> None:
    """Remove exported weights below `folder`, and the folder itself if it is empty."""
    for old in (*folder.glob("version-*"), folder / "unfinished"):
        _remove(old)
    with suppress(OSError):
        folder.rmdir()


def _remove(version: Path) -> None:
    """Remove the folder of a version; other files in it stay."""
    with suppress(OSError):
        (version / _WEIGHTS).unlink(missing_ok=True)
        version.rmdir()


def named_tensors(weights: Weights) -> dict[str, Tensor]:
    """The tensors by name, contiguous; of tied weights only the first name."""
    assert weights.tensors is not None, "an external engine needs the tensors themselves"
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    for name, tensor in cast("Mapping[str, Tensor]", weights.tensors).items():
        # Tied weights are one tensor with two names; a checkpoint has the first of them.
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if place in seen:
            continue
        seen.add(place)
        tensors[name] = tensor.detach().contiguous()
    return tensors


_TOKENS = 16
MOST_NATS = 0.3
"""A larger mean difference of log-probabilities means another model or other weights."""


def refuse_other_model(
    engine: RolloutEngine,
    model: PreTrainedModel,
    *,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
) -> float:
    """Generate a few tokens, and compare their log-probabilities with those of the model.

    Returns the mean difference; kernels differ by far less than other weights do.
    """
    trial = fresh_trajectories(prompts, samples_per_prompt=1, seed=0)
    engine.submit(trial, tolerance=None, sampling=replace(sampling, max_tokens=_TOKENS))
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
