"""Questions of many kinds, for answers of varied lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sortedrl.models.loading import load_tokenizer

QUESTIONS = (
    "What is the capital of Australia?",
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "How do I bake a simple loaf of bread at home? List the steps.",
    "Add 27 and 58, and explain how you did it.",
    "Explain to a child what a black hole is.",
    "Write a Python function that reverses a string.",
    "What are the main differences between cats and dogs as pets?",
    "Name three inventions of the nineteenth century and say why they mattered.",
    "Write a polite letter to a neighbour whose music is too loud.",
    "A train travels 60 miles in 45 minutes. What is its speed in miles per hour?",
    "Describe the water cycle.",
    "Give me five tips for learning a foreign language.",
    "Who wrote Pride and Prejudice, and what is it about?",
    "Write a poem about autumn.",
    "What should I pack for a week of hiking in the mountains?",
    "How does a bicycle stay upright?",
    "Summarise the causes of the First World War.",
    "Is the number 91 prime? Think step by step.",
    "Invent a new board game and describe its rules.",
    "What is the difference between weather and climate?",
    "Write SQL that counts the orders of each customer.",
    "How many legs do three spiders and two birds have together?",
    "Explain how vaccines work.",
    "Write a dialogue between a teacher and a student who forgot the homework.",
    "What are the advantages and disadvantages of living in a big city?",
    "Translate 'good morning, how are you?' into French.",
    "Plan a three-day visit to Rome.",
    "Why do leaves change colour?",
    "Solve for x: 3x + 7 = 22.",
    "Describe your favourite meal and how it is made.",
    "What happens inside a computer when I press a key?",
)


def prompts(model: Path, *, count: int, first_token: int | None) -> list[list[int]]:
    """Tokens of the first `count` questions; only the first token if there is no tokenizer."""
    if not 1 <= count <= len(QUESTIONS):
        raise ValueError(f"questions must lie in 1..{len(QUESTIONS)}, got {count}; raise samples")
    if not (model / "tokenizer_config.json").exists():
        if first_token is None:
            raise ValueError(f"{model} has neither a tokenizer nor a first token")
        return [[first_token]] * count
    tokenizer = load_tokenizer(model)
    rows: list[Sequence[int]] = []
    for question in QUESTIONS[:count]:
        if tokenizer.chat_template is None:
            rows.append(tokenizer(question)["input_ids"])
            continue
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        rows.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return [list(row) for row in rows]
