"""Weights for an engine in another process: a folder per version, with one safetensors file.

The folder of a version is complete as soon as it exists under its name; older versions are removed.
`refuse_other_model` checks that an external engine has the trained model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

from sortedrl.engines.generation import (
    RolloutEngine,
    TokenScores,
    fresh_trajectories,
    run_to_end,
)
from sortedrl.engines.sampling import Sampling
from sortedrl.errors import EngineError
from sortedrl.models.attention_interface import plain_logprobs
from sortedrl.models.offload import in_buckets
from sortedrl.types import Prompt, Segment, Trajectory, Weights

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


class WeightFolder:
    """A folder through which servers get weights; several servers and threads may share it.

    The first one that requests a version writes it, and the others read the same files.
    """

    def __init__(self, path: Path) -> None:
        """Nothing is written yet."""
        self.path = path.absolute()
        self._writing = threading.Lock()
        self._written: tuple[Weights, Path] | None = None

    @classmethod
    def of(cls, folder: Path | WeightFolder) -> WeightFolder:
        """The folder itself, or a new one for a path."""
        return folder if isinstance(folder, WeightFolder) else cls(folder)

    def export(self, weights: Weights) -> Path:
        """Write these weights if necessary; returns their folder."""
        with self._writing:
            if self._written is None or self._written[0] is not weights:
                self._written = None
                self._written = weights, export_weights(weights, self.path)
            return self._written[1]

    def remove(self) -> None:
        """Remove what was written, unless another server has done so."""
        with self._writing:
            self._written = None
            remove_exported(self.path)


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
    return dict(_untied(weights))


def weight_buckets(weights: Weights, *, bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
    """The same in buckets of about `bucket_bytes`, with at least one tensor each.

    Lazy tensors are requested as a bucket is filled, so that no more than one bucket is in memory.
    """
    sized = ((pair, pair[1].nbytes) for pair in _untied(weights))
    return map(dict, in_buckets(sized, max_bytes=bucket_bytes))


def _untied(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    assert weights.tensors is not None, "an external engine needs the tensors themselves"
    seen: dict[tuple[int, torch.Size, tuple[int, ...]], StorageWeakRef] = {}
    for name, tensor in cast("Mapping[str, Tensor]", weights.tensors).items():
        # Tied weights are one tensor with two names; a checkpoint has the first of them. Memory
        # that was freed since, of weights that arrive one by one, may be that of another weight.
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if place in seen and not seen[place].expired():  # type: ignore[no-untyped-call]
            continue
        seen[place] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        yield name, tensor.detach().contiguous()


def write_bucket(tensors: Mapping[str, Tensor], folder: Path) -> Path:
    """Write one bucket as a file in `folder`, which is created if missing."""
    path = folder / _WEIGHTS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, path)
    except (OSError, SafetensorError) as error:
        raise EngineError(
            f"cannot write weights to {folder}: {error}; it needs room for the largest tensor"
        ) from error
    return path


class WorkerScores(Protocol):
    """An engine over workers that each score answers with their own weights."""

    def scores(
        self, trajectories: Sequence[Trajectory]
    ) -> Mapping[str, Sequence[TokenScores] | None]:
        """The scores of every worker by its name; `None` for one that cannot score."""


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
    _refuse_gap(engine.name, gap)
    return gap


def trial_row(prompt: Sequence[int], number: int) -> Trajectory:
    """A comparison row: the second half of a prompt as the answer to the first."""
    half = max(1, len(prompt) // 2)
    answer = tuple(prompt[half : half + _TOKENS]) or tuple(prompt[:1])
    return Trajectory(
        prompt=Prompt(id=number, tokens=tuple(prompt[:half])),
        sample_index=0,
        group=0,
        seed=0,
        segments=(Segment(answer, (0.0,) * len(answer), 0),),
    )


def refuse_other_scores(
    engine: WorkerScores, rows: Sequence[Trajectory], expected: Sequence[Sequence[float]]
) -> None:
    """Refuse workers whose log-probabilities of these rows differ from those of the trainer."""
    for name, scores in engine.scores(rows).items():
        if scores is None:
            continue
        gaps = [
            abs(ours - theirs)
            for row, score in zip(expected, scores, strict=True)
            for ours, theirs in zip(row, score.logprobs, strict=True)
        ]
        _refuse_gap(name, sum(gaps) / len(gaps))


def _refuse_gap(name: str, gap: float) -> None:
    if not gap <= MOST_NATS:
        raise EngineError(
            f"{name} must have the trained model, but its log-probabilities are "
            f"{gap:.2g} nats off on average (at most {MOST_NATS}): another model, another "
            "precision, or log-probabilities of another temperature; start it with the same model"
        )
