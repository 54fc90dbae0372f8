r"""Agreement of the maths reward with the golds of the maths sets.

    python benchmarks/maths_agreement.py --folder FOLDER               all sets, minutes on a core
    python benchmarks/maths_agreement.py --folder FOLDER --sets aime24 amc23
    python benchmarks/maths_agreement.py --folder FOLDER --json result.json

Each row is scored by the real reward, in worker processes with a timeout, in four ways, and once by
math-verify alone:

    library     the gold in a box against the gold in a box, by math-verify with its own settings
    itself      the gold in a box must be right
    respelled   the gold in another spelling, which needs sympy or exact numbers, must too
    solution    the worked solution of the row, if it has one with a box, should be right
    neighbour   the gold of the next row, if it is another text, should be wrong

Exceptions are listed. In `solution` they are mostly errors of the set, and in `neighbour` two
spellings of one answer.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tyro

from sortedrl.config.data import RewardSettings
from sortedrl.data.maths import MATHS_SETS, Example, MathsSettings, maths_examples
from sortedrl.rewards.functions import RewardSource, source_of
from sortedrl.rewards.maths import math_reward
from sortedrl.rewards.maths.numbers import numeral
from sortedrl.rewards.maths.reading import boxed_answer, is_words, parts, tidied
from sortedrl.rewards.pool.pool import RewardPool
from sortedrl.types import Prompt

_NO_FORMULA = re.compile(r"=|\\(?:begin|cup|in|infty|text|le|ge)(?![A-Za-z])|<|>|_\{?\d|:|%|!$")
_KINDS = ("library", "itself", "respelled", "solution", "neighbour")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to look at."""

    folder: Path
    """The folder with the files of the sets."""
    sets: tuple[str, ...] = tuple(MATHS_SETS)
    """The sets to look at."""
    json: Path | None = None
    """Write all findings to this file."""
    workers: int = 2
    """Worker processes."""
    limit: int | None = None
    """Only the first rows of each set."""


@dataclass(frozen=True, slots=True)
class Check:
    """A response to a row, and whether it should be right."""

    kind: str
    place: str
    prompt: Prompt
    response: str
    should_be_right: bool


@dataclass(slots=True)
class Count:
    """Results of one kind of check for a set."""

    checks: int = 0
    agreed: int = 0
    seconds: float = 0.0
    timeouts: int = 0
    unread_golds: list[str] = field(default_factory=list)
    exceptions: list[str] = field(default_factory=list)


def library_alone(prompt: Prompt, response: str) -> dict[str, float]:
    """math-verify on the golds without our parsers."""
    from math_verify import parse, verify

    gold = parse(rf"\boxed{{{written(prompt.fields['answer'])}}}", parsing_timeout=None)
    is_equal = verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None)
    return {"correct": float(is_equal)}


def written(gold: object) -> str:
    """The gold as a model would box it."""
    return gold if isinstance(gold, str) else ", ".join(gold)  # type: ignore[arg-type]


def respelled(gold: str) -> str | None:
    """The gold in another spelling; `None` if none is safe."""
    tidy = tidied(gold)
    number = numeral(tidy, is_gold=True)
    if number is not None:
        double, sign = 2 * number.value, "%" if number.is_percent else ""
        if number.step:
            return None if sign else f"{float(number.value):.12e}"
        if number.is_whole:
            return f"{int(number.value):,}.00{sign}"
        return rf"\dfrac{{{double.numerator}}}{{{2 * double.denominator}}}{sign}"
    if is_words(tidy) or len(parts(tidy)) != 1 or "," in tidy or _NO_FORMULA.search(tidy):
        return None
    return f"0 + 1 \\cdot ({tidy})"


