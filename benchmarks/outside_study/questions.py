"""Questions for a model with a real vocabulary; no answer is judged."""

from __future__ import annotations

from pathlib import Path

from sortedrl.models.loading import load_tokenizer

QUESTIONS = (
    "A farmer has 17 sheep and buys 25 more. How many sheep has he now?",
    "What is the sum of the first ten odd numbers?",
    "A train goes 60 miles in an hour. How far does it go in 90 minutes?",
    "Which is larger, three quarters or five sevenths?",
    "Anna is twice as old as Ben, and together they are 36. How old is Ben?",
    "How many prime numbers lie between 10 and 30?",
    "A shirt costs 40 dollars after a discount of 20 percent. What was its price?",
    "If it takes 5 machines 5 minutes to make 5 parts, how long do 100 machines need for 100?",
)


def question_prompts(folder: Path) -> list[list[int]]:
    """The questions in the tokens of the model in `folder`."""
    tokenizer = load_tokenizer(folder)
    texts = [f"Question: {question}\nAnswer: Let us think step by step." for question in QUESTIONS]
    return [tokenizer(text)["input_ids"] for text in texts]
