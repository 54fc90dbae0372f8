"""One TRL script, run with TRL's `GRPOTrainer` and with ours: samples per second.

    python benchmarks/trl_grpo.py                                     a tiny model on the CPU
    python benchmarks/trl_grpo.py --preset smollm2-135m --json a.json     one GPU
    python benchmarks/trl_grpo.py --preset qwen2.5-1.5b --json b.json     one GPU, long answers
    python -m experiments grpo_trl      the table of docs/results.md: this, once for each arm

All arms share model, rows, reward, batch size and optimiser; only the class and the engine differ:

    trl             TRL's default: transformers' generate
    trl-continuous  TRL with transformers' continuous batching
    trl-vllm        TRL with vLLM in its process (`vllm_mode="colocate"`); GPU only
    sync            SortedGRPOTrainer, synchronous: the effect of the engine alone
    partial         SortedGRPOTrainer, partial mode, lookahead 1
    coupled         SortedGRPOTrainer, coupled mode, lookahead 1

The weights are random, so all tokens are about equally likely, and a share of the vocabulary ends
an
answer: lengths are geometric, with the mean and the limit of the preset, in every arm. Arms
alternate, each in its own process, and are timed from the end of the first step, which excludes
loading and compiling. A group has the prompts of four steps: with a multiple of four steps all of
its answers are trained, including the long ones at the end. Wall time includes everything on the
machine; `cpu` is the processor time of the process, which others do not affect, on one thread.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import tyro

from provenance import markdown_table

PresetName = Literal["cpu", "smollm2-135m", "qwen2.5-1.5b"]
Arm = Literal["trl", "trl-continuous", "trl-vllm", "sync", "partial", "coupled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model's shape and the sizes of a run."""

    model: dict[str, int]
    prompts: int
    """Prompts of an update."""
    samples: int
    micro_batch: int
    mean_tokens: int
    max_tokens: int
    steps: int
    slots: int
    arms: tuple[Arm, ...]


