"""Conversations with a slow tool: TRL's lock-step loop compared with slots per trajectory and turn.

    python benchmarks/tool_loop.py                    a tiny model on the CPU, 10 minutes
    python benchmarks/tool_loop.py --repeats 1 --steps 2 --tool-seconds 0.02

All arms share TRL's trainer, model, rows, tool, reward and batch, and the number of concurrent
turns; only generation, tool calls and slot assignment differ:

    trl             GRPOTrainer: a turn for the whole batch, then all tools, one at a time
    lock_step       the same loop of TRL's with the native engine: the effect of the engine alone
    sync            SortedGRPOTrainer, synchronous batches, a slot per turn
    trajectory      SortedGRPOTrainer, partial mode: a conversation keeps its slot while it waits
    turn            SortedGRPOTrainer, partial mode: slots belong to turns

The tool sleeps; its time has a long tail (log-normal) and depends only on the row and the call. The
weights are random, so all tokens are about equally likely: some tokens are whole calls, some end a
turn, and conversations have geometric lengths in every arm. Conversations are sampled and differ
between arms; their mean numbers of calls and tokens are printed.

Every arm trains on all rows once, and is timed from its first step to its last one including all
remaining work, so an arm gains nothing by training on short conversations first. Before the first
repeat every arm makes a step on other rows. The arms of a repeat run one after another, and ratios
are between arms of one repeat.

Seconds are wall time minus the time in which the main thread was runnable but not scheduled (from
Linux's schedstat), and the tools sleep on the same clock, so other processes delay the benchmark
but hardly change it.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal

import tyro

from provenance import markdown_table, provenance

Arm = Literal["trl", "lock_step", "sync", "trajectory", "turn"]
ARMS: tuple[Arm, ...] = ("trl", "lock_step", "sync", "trajectory", "turn")
PROMPTS, SAMPLES, TOKENS, TURNS = 8, 4, 400, 6
"""Prompts of an update, conversations for each, tokens and turns of a conversation."""
SLOTS = PROMPTS * SAMPLES
"""Concurrent turns, as many as TRL generates."""
_NUM_CALLS, _NUM_STOPS = 12, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to compare."""

    arms: tuple[Arm, ...] = ARMS
    """The trainers, which alternate."""
    repeats: int = 3
    """Runs of each."""
    steps: int = 2
    """Optimiser steps of a run."""
    tool_seconds: float = 0.2
    """Mean seconds of a call."""
    tool_sigma: float = 1.2
    """Spread of the call time: standard deviation of its logarithm."""
    json: Path | None = None
    """Write every run to this file."""


def clock() -> float:
    """Seconds, without those in which the main thread waited for a core."""
    waited = Path(f"/proc/self/task/{os.getpid()}/schedstat").read_text().split()[1]
    return time.perf_counter() - int(waited) / 1e9


class SlowTool:
    """Sleeps for a time that depends on the row and the number of the call."""

    is_replayable = True
    mean_seconds, sigma = 0.0, 1.2
    slept: ClassVar[list[float]] = []

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
        seconds = self.mean_seconds * math.exp(normal - self.sigma**2 / 2)
        self.slept.append(seconds)
        until = clock() + seconds
        while (left := until - clock()) > 0:
            time.sleep(left)
        return str(number * self.calls)

    def get_reward(self) -> float:
        """The number of calls."""
        return float(self.calls)


