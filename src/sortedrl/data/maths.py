"""The maths data sets: their sources, and how their records become rows for `math_reward`.

Columns have different names on the hub and in other copies of the files, so a reader knows both; a
record with neither is refused with its place.
Golds are normalised: no `$`, no thousands separators, `27` instead of `27.0`.

The rows of a set come in its order, so the same settings give the same rows. Only rows of `train`
carry a `response` to imitate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from sortedrl.config.checks import require
from sortedrl.data.rows import Record, Row, read_hub, read_records
from sortedrl.errors import DataError, unknown_name
from sortedrl.rewards.maths.reading import boxed_answer, parts, tidied

_CALCULATOR = re.compile(r"<<[^<>]*>>")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_COUNTED = re.compile(r"(?P<answer>.*\S)\s+\((?P<unit>[^()]*)\)", re.DOTALL)
_SOLVED_BEFORE = "Final answer: The final answer is"
_MOST_DIGITS = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A question with its gold: text, or a list of parts that must all be given."""

    question: str
    answer: str | list[str]
    fields: Mapping[str, object] = field(default_factory=dict)
    """Other fields of the row; the reward uses `alternatives`, `error` and `is_measured`."""
    solution: str | None = None
    """A worked solution that ends in the boxed answer."""


@dataclass(frozen=True, slots=True)
class MathsSet:
    """A data set: its sources, and how to read one of its records."""

    hub: str
    """Its name on the hub."""
    read: Callable[[Record], Example | None]
    """Gives the example of a record; `None` for a record without a gold."""
    hub_splits: Mapping[str, str]
    """For each of our splits, its name on the hub."""
    files: Mapping[str, str]
    """For each split, its file in the folder of the sets."""
    subset: str | None = None
    """Its subset on the hub."""


def _lines(name: str, splits: Iterable[str] = ("test",)) -> dict[str, str]:
    return {split: f"{name}/{split}.jsonl" for split in splits}


def _gsm8k(record: Record) -> Example:
    worked, mark, final = _text(record, "answer").rpartition("####")
    if not mark:
        raise DataError(record.place, "the answer must end in `#### number`; it has no ####")
    answer = _THOUSANDS.sub("", final.strip())
    steps = _CALCULATOR.sub("", worked).strip()
    return Example(
        question=_text(record, "question"),
        answer=answer,
        solution=f"{steps}\nThe answer is \\boxed{{{answer}}}.",
    )


def _math(record: Record) -> Example | None:
    # A few rows of a common copy of the training set have no answer.
    if _column(record, "answer") in (None, ""):
        return None
    solution = record.values.get("solution")
    level = _level(record, "level", "difficulty")
    return Example(
        question=_text(record, "problem", "question"),
        answer=_text(record, "answer").strip(),
        fields={
            **({} if level is None else {"level": level}),
            "subject": _text(record, "subject", "type"),
        },
        solution=solution if isinstance(solution, str) else None,
    )


def _aime(record: Record) -> Example:
    answer = _text(record, "answer").strip()
    if not answer.isdecimal() or len(answer) > _MOST_DIGITS:
        raise DataError(record.place, f"the answer must be a whole number, got {answer!r:.80}")
    return Example(
        question=_text(record, "problem", "question"),
        answer=str(int(answer)),
        solution=_text(record, "solution"),
    )


def _amc(record: Record) -> Example:
    return Example(question=_text(record, "question", "problem"), answer=_number(record, "answer"))


def _minerva(record: Record) -> Example:
    question = _text(record, "problem", "question")
    golds = list(dict.fromkeys(answer.strip() for answer in _texts(record, "answer")))
    subject, solution = record.values.get("type"), record.values.get("solution")
    box = boxed_answer(solution) if isinstance(solution, str) else None
    if box and _SOLVED_BEFORE in question:
        # If a question states the answers to its earlier parts, a common copy of the file has one
        # of those as the gold (34 rows); the boxed answer of the solution is right.
        golds = [box.replace("np.", "\\")]
    return Example(
        question=question,
        answer=golds[0],
        fields={
            "is_measured": True,
            **({"alternatives": golds[1:]} if golds[1:] else {}),
            **({"subject": subject} if isinstance(subject, str) else {}),
        },
        solution=solution if isinstance(solution, str) else None,
    )


