"""The tiny model before and after an update, the answers to be written, and our engine's answers.

Everything is drawn from fixed seeds: two runs have the same world.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from outside_study.answers import ANSWER_TOKENS
from sortedrl.engines.generation import fresh_trajectories, run_to_end
from sortedrl.engines.native import NativeEngine, Sampling
from sortedrl.types import Trajectory

VOCABULARY = 128
PROMPT_TOKENS = 16
SAMPLES_PER_PROMPT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The models, their folders, and the answers to be written."""

    old: PreTrainedModel
    new: PreTrainedModel
    old_folder: Path
    new_folder: Path
    trajectories: Sequence[Trajectory]


def make_world(folder: Path, *, answers: int) -> World:
    """Models on disk and prompts."""
    old, new = _tiny_model(), _tiny_model(update=1e-4)
    old.save_pretrained(folder / "old")
    new.save_pretrained(folder / "new")
    generator = torch.Generator().manual_seed(2)
    shape = (answers // SAMPLES_PER_PROMPT, PROMPT_TOKENS)
    prompts = torch.randint(VOCABULARY, shape, generator=generator).tolist()
    return World(
        old=old,
        new=new,
        old_folder=folder / "old",
        new_folder=folder / "new",
        trajectories=fresh_trajectories(prompts, samples_per_prompt=SAMPLES_PER_PROMPT, seed=0),
    )


def native_answers(
    model: PreTrainedModel,
    trajectories: Sequence[Trajectory],
    *,
    temperature: float = 1.0,
    version: int = 0,
) -> list[Trajectory]:
    """What our own engine writes, or makes of cached tokens."""
    engine = NativeEngine(
        model,
        slots=64,
        max_tokens=ANSWER_TOKENS,
        sampling=Sampling(temperature=temperature),
        stop_tokens=(),
        version=version,
        cache_bytes=1 << 28,
    )
    engine.submit(trajectories, tolerance=0.0)
    return run_to_end(engine, [t.key for t in trajectories], show_progress=False)


def _tiny_model(*, update: float = 0.0) -> PreTrainedModel:
    """A random Llama with opinions; `update` moves every weight a little, as training would."""
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    model: PreTrainedModel = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.15,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(update * torch.randn_like(weight))
    return model