def main(settings: Settings) -> None:
    """Run all arms alternately."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    SlowTool.sigma = settings.tool_sigma
    for arm in settings.arms:
        with TemporaryDirectory() as folder:
            _trainer(arm, folder, steps=1, first_row=1_000_000, seed=0)[0].train()
    SlowTool.mean_seconds = settings.tool_seconds
    rows: list[dict[str, Any]] = []
    for seed in range(settings.repeats):
        for arm in settings.arms:
            rows.append(measured(settings, arm, seed=seed))
            print(_line(rows[-1]), flush=True)
    if settings.json is not None:
        content = {"provenance": provenance("cpu"), "runs": rows}
        settings.json.write_text(json.dumps(content, indent=1) + "\n")
    print("\n" + table(rows))


def measured(settings: Settings, arm: Arm, *, seed: int) -> dict[str, Any]:
    """The numbers of one run."""
    SlowTool.slept.clear()
    with TemporaryDirectory() as folder:
        trainer, moments = _trainer(arm, folder, steps=settings.steps, first_row=0, seed=seed)
        trainer.train()
        logs = trainer.state.log_history
    seconds, cpu = (end - start for start, end in zip(moments[0], moments[-1], strict=True))
    conversations = settings.steps * PROMPTS * SAMPLES

    def mean(name: str) -> float | None:
        values = [row[name] for row in logs if name in row]
        return sum(values) / len(values) if values else None

    return {
        "arm": arm,
        "conversations": conversations,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "slept_seconds": sum(SlowTool.slept),
        "calls": len(SlowTool.slept) / conversations,
        "mean_length": mean("completions/mean_length"),
        "per_second": conversations / seconds,
        "per_cpu_second": conversations / cpu,
        "bubble": mean("sortedrl/bubble"),
    }


def _trainer(
    arm: Arm, folder: str, *, steps: int, first_row: int, seed: int
) -> tuple[Any, list[tuple[float, float]]]:
    """A trainer, and a list of wall and CPU seconds: at its start, and after each step."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from sortedrl.integrations.trl import SortedGRPOTrainer

    moments: list[tuple[float, float]] = []

    class Timer(TrainerCallback):
        """Records when training starts, and when each step ends."""

        def on_train_begin(self, *given: object, **more: object) -> None:
            """Called by transformers' trainer."""
            moments.append((clock(), time.process_time()))

        def on_step_end(self, *given: object, **more: object) -> None:
            """Called by transformers' trainer."""
            moments.append((clock(), time.process_time()))

    class LockStep(SortedGRPOTrainer):
        """TRL's loop over whole batches; only the tokens come from the native engine."""

        def _prepare_inputs(self, generation_batch: Any) -> Any:  # noqa: ANN401
            return GRPOTrainer._prepare_inputs(self, generation_batch)

        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:  # noqa: ANN401
            answers = self._evaluated(prompt_ids)
            return [t.tokens for t in answers], [t.logprobs for t in answers]

        def _tool_call_loop(self, *given: Any) -> Any:  # noqa: ANN401
            return GRPOTrainer._tool_call_loop(self, *given)

        def _generate_and_score_completions(self, inputs: Any) -> Any:  # noqa: ANN401
            return GRPOTrainer._generate_and_score_completions(self, inputs)

        def _calculate_rewards(self, *given: Any) -> Any:  # noqa: ANN401
            return GRPOTrainer._calculate_rewards(self, *given)

    tokenizer = _tokenizer()
    args = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        max_tool_calling_iterations=TURNS,
        max_steps=steps,
        seed=seed,
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
        for n in range(first_row, first_row + PROMPTS * steps)
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
        plain = GRPOTrainer(**shared)
        plain.remove_callback(PrinterCallback)
        return plain, moments
    is_partial = arm in ("trajectory", "turn")
    trainer = (LockStep if arm == "lock_step" else SortedGRPOTrainer)(
        **shared,
        schedule={"mode": "partial", "lookahead": 1} if is_partial else {"strategy": "sync"},
        slots=SLOTS,
        tool_threads=PROMPTS * SAMPLES * steps,
        max_open=SLOTS if arm == "trajectory" else None,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer, moments


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
        f"{row['arm']:10} {row['seconds']:6.1f} s ({row['cpu_seconds']:.1f} of CPU), "
        f"{row['slept_seconds']:.1f} s of tools, {row['calls']:.2f} calls and "
        f"{row['mean_length']:.0f} tokens per conversation{bubble}"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Medians and ratios to the first arm of the same repeat, as a Markdown table.

    Arms sample different conversations, so ratios are those of the time per tool call.
    """
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    of = {arm: [row for row in rows if row["arm"] == arm] for arm in arms}
    head = [
        *("arm", "seconds", "calls, tokens per conversation", "tools at work on average"),
        *("CPU seconds", "calls per second, relative to the first"),
    ]
    lines = []
    for arm in arms:
        speeds = [row["calls"] * row["conversations"] / row["seconds"] for row in of[arm]]
        first = [row["calls"] * row["conversations"] / row["seconds"] for row in of[arms[0]]]
        cells = [
            arm,
            _spread([row["seconds"] for row in of[arm]], 1),
            f"{median(row['calls'] for row in of[arm]):.2f}, "
            f"{median(row['mean_length'] for row in of[arm]):.0f}",
            _spread([row["slept_seconds"] / row["seconds"] for row in of[arm]], 2),
            _spread([row["cpu_seconds"] for row in of[arm]], 1),
            _spread([own / base for own, base in zip(speeds, first, strict=True)], 2),
        ]
        lines.append(cells)
    return markdown_table(head, lines)


def _spread(values: list[float], digits: int) -> str:
    middle, low, high = (f"{f(values):.{digits}f}" for f in (median, min, max))
    return f"{middle} ({low} to {high})"


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