def _olympiadbench(record: Record) -> Example:
    question, context = _text(record, "question"), record.values.get("context")
    answers = [part for text in _texts(record, "final_answer", "answer") for part in _golds(text)]
    found = {
        "subject": record.values.get("subfield"),
        "unit": record.values.get("unit"),
        "error": _error(record),
    }
    return Example(
        question=f"{context}\n\n{question}" if isinstance(context, str) else question,
        answer=answers if len(answers) > 1 else answers[0],
        fields={name: value for name, value in found.items() if value is not None},
    )


def _golds(text: str) -> list[str]:
    """The answers in a text; the text itself if it is a sentence."""
    tidy = tidied(text)
    return [tidy] if " is " in tidy else parts(tidy)


def _error(record: Record) -> float | None:
    error = record.values.get("error")
    if error is None:
        return None
    try:
        tolerance = float(str(error))
    except ValueError as reason:
        raise DataError(record.place, f"error must be a number, got {error!r:.80}") from reason
    if not math.isfinite(tolerance):
        raise DataError(record.place, f"error must be a finite number, got {error!r:.80}")
    return tolerance


def _svamp(record: Record) -> Example:
    return Example(
        question=f"{_text(record, 'Body').strip()} {_text(record, 'Question').strip()}",
        answer=_number(record, "Answer"),
        fields={"subject": _text(record, "Type")},
    )


def _asdiv(record: Record) -> Example:
    golds = [one.strip() for one in _text(record, "answer").split(";")]
    counted = [_COUNTED.fullmatch(gold) for gold in golds]
    units = [match["unit"] for match in counted if match is not None]
    answers = [
        gold if match is None else match["answer"]
        for gold, match in zip(golds, counted, strict=True)
    ]
    return Example(
        question=f"{_text(record, 'body').strip()} {_text(record, 'question').strip()}",
        answer=answers if len(answers) > 1 else answers[0],
        fields={
            "subject": _text(record, "solution_type"),
            **({"unit": ", ".join(units)} if units else {}),
        },
    )


def _mawps(record: Record) -> Example:
    subject = record.values.get("type")
    return Example(
        question=_text(record, "input", "question"),
        answer=_number(record, "target", "result_float"),
        fields={"subject": subject} if isinstance(subject, str) else {},
    )


_TRAIN = {"train": "train"}
_TEST = {"test": "test"}
_BOTH = {"train": "train", "test": "test"}

MATHS_SETS: Mapping[str, MathsSet] = MappingProxyType(
    {
        "gsm8k": MathsSet("openai/gsm8k", _gsm8k, _BOTH, _lines("gsm8k", _BOTH), subset="main"),
        "math": MathsSet(
            "nlile/hendrycks-MATH-benchmark", _math, _TRAIN, {"train": "math_train/math.json"}
        ),
        "math500": MathsSet("HuggingFaceH4/MATH-500", _math, _TEST, _lines("math500")),
        "aime24": MathsSet("HuggingFaceH4/aime_2024", _aime, {"test": "train"}, _lines("aime24")),
        "amc23": MathsSet("math-ai/amc23", _amc, _TEST, _lines("amc23")),
        "minerva": MathsSet(
            "math-ai/minervamath", _minerva, _TEST, {"test": "minerva/minerva.json"}
        ),
        "olympiadbench": MathsSet(
            "Hothan/OlympiadBench",
            _olympiadbench,
            {"test": "train"},
            _lines("olympiadbench"),
            subset="OE_TO_maths_en_COMP",
        ),
        "svamp": MathsSet("ChilleD/SVAMP", _svamp, _BOTH, _lines("svamp")),
        "asdiv": MathsSet("EleutherAI/asdiv", _asdiv, {"test": "validation"}, _lines("asdiv")),
        "mawps": MathsSet("MU-NLPC/Calc-mawps", _mawps, _BOTH, _lines("mawps")),
    }
)


def _column(record: Record, *names: str) -> object:
    """The value of the first of these columns that the record has."""
    for name in names:
        if name in record.values:
            return record.values[name]
    wanted = " or ".join(f"`{name}`" for name in names)
    raise DataError(
        record.place, f"must have a column {wanted}, has {', '.join(record.values) or 'none'}"
    )


