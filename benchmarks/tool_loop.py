"""Conversations with a slow tool: TRL's lock-step loop against slots per trajectory and per turn.

    python benchmarks/tool_loop.py                    a tiny model on the CPU, 20 minutes
    python benchmarks/tool_loop.py --repeats 1 --steps 3 --tool-seconds 0.02

All arms share TRL's trainer, model, rows, reward, environment and batch; only who calls the tools
and who gets a slot differs:

    trl             GRPOTrainer: a turn for the whole batch, then all tools, one after the other
    sync            SortedGRPOTrainer, synchronous batches, a slot per turn
    trajectory      SortedGRPOTrainer, partial mode: a conversation keeps its slot while it waits
    turn            SortedGRPOTrainer, partial mode: slots belong to turns

The tool sleeps; its time has a long tail (log-normal) and depends on the row and the turn alone.
The weights are random, so a token is about as likely as any other: some tokens are whole calls,
some end a turn, and conversations have geometric lengths in every arm. Every arm runs in a process
of its own, in turns, and is timed from the end of its first step.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import tyro

from provenance import provenance

Arm = Literal["trl", "sync", "trajectory", "turn"]
ARMS: tuple[Arm, ...] = ("trl", "sync", "trajectory", "turn")
PROMPTS, SAMPLES, SLOTS, TOKENS, TURNS = 8, 4, 16, 700, 6
"""Prompts of an update, conversations for each, slots, tokens and turns of a conversation."""
_NUM_CALLS, _NUM_STOPS = 12, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to compare."""

    arms: tuple[Arm, ...] = ARMS
    """Which trainers, in turns."""
    repeats: int = 3
    """How often each of them runs."""
    steps: int = 3
    """Optimiser steps of a run, the first one untimed."""
    tool_seconds: float = 0.5
    """Mean time of a call."""
    tool_sigma: float = 1.2
    """How much it differs: the standard deviation of its logarithm."""
    json: Path | None = None
    """Where to write every run."""
    arm: Arm | None = None
    """Run this one in this process and print its numbers as JSON; used by the others."""


class SlowTool:
    """Sleeps as long as the row and the number of the call say."""

    is_replayable = True
    mean_seconds, sigma = 0.5, 1.2

    def reset(self, row: int, **columns: object) -> None:
        """Begin a conversation."""
        self.row, self.calls = row, 0

    def work(self, number: int) -> str:
        """Work for a while.

        Args:
            number: What to work on.
        """
        self.calls += 1
        normal = Random(f"{self.row} {self.calls}").gauss(0, self.sigma)
        time.sleep(self.mean_seconds * math.exp(normal - self.sigma**2 / 2))
        return str(number * self.calls)

    def get_reward(self) -> float:
        """The number of calls."""
        return float(self.calls)


def main(settings: Settings) -> None:
    """Run all arms in turns, or one."""
    if settings.arm is not None:
        warnings.simplefilter("ignore")
        print(json.dumps(measured(settings, settings.arm)))
        return
    rows: list[dict[str, Any]] = []
    for _ in range(settings.repeats):
        for arm in settings.arms:
            rows.append(_in_process(settings, arm))
            print(_line(rows[-1]), flush=True)
    if settings.json is not None:
        content = {"provenance": provenance("cpu"), "runs": rows}
        settings.json.write_text(json.dumps(content, indent=1) + "\n")
    print("\n" + "\n".join(table(rows)))


def _in_process(settings: Settings, arm: Arm) -> dict[str, Any]:
    flags: dict[str, object] = {"steps": settings.steps, "tool-seconds": settings.tool_seconds}
    flags |= {"tool-sigma": settings.tool_sigma, "arm": arm}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, __file__, *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{arm} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def measured(settings: Settings, arm: Arm) -> dict[str, Any]:
    """The numbers of one run."""
    import torch

    torch.set_num_threads(1)
    SlowTool.mean_seconds, SlowTool.sigma = settings.tool_seconds, settings.tool_sigma
    with TemporaryDirectory() as folder:
        trainer, ends = _trainer(settings, arm, folder)
        trainer.train()
        logs = trainer.state.log_history
    seconds, cpu = (after - before for before, after in zip(ends[0], ends[-1], strict=True))
    samples = (len(ends) - 1) * PROMPTS * SAMPLES

    def mean(name: str) -> float | None:
        values = [row[name] for row in logs if name in row]
        return sum(values) / len(values) if values else None

    return {
        "arm": arm,
        "per_second": samples / seconds,
        "per_cpu_second": samples / cpu,
        "seconds": seconds,
        "mean_length": mean("completions/mean_length"),
        "calls": mean("tools/call_frequency"),
        "bubble": mean("sortedrl/bubble"),
        "conversations": samples,
    }