PRESETS: dict[PresetName, Preset] = {
    "cpu": Preset(
        model={"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 4, "vocabulary": 512},
        prompts=8,
        samples=4,
        micro_batch=8,
        mean_tokens=64,
        max_tokens=512,
        steps=8,
        slots=32,
        arms=("trl", "sync", "partial", "coupled"),
    ),
    "smollm2-135m": Preset(
        model={"hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3, "vocabulary": 49152},
        prompts=16,
        samples=8,
        micro_batch=16,
        mean_tokens=400,
        max_tokens=2048,
        steps=8,
        slots=128,
        arms=("trl", "trl-vllm", "sync", "partial", "coupled"),
    ),
    "qwen2.5-1.5b": Preset(
        model={"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "vocabulary": 151936},
        prompts=16,
        samples=8,
        micro_batch=4,
        mean_tokens=640,
        max_tokens=4096,
        steps=8,
        slots=128,
        arms=("trl-vllm", "sync", "partial", "coupled"),
    ),
}
_INNER = {576: 1536, 1536: 8960}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to compare."""

    preset: PresetName = "cpu"
    """The preset of model and sizes."""
    arms: tuple[Arm, ...] = ()
    """The trainers, which alternate; by default those of the preset."""
    repeats: int = 3
    """Runs of each."""
    steps: int | None = None
    """Optimiser steps of a run, the first one untimed; by default those of the preset."""
    json: Path | None = None
    """Write every run to this file."""
    arm: Arm | None = None
    """Run this arm in this process and print its numbers as JSON; used internally."""


def main(settings: Settings) -> None:
    """Run all arms alternately, or one."""
    if settings.arm is not None:
        print(json.dumps(measured(settings.preset, settings.arm, steps=settings.steps)))
        return
    preset = PRESETS[settings.preset]
    rows: list[dict[str, Any]] = []
    for _ in range(settings.repeats):
        for arm in settings.arms or preset.arms:
            rows.append(_in_process(settings, arm))
            print(_line(rows[-1]), flush=True)
    if settings.json is not None:
        settings.json.write_text(json.dumps(rows, indent=1) + "\n")
    print("\n" + table(rows))


def _in_process(settings: Settings, arm: Arm) -> dict[str, Any]:
    command = [sys.executable, __file__, "--preset", settings.preset, "--arm", arm]
    if settings.steps is not None:
        command += ["--steps", str(settings.steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{arm} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def measured(name: PresetName, arm: Arm, *, steps: int | None) -> dict[str, Any]:
    """The numbers of one run."""
    import torch

    preset = PRESETS[name]
    steps = preset.steps if steps is None else steps
    if name == "cpu":
        torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        trainer, ends = _trainer(preset, arm, Path(folder), steps=steps, is_cpu=name == "cpu")
        trainer.train()
        logs = trainer.state.log_history
    seconds, cpu = (after - before for before, after in zip(ends[0], ends[-1], strict=True))
    samples = (len(ends) - 1) * preset.prompts * preset.samples
    lengths = [row["completions/mean_length"] for row in logs if "completions/mean_length" in row]
    bubbles = [row["sortedrl/bubble"] for row in logs if "sortedrl/bubble" in row]
    return {
        "arm": arm,
        "samples_per_second": samples / seconds,
        "samples_per_cpu_second": samples / cpu,
        "seconds": seconds,
        "step_seconds": [later[0] - sooner[0] for sooner, later in pairwise(ends)],
        "mean_length": sum(lengths) / len(lengths),
        "bubble": sum(bubbles) / len(bubbles) if bubbles else None,
        "samples": samples,
    }


def _trainer(
    preset: Preset, arm: Arm, folder: Path, *, steps: int, is_cpu: bool
) -> tuple[Any, list[tuple[float, float]]]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from sortedrl.integrations.trl import SortedGRPOTrainer
    from sortedrl.models.tiny import tiny_tokenizer

    ends: list[tuple[float, float]] = []

    class Timer(TrainerCallback):
        """Records when each step ends."""

        def on_step_end(self, *given: object, **more: object) -> None:
            """Called by transformers' trainer."""
            ends.append((time.perf_counter(), time.process_time()))

    source = _write_model(preset, folder / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(source)
    answers = preset.prompts * preset.samples
    args = GRPOConfig(
        output_dir=str(folder / "run"),
        per_device_train_batch_size=preset.micro_batch,
        gradient_accumulation_steps=answers // preset.micro_batch,
        num_generations=preset.samples,
        max_completion_length=preset.max_tokens,
        max_steps=steps,
        learning_rate=1e-6,
        bf16=not is_cpu,
        use_cpu=is_cpu,
        gradient_checkpointing=not is_cpu,
        use_vllm=arm == "trl-vllm",
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        use_transformers_continuous_batching=arm == "trl-continuous",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = Dataset.from_list([{"prompt": f"{n}: "} for n in range(preset.prompts * steps)])
    model = AutoModelForCausalLM.from_pretrained(source)
    shared = (model, _reward, args, rows)
    if arm in ("trl", "trl-vllm", "trl-continuous"):
        return GRPOTrainer(*shared, processing_class=tokenizer, callbacks=[Timer()]), ends
    schedule: dict[str, object] = {"strategy": "sync"}
    if arm != "sync":
        schedule = {"mode": arm, "lookahead": 1}
    trainer = SortedGRPOTrainer(
        *shared,
        processing_class=tokenizer,
        callbacks=[Timer()],
        schedule=schedule,
        slots=preset.slots,
    )
    return trainer, ends


def _reward(completion_ids: list[list[int]], **columns: object) -> list[float]:
    """A reward that differs between answers."""
    return [float(sum(ids) % 11) for ids in completion_ids]


def _write_model(preset: Preset, folder: Path) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = preset.model
    vocabulary, hidden = shape["vocabulary"], shape["hidden"]
    ends = list(range(vocabulary - vocabulary // preset.mean_tokens, vocabulary))
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=_INNER.get(hidden, 3 * hidden),
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["kv_heads"],
            max_position_embeddings=preset.max_tokens + 256,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=ends,
        )
    )
    model.generation_config.eos_token_id = ends
    model.save_pretrained(folder)
    return folder


def _line(row: dict[str, Any]) -> str:
    bubble = "" if row["bubble"] is None else f", bubble {100 * row['bubble']:.0f} %"
    return (
        f"{row['arm']:15} {row['samples_per_second']:8.2f} samples/s, "
        f"{row['samples_per_cpu_second']:8.2f} per cpu second, "
        f"answers of {row['mean_length']:.0f} tokens{bubble}"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The medians, the spread, and the ratio to the first arm, as a Markdown table."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    head = ("arm", "samples/s, median (min to max)", "ratio", "per CPU second", "ratio")
    lines = []
    found: dict[str, list[list[float]]] = {
        arm: [
            [row[name] for row in rows if row["arm"] == arm]
            for name in ("samples_per_second", "samples_per_cpu_second")
        ]
        for arm in arms
    }
    base = [median(values) for values in found[arms[0]]]
    for arm in arms:
        cells = [arm]
        for values, first in zip(found[arm], base, strict=True):
            spread = f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
            cells += [spread, f"{median(values) / first:.2f}"]
        lines.append(cells)
    return markdown_table(head, lines)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
