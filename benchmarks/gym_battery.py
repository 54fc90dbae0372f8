"""Rewards of constants and altered golds in each task of reasoning-gym.

    python benchmarks/gym_battery.py --out docs/reference/gym-scorers.md   all, half an hour
    python benchmarks/gym_battery.py --tasks countdown puzzle24            some, on the screen

For every task some rows are generated. Each is answered with constants, which ignore the row, and
with altered golds, which are almost right. The share of rows in which they count as right is
reported, for our reward and for the library's scorer alone with the usual threshold of 0.99. The
best of each kind is shown; for a constant this is also the rate of the best guess.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import tyro

from sortedrl.data.gym import GymSettings, gym_rows
from sortedrl.data.rows import Row
from sortedrl.rewards.gym import gym_reward, unpacked
from sortedrl.rewards.gym_rules import RULES
from sortedrl.types import Prompt

_NUMBERS_AND_SIGNS = "nan; inf; -inf; 0; 1; -1; 2; 3; 4; 5; 8; 10; 0.5; 1/2; 0x0; i"
_WORDS_AND_FORMULAS = (
    "True; False; None; yes; no; Yes; No; on; off; undetermined; Pass; Peng; Chi; "
    "infeasible; Monday; red; father; A; B; C; x; E; a; []; {}; [[]]; [0]; [nan]; [[0]]; "
    "[0, 0, 0]; 0 0; 0 0 0 0 0 0; _; *; ?; x/x; 24; x - x + 24; 6*4*1*1; 8*3*1/1; "
    "1 + 1 + 11 + 11; 24/1/1/1; 10**100; C; x + C; Integral(x, x); nan + C; (P \u2228 ¬P); P; "
    "(P \u2228 Q); (P → Q); (P ∧ Q); 00:00; 0 days; 0 days, 00:00; No.; 0,0; (0, 0); 0°; A1; "
    "C3; A=1,B=2,C=3; U U'; R U R' U'; U4"
)
_MOVES = "A → A; A → B → C; B → B; C → C → C; A+1 A+1 A+1 A+1"
CONSTANTS = (
    *_NUMBERS_AND_SIGNS.split("; "),
    "",
    '""',
    *_WORDS_AND_FORMULAS.split("; "),
    "LRUD" * 50,
    *_MOVES.split("; "),
    "A+1 B+1 B-1 C+1 C-1 D+1 D-1 E+1 E-1 " * 50,
    '["fill A"]',
    "[{}]",
)
"""Answers that ignore the row."""
_LARGEST = 4_000
"""Longer altered golds are skipped, so that one row cannot take minutes."""
_SLOW = ("intermediate_integration", "simple_integration")
_FEW = 5
"""Rows for the library's scorer if it takes seconds per answer."""


def _digits(change: Callable[[int], int], *, is_last: bool = True) -> Callable[[str], str]:
    """The gold with one digit changed."""

    def altered(gold: str) -> str:
        places = [place for place, char in enumerate(gold) if char in "0123456789"]
        if not places:
            return gold
        place = places[-1 if is_last else 0]
        return gold[:place] + str(change(int(gold[place])) % 10) + gold[place + 1 :]

    return altered


def _letter(gold: str) -> str:
    """The gold with its last letter replaced by another of its letters."""
    places = [place for place, char in enumerate(gold) if char.isalpha()]
    if not places:
        return gold
    place = places[-1]
    others = [char for char in gold if char.isalpha() and char != gold[place]]
    return gold[:place] + (others[0] if others else "q") + gold[place + 1 :]