def _trainer(settings: Settings, arm: Arm, folder: str) -> tuple[Any, list[tuple[float, float]]]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from sortedrl.integrations.trl import SortedGRPOTrainer

    ends: list[tuple[float, float]] = []

    class Timer(TrainerCallback):
        """Notes when each step ends."""

        def on_step_end(self, *given: object, **more: object) -> None:
            """Called by transformers' trainer."""
            ends.append((time.perf_counter(), time.process_time()))

    tokenizer = _tokenizer()
    args = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        max_tool_calling_iterations=TURNS,
        max_steps=settings.steps,
        learning_rate=1e-6,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = [
        {"prompt": [{"role": "user", "content": f"{n}"}], "row": n}
        for n in range(PROMPTS * settings.steps)
    ]
    shared = {
        "model": _model(tokenizer),
        "args": args,
        "train_dataset": Dataset.from_list(rows),
        "processing_class": tokenizer,
        "callbacks": [Timer()],
        "environment_factory": SlowTool,
    }
    if arm == "trl":
        return GRPOTrainer(**shared), ends
    schedule = {"strategy": "sync"} if arm == "sync" else {"mode": "partial", "lookahead": 1}
    trainer = SortedGRPOTrainer(
        **shared,
        schedule=schedule,
        slots=SLOTS,
        tool_threads=PROMPTS * SAMPLES,
        max_open=SLOTS if arm == "trajectory" else None,
    )
    return trainer, ends


def _tokenizer() -> Any:  # noqa: ANN401
    """Bytes, the marks of the template, and whole calls as tokens."""
    from trl.chat_template_utils import qwen2_5_chat_template

    from sortedrl.models.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = qwen2_5_chat_template
    call = '<tool_call>\n{"name": "work", "arguments": {"number": %d}}\n</tool_call>'
    tokenizer.add_tokens([call % number for number in range(_NUM_CALLS)])
    return tokenizer


def _model(tokenizer: Any) -> Any:  # noqa: ANN401
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    auto: Any = AutoModelForCausalLM
    stops = [tokenizer.eos_token_id, *range(128, 127 + _NUM_STOPS)]
    torch.manual_seed(0)
    model = auto.from_config(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=stops,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.generation_config.eos_token_id = stops
    return model


def _line(row: dict[str, Any]) -> str:
    bubble = "" if row["bubble"] is None else f", bubble {100 * row['bubble']:.0f} %"
    return (
        f"{row['arm']:10} {row['per_second']:7.2f} conversations/s, "
        f"{row['per_cpu_second']:7.2f} per cpu second, {row['calls']:.1f} calls and "
        f"{row['mean_length']:.0f} written tokens each{bubble}"
    )


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The medians, the spread, and the ratio to the first arm, as a Markdown table."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    lines = [
        "| arm | conversations/s, median (lowest to highest) | times | per cpu second | bubble |",
        "|---|---|---|---|---|",
    ]
    of = {arm: [row for row in rows if row["arm"] == arm] for arm in arms}
    base = median(row["per_second"] for row in of[arms[0]])
    for arm in arms:
        rates = [row["per_second"] for row in of[arm]]
        cpu = median(row["per_cpu_second"] for row in of[arm])
        bubbles = [row["bubble"] for row in of[arm] if row["bubble"] is not None]
        cells = [
            arm,
            f"{median(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})",
            f"{median(rates) / base:.2f}",
            f"{cpu:.2f}",
            f"{100 * median(bubbles):.0f} %" if bubbles else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