def checks(pairs: Sequence[tuple[str, Example]]) -> Iterator[Check]:
    """The checks for the rows of a set."""
    for number, (place, example) in enumerate(pairs):
        prompt = Prompt(id=number, fields={"answer": example.answer, **example.fields})
        gold = written(example.answer)
        yield Check("library", place, prompt, rf"So it is \boxed{{{gold}}}.", True)
        yield Check("itself", place, prompt, rf"So it is \boxed{{{gold}}}.", True)
        other = respelled(gold) if isinstance(example.answer, str) else None
        if other is not None:
            yield Check("respelled", place, prompt, rf"So it is \boxed{{{other}}}.", True)
        if example.solution is not None and boxed_answer(example.solution):
            yield Check("solution", place, prompt, example.solution, True)
        next_gold = written(pairs[(number + 1) % len(pairs)][1].answer)
        if next_gold != gold:
            yield Check("neighbour", place, prompt, rf"So it is \boxed{{{next_gold}}}.", False)


def examine(
    pairs: Sequence[tuple[str, Example]], pool: RewardPool, library: RewardPool
) -> dict[str, Count]:
    """Every check of a set, counted by kind."""
    counts = {kind: Count() for kind in _KINDS}
    wanted = list(checks(pairs))
    pools = [library if check.kind == "library" else pool for check in wanted]
    tickets = [
        to.submit(check.prompt, check.response) for to, check in zip(pools, wanted, strict=True)
    ]
    for check, to, ticket in zip(wanted, pools, tickets, strict=True):
        (outcome,) = to.wait([ticket])
        count = counts[check.kind]
        count.checks += 1
        count.seconds += outcome.seconds
        count.timeouts += outcome.failure is not None
        score_parts = {} if outcome.score is None else outcome.score.parts
        if score_parts.get("unread_gold", 0.0) > 0:
            count.unread_golds.append(str(check.prompt.fields["answer"]))
        is_right = score_parts.get("correct", 0.0) > 0
        if is_right == check.should_be_right:
            count.agreed += 1
        else:
            count.exceptions.append(
                f"{Path(check.place).name}: gold {check.prompt.fields['answer']!r}, answer "
                f"{boxed_answer(check.response)!r}"
                + (f" ({outcome.failure})" if outcome.failure else "")
            )
    return counts


def show(name: str, counts: dict[str, Count]) -> None:
    """One line for each kind of check, and its exceptions."""
    for kind, count in counts.items():
        if count.checks:
            print(
                f"{name:20} {kind:10} {count.agreed:6} of {count.checks:6}  "
                f"{count.agreed / count.checks:8.2%}  {count.seconds:7.1f} s  "
                f"{1000 * count.seconds / count.checks:6.1f} ms each"
                + (f"  {len(count.unread_golds)} golds unread" if count.unread_golds else "")
                + (f"  {count.timeouts} time-outs" if count.timeouts else "")
            )
    for kind, count in counts.items():
        for exception in count.exceptions:
            print(f"    {kind}: {exception}")
        for gold in count.unread_golds:
            print(f"    {kind}: math-verify cannot read the gold {gold!r}")


def main() -> None:
    """Examine and print."""
    settings = tyro.cli(Settings, description=__doc__, args=sys.argv[1:])
    found = {}
    began = time.perf_counter()
    pool_settings = RewardSettings(workers=settings.workers, on_failure="skip")
    alone = RewardSource(f"{Path(__file__).resolve()}:library_alone")
    with (
        RewardPool(source_of(math_reward), pool_settings) as pool,
        RewardPool(alone, pool_settings) as library,
    ):
        for name in settings.sets:
            for split in MATHS_SETS[name].files:
                chosen = MathsSettings(name=name, split=split, folder=settings.folder)
                pairs = list(maths_examples(chosen))[: settings.limit]
                found[f"{name}/{split}"] = examine(pairs, pool, library)
                show(f"{name}/{split}", found[f"{name}/{split}"])
    seconds = time.perf_counter() - began
    print(f"{seconds:.0f} s with {settings.workers} workers")
    if settings.json is not None:
        result = {
            "seconds": seconds,
            "sets": {
                name: {kind: asdict(count) for kind, count in counts.items()}
                for name, counts in found.items()
            },
        }
        settings.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
