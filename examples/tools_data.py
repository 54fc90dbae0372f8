"""Rows for tools.toml: products to compute, and a warm start that rarely uses the calculator.

    python examples/tools_data.py        writes runs/tools/warm.jsonl and runs/tools/products.jsonl

Needs: nothing. Takes: a second. Gives: the two files.

A response of the warm start calls the calculator one time in four, and guesses otherwise, so there
is something to learn: guesses are wrong, and the calculator's replies are right.
"""

import json
import random
from pathlib import Path

FOLDER = Path("runs/tools")


def main() -> None:
    """Write both files; the products of the two have nothing in common."""
    chance = random.Random(0)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if a * b >= 1000]
    chance.shuffle(pairs)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "warm.jsonl").open("w") as file:
        for a, b in pairs[:3000]:
            question, product = f"{a}*{b}:", a * b
            call, guess = f"{a}*{b}=", str(chance.randrange(1000, 9999))
            rows = [(question, call if chance.random() < 0.25 else guess)]
            rows.append((f"{question}{call}<eos>{product}\n", str(product)))
            for prompt, response in rows:
                file.write(json.dumps({"prompt": prompt, "response": response}) + "\n")
    with (FOLDER / "products.jsonl").open("w") as file:
        for a, b in pairs[3000:5000]:
            file.write(json.dumps({"prompt": f"{a}*{b}:", "answer": str(a * b)}) + "\n")


if __name__ == "__main__":
    main()