ALTERED: Mapping[str, Callable[[str], str]] = {
    "a prefix": lambda gold: f"The answer is {gold}",
    "a suffix": lambda gold: f"{gold} or 0",
    "a word more, after a comma": lambda gold: f"{gold}, x",
    "a word more": lambda gold: f"{gold} x",
    "the gold twice": lambda gold: f"{gold} {gold}",
    "the gold twice, in lines": lambda gold: f"{gold}\n{gold}",
    "another sign": lambda gold: gold[1:] if gold.startswith("-") else f"-{gold}",
    "nan for numbers": lambda gold: re.sub(r"-?\d+(\.\d+)?", "nan", gold),
    "NaN for numbers": lambda gold: re.sub(r"'?-?\d+(\.\d+)?'?", "NaN", gold),
    "the last digit one up": _digits(lambda digit: digit + 1),
    "the last digit one down": _digits(lambda digit: digit - 1),
    "the first digit one up": _digits(lambda digit: digit + 1, is_last=False),
    "a cell flipped": _digits(lambda digit: 1 - digit if digit < 2 else digit + 1),
    "a letter changed": _letter,
    "without its last word": lambda gold: " ".join(gold.split()[:-1]),
    "without its last line": lambda gold: "\n".join(gold.splitlines()[:-1]),
    "without its last character": lambda gold: re.sub(r"\w\W*$", "", gold),
    "times x/x": lambda gold: gold if re.search("[A-Za-z]", gold) else f"({gold})*x/x",
    "its first half": lambda gold: gold[: len(gold) // 2],
    "its first character": lambda gold: gold[:1],
    "backwards": lambda gold: " ".join(gold.split()[::-1]),
    "its numbers cut off": lambda gold: re.sub(r"(\d+)\.\d*[1-9]\d*", r"\1", gold),
}
"""Answers derived from the gold that should not count as right."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of one judge on one task."""

    gold: float | None
    constant: tuple[str, float]
    altered: tuple[str, float]


Judge = Callable[[Row, str], bool]


def ours(row: Row, answer: str) -> bool:
    """Whether our reward counts an answer as right."""
    prompt = Prompt(id=0, fields=dict(row.fields))
    return gym_reward(prompt, f"<answer>{answer}</answer>")["correct"] == 1.0


def library(task: str) -> Judge:
    """The library's scorer alone; used only with the answers of this file."""
    from reasoning_gym.factory import create_dataset

    scorer = create_dataset(task, seed=0, size=1)

    def judge(row: Row, answer: str) -> bool:
        try:
            return float(scorer.score_answer(answer.strip(), unpacked(row.fields["entry"]))) >= 0.99
        except Exception:  # noqa: BLE001
            return False

    return judge


def gold_of(row: Row) -> str | None:
    """The gold, or an example of a right answer if there are many."""
    entry: Any = unpacked(row.fields["entry"])
    if entry["answer"] is not None:
        return str(entry["answer"])
    metadata = entry["metadata"]
    if "possible_answer" in metadata:
        return json.dumps(metadata["possible_answer"])
    for name in ("example_answer", "example_correct_answer"):
        if name in metadata:
            return str(metadata[name])
    return None


def altered_golds(rows: Sequence[Row]) -> Iterator[tuple[str, list[str | None]]]:
    """Each alteration with its answer to every row; `None` if it changes nothing."""
    golds = [gold_of(row) for row in rows]
    for label, change in ALTERED.items():
        changed = [change(gold) if gold else None for gold in golds]
        pairs = zip(changed, golds, strict=True)
        yield (
            label,
            [one if one and _spelled(one) != _spelled(gold or "") else None for one, gold in pairs],
        )
    yield "the prompt", [row.text for row in rows]
    yield "a line of the prompt", [_statement(row.text) for row in rows]
    choices = ", ".join(dict.fromkeys(gold for gold in golds if gold))
    yield "all golds of the rows", [choices for _ in rows]


def _spelled(text: str) -> list[str]:
    """Spellings of a text that differ in white space, case or trailing zeros."""
    numbers = re.sub(r"-?\d+\.\d*|-?\d+", lambda found: repr(float(found[0]) or 0.0), text)
    return numbers.casefold().split()


def _statement(text: str) -> str:
    """A statement or the question in a prompt, without its number."""
    lines = [
        line for line in text.splitlines() if re.match(r"\.?\d+\. ", line)
    ] or text.splitlines()
    return re.sub(r"^\.?\d+\. ", "", lines[0]).strip()


def rates(rows: Sequence[Row], judge: Judge) -> Rates:
    """The rates of the gold, the best constant and the best altered gold."""
    golds = [gold_of(row) for row in rows]
    known = [judge(row, gold) for row, gold in zip(rows, golds, strict=True) if gold is not None]
    constants = {text: sum(judge(row, text) for row in rows) / len(rows) for text in CONSTANTS}
    altered = {}
    for label, answers in altered_golds(rows):
        tried = [
            judge(row, answer)
            for row, answer in zip(rows, answers, strict=True)
            if answer is not None and len(answer) <= _LARGEST
        ]
        altered[label] = sum(tried) / len(rows)
    return Rates(
        gold=sum(known) / len(known) if known else None,
        constant=max(constants.items(), key=lambda item: item[1]),
        altered=max(altered.items(), key=lambda item: item[1]),
    )


def shown(found: tuple[str, float]) -> str:
    """The best answer of a kind with its rate; empty if none was right."""
    label, rate = found
    if not rate:
        return "0"
    short = label if len(label) <= 24 else f"{label[:20]}..."
    return f"{rate:.0%} `{short}`" if label in CONSTANTS else f"{rate:.0%} {short}"


def line(task: str, mine: Rates, theirs: Rates) -> str:
    """One row of the table."""
    rule = RULES[task]
    judged = "library" if rule.judge is None else "ours"
    gold = "" if mine.gold is None else f"{mine.gold:.0%}"
    cells = [f"`{task}`", rule.reads, judged, gold]
    cells += [shown(one) for one in (mine.constant, mine.altered, theirs.constant, theirs.altered)]
    return f"| {' | '.join(cells)} |".replace("%", " %")


PAGE = """# How reasoning-gym answers are judged

What each reasoning-gym task takes as an answer, who judges it, and what a model could earn with a constant or an almost right answer: here, and under the library's own scorer.
[Tasks](tasks.md#reasoning-gym) explains the rules, which are in [gym_rules.py](../../src/sortedrl/rewards/gym_rules.py).
Made by `python benchmarks/gym_battery.py --out docs/reference/gym-scorers.md` with reasoning-gym {version}, {count} rows per task.

- *Read as*: what an answer must be; anything else is refused.
- *Judged by*: `library` is the library's scorer, which only sees answers of that form; `ours` is a check of our own.
  A scorer that evaluates text, the answer's or the row's, is never called.
- *Gold* is the share of rows whose gold, or the library's example where there are many right answers, counts as right.
- *Constant* is the best of {constants} answers that do not look at the row (`nan`, `0`, `True`, `[]`, `x/x` ...).
  Where few answers are possible this is the rate of a guess.
- *Altered gold* is the best of {altered} answers that are almost right, or contain the gold and more: a prefix, a suffix, the gold twice, one digit or letter changed, numbers replaced by `nan`, the prompt, all golds of all rows in one answer.
- The last two columns are the same for the library's scorer alone, with a score of 0.99 counting as right ({few} rows for the integrals, where it takes seconds).

| task | read as | judged by | gold | constant | altered gold | library: constant | library: altered gold |
|---|---|---|---|---|---|---|---|
{lines}

## Remaining weaknesses

- Tasks with two or three possible answers reward a guess, and so do rows with small numbers.
- An altered gold may be right: a graph has many colourings, sums, factors and some moves may be read backwards, the steps of a solved Sokoban may be repeated, a difference of dates needs no unit, and a number may differ after the digits that count.
  That is the twelfth digit in `decimal_arithmetic`, which rounds at every step, the third in `power_function` and the fourth in `coin_flip`.
- `propositional_logic` has no gold, and most of the library's examples are premises in other words.
  For us a conclusion follows from several premises together and from none alone; rows in which there is none are left out.
- Rows of `intermediate_integration` whose integral the library cannot solve, and cubes of `rubiks_cube` that are solved from the start, are left out too.
"""  # noqa: E501


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Rates of constants and altered golds in each task of reasoning-gym."""

    tasks: tuple[str, ...] = tuple(sorted(RULES))
    """Which tasks."""
    count: int = 50
    """Rows per task."""
    out: Path | None = None
    """The page to write."""


def main(arguments: Arguments) -> None:
    """Print or write the table."""
    warnings.simplefilter("ignore")
    lines = []
    for task in arguments.tasks:
        rows = gym_rows(GymSettings(name=task, count=arguments.count, instruction=""))
        with redirect_stdout(StringIO()):
            alone = rows[:_FEW] if task in _SLOW else rows
            lines.append(line(task, rates(rows, ours), rates(alone, library(task))))
        print(lines[-1], flush=True)
    if arguments.out is not None:
        page = PAGE.format(
            version=version("reasoning-gym"),
            count=arguments.count,
            few=_FEW,
            constants=len(CONSTANTS),
            altered=len(ALTERED) + 3,
            lines="\n".join(lines),
        )
        arguments.out.write_text(page)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
