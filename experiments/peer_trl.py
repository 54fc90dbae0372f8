"""TRL's GRPO trainer on jobs of the peer table, in its own process.

    python -m experiments.peer_trl      a job per line in, the versions used per job out (JSON)

TRL may be installed in another environment, so only plain Python parts of `sortedrl` are imported,
mainly the reward. The metrics of each update are written in the format of `sortedrl train`, and the
weights at each evaluation are saved for later evaluation. The clock starts when the model is loaded
and stops while weights are saved. A prompt with unexpected tokens stops the job. The process exits
as soon as the other end of its input is closed, whatever it is doing.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import select
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from experiments.peer_job import AskedRow, Job, read_rows
from sortedrl.core.clock import WallClock
from sortedrl.core.files import MetricsFile
from sortedrl.rewards.functions import RewardSource, load
from sortedrl.rewards.pool.score import checked_score
from sortedrl.types import Prompt

_LIBRARIES = ("trl", "transformers", "torch", "accelerate", "vllm")


@dataclass(slots=True)
class _Window:
    """Counters since the last update."""

    generation_seconds: float = 0.0
    tokens: int = 0
    answers: int = 0
    reward: float = 0.0


class Watch(TrainerCallback):
    """Times a training, scores its answers and writes its metrics."""

    def __init__(self, job: Job, rows: Sequence[AskedRow]) -> None:
        self.job = job
        self.rows = rows
        self.reward = load(RewardSource(job.reward, dict(job.reward_options))).function
        self.clock = WallClock()
        self.window = _Window()
        self.asked = 0
        self.samples = self.tokens = 0
        self.file = MetricsFile(job.metrics)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Start the clock: everything is loaded."""
        say(f"training {self.job.updates} updates: {self.job.out}")
        self.clock = WallClock()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **others: object,
    ) -> None:
        """Write the metrics of the update, and save its weights if they are evaluated."""
        _wait(self.job.device)
        seconds, window, update = self.clock.seconds(), self.window, int(state.global_step)
        self.samples += window.answers
        self.tokens += window.tokens
        self.file(
            {
                "update": update,
                "total/seconds": seconds,
                "total/samples": self.samples,
                "total/trained_tokens": self.tokens,
                "total/decoded_tokens": self.tokens,
                "rollout/rollout_seconds": window.generation_seconds,
                "rollout/trajectories": window.answers,
                "rollout/trained_tokens": window.tokens,
                "rollout/mean_staleness": 0.0,
                "reward/mean": window.reward / max(1, window.answers),
            }
        )
        say(
            f"update {update} of {self.job.updates} after {seconds:.1f} s: {self.samples} samples, "
            f"{self.tokens} tokens, {window.generation_seconds:.1f} s of this update in generation"
        )
        self.window = _Window()
        if update in self.job.evaluated:
            with self.clock.paused():
                model = others["model"]
                assert isinstance(model, PreTrainedModel)
                save_weights(model, self.job.weights(update))

    def right(
        self,
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        row: list[int],
        **_: object,
    ) -> list[float]:
        """The reward of TRL's answers."""
        scores = []
        for number, completion in zip(row, completions, strict=True):
            prompt = Prompt(id=number, fields=self.rows[number].fields)
            returned = self.reward(prompt, completion, **self.job.reward_options)
            scores.append(checked_score(returned).reward)
        self.window.answers += len(scores)
        self.window.tokens += sum(len(tokens) for tokens in completion_ids)
        self.window.reward += sum(scores)
        return scores

    def timed(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap TRL's generation to check its prompts and time it."""

        def generate_in_time(prompt_ids: Sequence[Sequence[int]], *rest: object) -> Any:  # noqa: ANN401
            self._check(prompt_ids)
            _wait(self.job.device)
            began = self.clock.seconds()
            answers = generate(prompt_ids, *rest)
            _wait(self.job.device)
            seconds = self.clock.seconds() - began
            self.window.generation_seconds += seconds
            say(f"generated {len(prompt_ids)} answers in {seconds:.1f} s")
            return answers

        return generate_in_time

    def _check(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        """Refuse prompts that differ from those of our own runs, token for token and in order."""
        for tokens in prompt_ids:
            expected = self.rows[self.asked // self.job.samples_per_prompt].tokens
            if list(tokens) != list(expected):
                raise ValueError(
                    f"prompt {self.asked} must have the tokens {list(expected)[:20]}..., as in "
                    f"our own runs, got {list(tokens)[:20]}..."
                )
            self.asked += 1


def save_weights(model: PreTrainedModel, path: Path) -> None:
    """Save the parameters of a model."""
    save_file({name: tensor.detach().cpu() for name, tensor in model.named_parameters()}, path)


def train(job: Job) -> None:
    """Train with TRL until the last update."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    if job.threads is not None:
        torch.set_num_threads(job.threads)
    Path(job.out).mkdir(parents=True, exist_ok=True)
    rows = read_rows(Path(job.rows))
    watch = Watch(job, rows)
    trainer = GRPOTrainer(
        model=job.model,
        reward_funcs=watch.right,
        args=GRPOConfig(**arguments(job)),
        train_dataset=Dataset.from_list(
            [{"prompt": row.text, "row": number} for number, row in enumerate(rows)]
        ),
        callbacks=[watch],
    )
    # TRL measures this time too, but reports it only to its trackers.
    trainer._generate_single_turn = watch.timed(trainer._generate_single_turn)
    trainer.train()
    watch.file.close()


def arguments(job: Job) -> dict[str, Any]:
    """The arguments of `GRPOConfig` that are equivalent to the settings of our own runs."""
    return {
        "output_dir": job.out,
        "seed": job.seed,
        "max_steps": job.updates,
        "per_device_train_batch_size": job.update_batch,
        "gradient_accumulation_steps": 1,
        "num_generations": job.samples_per_prompt,
        "max_completion_length": job.max_tokens,
        "temperature": job.temperature,
        "loss_type": "grpo",
        "scale_rewards": "group",
        "beta": 0.0,
        "epsilon": job.clip,
        "num_iterations": 1,
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": job.beta1,
        "adam_beta2": job.beta2,
        "adam_epsilon": job.epsilon,
        "weight_decay": job.weight_decay,
        "max_grad_norm": job.max_norm,
        "shuffle_dataset": False,
        "gradient_checkpointing": False,
        "bf16": job.is_bf16,
        "use_cpu": job.device == "cpu",
        "dataloader_pin_memory": job.device != "cpu",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **job.options,
    }


def main() -> None:
    """Run the incoming jobs one after another."""
    end_with_input(0)
    say("torch and transformers are imported")
    # Output of the libraries must not be mistaken for a reply.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        train(Job(**json.loads(line)))
        answers.write(f"{json.dumps(versions())}\n")
        answers.flush()


def end_with_input(descriptor: int) -> None:
    """Exit as soon as the other end of the input is closed."""
    # With an empty event mask, poll still reports a hang-up, and reads nothing from the pipe.
    poll = select.poll()
    poll.register(descriptor, 0)

    def watch() -> None:
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def say(text: str) -> None:
    """Write a line to the log, with the time of day."""
    now = datetime.datetime.now(datetime.UTC).strftime("%H:%M:%S")
    sys.stderr.write(f"{now} {text}\n")
    sys.stderr.flush()


def versions() -> dict[str, str]:
    """Versions of the interpreter and the libraries."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
