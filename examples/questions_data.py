"""Rows for questions_warm.toml: puzzles that are mostly guessed, and rarely asked about.

    python examples/questions_data.py        writes runs/questions/warm.jsonl

Needs: pip install sortedrl. Takes: seconds. Gives: the file.

A response of the warm start asks one time in four, and guesses otherwise, so there is something to
learn: a guess is right one time in eight, and two questions leave two cases, between which the
statements of the puzzle decide.
"""

import json
import random
from pathlib import Path

from sortedrl.data.catalogue import open_task

FILE = Path("runs/questions/warm.jsonl")
PUZZLES = "knights_knaves:people=3,forms=claim+and+or,style=compact,count=1280"


def main() -> None:
    """Write the file."""
    chance = random.Random(0)
    FILE.parent.mkdir(parents=True, exist_ok=True)
    with FILE.open("w") as file:
        for row in open_task(PUZZLES).rows:
            puzzle, roles = str(row.prompt), row.fields["solution"]
            guess = "".join(chance.choice(letters) for letters in ("Aa", "Bb", "Cc"))
            # A knight tells the truth and a knave lies, so "yes" means: of the same kind.
            first, second = ("yes\n" if roles[0] == roles[n] else "no\n" for n in (1, 2))
            asked = f"{puzzle}A?B<eos>{first}"
            rows = [
                (puzzle, "A?B" if chance.random() < 0.25 else guess),
                (asked, "A?C" if chance.random() < 0.5 else guess),
                (f"{asked}A?C<eos>{second}", row.fields["answer"]),
            ]
            for prompt, response in rows:
                file.write(json.dumps({"prompt": prompt, "response": response}) + "\n")


if __name__ == "__main__":
    main()
