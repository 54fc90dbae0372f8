"""The tables by name, each with what it shows; the module of that name measures it."""

from __future__ import annotations

TABLES = {
    "efficiency": "Every schedule on a real engine: bubble, goodput, ledger, length bias.",
    "long_run": "Forty groups, the whole run counted: sync, partial, coupled.",
    "prediction": "The simulator, fitted to one run of the efficiency table, against the others.",
    "natural": "Length bias where the model itself decides when an answer ends.",
    "ablations": "One setting changed at a time: group, batch, lookahead, tolerance, harvest unit.",
    "learning_logic": "Score against samples, tokens and seconds: Knights and Knaves.",
    "learning_seeds": "Order and freshness told apart: six schedules, 16 seeds, three rates.",
    "learning_rates": "Small update batches on a CPU: 16 seeds, two learning rates.",
    "learning_maths": "The same for arithmetic, with PPO and with GRPO.",
    "learning_questions": "SmolLM2-135M on small questions, with lengths of its own.",
    "learning_puzzles": "The paper's logic run in small: SmolLM2-135M, puzzles in words.",
    "peer": "The same training with TRL.",
    "grpo_trl": "TRL's trainer on vLLM against SortedGRPOTrainer, one script.",
    "eight_billion": "LLaMA-3.1-8B's shape on one card, all weights trained: memory and speed.",
    "paper": "The paper's own two set-ups, predicted.",
}