def _text(record: Record, *names: str) -> str:
    value = _column(record, *names)
    if not isinstance(value, str) or not value.strip():
        raise DataError(record.place, f"`{names[0]}` must be text, got {value!r:.80}")
    return value


def _texts(record: Record, *names: str) -> list[str]:
    """Text, or a list of at least one."""
    value = _column(record, *names)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        raise DataError(record.place, f"`{names[0]}` must be text or a list, got {value!r:.80}")
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            raise DataError(record.place, f"`{names[0]}` must hold text, got {text!r:.80}")
    return texts


def _number(record: Record, *names: str) -> str:
    """A number, stored as text or number, in plain notation."""
    value = _column(record, *names)
    try:
        number = float(str(value).replace(",", ""))
    except ValueError as error:
        raise DataError(
            record.place, f"`{names[0]}` must be a number, got {value!r:.80}"
        ) from error
    if not math.isfinite(number):
        raise DataError(record.place, f"`{names[0]}` must be a finite number, got {value!r:.80}")
    return str(int(number)) if number.is_integer() else f"{number:.12g}"


def _level(record: Record, *names: str) -> int | None:
    """The level as a whole number: 5, 5.0 or `Level 5`; `None` if it is unknown."""
    value = _column(record, *names)
    digits = re.search(r"[0-9]+", str(value))
    if digits is None or digits[0] == "0" or len(digits[0]) > _MOST_DIGITS:
        return None
    return int(digits[0])


INSTRUCTION = r"Think it through step by step, then give the final answer inside \boxed{}."


@dataclass(frozen=True, slots=True, kw_only=True)
class MathsSettings:
    """One of the maths sets."""

    name: str = "gsm8k"
    """The set: gsm8k, math, math500, aime24, amc23, minerva, olympiadbench, svamp, asdiv or
    mawps."""
    split: str = "test"
    """train or test; only gsm8k has both in files, math has only train. By default training
    uses train and evaluation uses test."""
    folder: Path | None = None
    """Folder with one subfolder per set; by default the sets are loaded from the hub."""
    limit: int | None = None
    """Only the first rows, this many."""
    instruction: str = INSTRUCTION
    """Text appended to the question; may be empty."""

    def __post_init__(self) -> None:
        require(self.name in MATHS_SETS, unknown_name("maths set", self.name, MATHS_SETS))
        found = MATHS_SETS[self.name]
        splits = found.hub_splits if self.folder is None else found.files
        require(
            self.split in splits,
            f"maths.split of {self.name} must be {' or '.join(splits)}, got {self.split!r}",
        )
        require(
            self.limit is None or self.limit >= 1,
            f"maths.limit must be at least 1, got {self.limit}; leave it out for all rows",
        )


def maths_rows(settings: MathsSettings) -> list[Row]:
    """The rows of these settings; raises `DataError` for a record that cannot be used."""
    pairs = islice(maths_examples(settings), settings.limit)
    return [_row(example, place, settings) for place, example in pairs]


def maths_examples(settings: MathsSettings) -> Iterator[tuple[str, Example]]:
    """The examples of the set with their places; records without a gold are skipped."""
    read = MATHS_SETS[settings.name].read
    for record in _records(settings):
        example = read(record)
        if example is not None:
            yield record.place, example


def _records(settings: MathsSettings) -> Iterator[Record]:
    found = MATHS_SETS[settings.name]
    if settings.folder is not None:
        return read_records(settings.folder / found.files[settings.split])
    return read_hub(found.hub, subset=found.subset, split=found.hub_splits[settings.split])


def _row(example: Example, place: str, settings: MathsSettings) -> Row:
    question = example.question.strip()
    content = f"{question}\n\n{settings.instruction}" if settings.instruction else question
    fields: dict[str, object] = {"answer": example.answer, **example.fields}
    if settings.split == "train" and example.solution is not None:
        fields["response"] = example.solution
    return Row(
        prompt=({"role": "user", "content": content},),
        fields=fields,
        place=place,
        question=question,
    )
