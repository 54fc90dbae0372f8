"""TRL's GRPO with SortedRL's schedule, with `python examples/trl_grpo.py`: a minute on a CPU.

The task: answer with vowels, and stop. Nothing is downloaded unless `--model` names a model.
Compared with a script for TRL, two lines differ: the class, and its schedule.

Needs: a CPU; pip install 'sortedrl[trl]'. Takes: a minute.
Gives: runs/trl with TRL's checkpoints and what `sortedrl report` shows.
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from sortedrl.integrations.trl import SortedGRPOTrainer
from sortedrl.models.tiny import TinySettings, tiny_model, tiny_tokenizer


def vowels(completions: list[str], **columns: object) -> list[float]:
    """The share of vowels among the characters of each answer."""
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]


def main() -> None:
    """Train, and print how to get the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a name on the hub or a folder; a tiny model unless given")
    parser.add_argument("--mode", default="coupled", help="coupled, partial, redraw or on_policy")
    parser.add_argument("--out", type=Path, default=Path("runs/trl"))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer, at most")
    given = parser.parse_args()
    if given.model is None:
        torch.set_num_threads(1)  # faster for a tiny model
        model, tokenizer = tiny_model(TinySettings(hidden=64, layers=2)), tiny_tokenizer()
        # Some bytes end an answer, so that lengths differ from the start.
        model.generation_config.eos_token_id = list(range(128, 144))
    else:
        model = AutoModelForCausalLM.from_pretrained(given.model)
        tokenizer = AutoTokenizer.from_pretrained(given.model)
    trainer = SortedGRPOTrainer(
        model=model,
        reward_funcs=vowels,
        args=GRPOConfig(
            output_dir=str(given.out),
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=given.tokens,
            num_train_epochs=given.epochs,
            learning_rate=3e-3 if given.model is None else 1e-6,
            bf16=torch.cuda.is_available(),
            logging_steps=4,
            report_to="none",
        ),
        train_dataset=Dataset.from_list([{"prompt": f"Row {n}: "} for n in range(given.rows)]),
        processing_class=tokenizer,
        schedule={"mode": given.mode, "lookahead": 1},
    )
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    if rewards:
        print(f"reward: {rewards[0]:.2f} at first, {rewards[-1]:.2f} at the end")
    print(f"look at the run: sortedrl report {given.out}")


if __name__ == "__main__":
    main()
