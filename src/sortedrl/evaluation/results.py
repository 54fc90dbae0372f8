"""An evaluation on disk: a folder that grows with every answer and survives interruptions.

    samples.jsonl    one answer per line, appended as it arrives
    summary.json     model, settings and questions from the start; the results at the end
    page.html        the same for reading, written by the report

`samples.jsonl` is the record; everything else can be recomputed from it. A last line without
newline is an answer that was being written when the run was interrupted: it is ignored on reading
and truncated before the file grows again. Files are strict JSON, without NaN or infinity.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, Self, get_args

from sortedrl.core.files import LineFile, read_lines, refuse_foreign, write_whole
from sortedrl.errors import DataError, os_errors, unknown_name
from sortedrl.evaluation.statistics import (
    Answer,
    AnswerKey,
    Asked,
    Evaluation,
    Summary,
    differences,
    summarise,
)
from sortedrl.evaluation.tables import summary_rows
from sortedrl.rewards.pool.score import Failure
from sortedrl.types import FinishReason

SAMPLES = "samples.jsonl"
SUMMARY = "summary.json"
PAGE = "page.html"
WEIGHTS = "weights"
"""The setting with a fingerprint of the model's weights; old results have none."""

_NAMES = tuple(field.name for field in fields(Answer))
_VALUES = attrgetter(*_NAMES)
_SUMMARY_MARK = b'{\n  "label": '
_SAMPLES_MARK = f'{{"{_NAMES[0]}":'.encode()


class ResultsWriter:
    """Appends answers to a folder.

    A folder that already has answers is continued only with `resume`, and only with the same model
    and settings. More may be requested than before, but not less: the results cover all answers in
    the folder, so it may have no others than requested. If the questions of a task are given, each
    with its gold answer, they must be the ones that were answered.
    """

    def __init__(
        self,
        folder: Path,
        *,
        label: str,
        settings: Mapping[str, object],
        asked: Mapping[str, Asked],
        questions: Mapping[str, Sequence[tuple[str, str | None]]] = MappingProxyType({}),
        resume: bool = False,
    ) -> None:
        """Open the folder, and write the summary's header."""
        self._folder = folder
        self._head = Evaluation(
            label=label, answers=(), asked=dict(asked), settings=_plain(folder, settings)
        )
        _refuse_foreign_files(folder)
        self._answers = _existing_answers(folder, head=self._head, resume=resume)
        _check_questions(folder, self._answers, questions)
        self._done = {answer.key for answer in self._answers}
        samples = folder / SAMPLES
        with os_errors(folder, "cannot be written"):
            folder.mkdir(parents=True, exist_ok=True)
            _write_summary(folder, self._head, summary=None)
            whole = samples.read_bytes() if samples.exists() else b""
        self._file = LineFile(samples, keep_bytes=whole.rfind(b"\n") + 1)

    def is_done(self, key: AnswerKey) -> bool:
        """Whether the folder has this answer: `(task, prompt_id, sample_index)`."""
        return key in self._done

    @property
    def num_done(self) -> int:
        """Answers in the folder."""
        return len(self._answers)

    def append(self, answer: Answer) -> None:
        """Write one answer to the disk."""
        path = self._folder / SAMPLES
        if answer.key in self._done:
            raise DataError(path, f"the answer {answer.key} already exists")
        try:
            line = json.dumps(_row(answer), allow_nan=False, separators=(",", ":"))
        except (ValueError, TypeError) as error:
            raise DataError(
                path, f"the answer {answer.key} cannot be written as JSON ({error})"
            ) from error
        self._file.write(line)
        self._file.flush()
        self._answers.append(answer)
        self._done.add(answer.key)

    def finish(self) -> Evaluation:
        """Write the results and close the folder."""
        self.close()
        evaluation = replace(self._head, answers=tuple(self._answers))
        with os_errors(self._folder, "cannot be written"):
            _write_summary(self._folder, self._head, summary=summarise(evaluation))
        return evaluation

    def close(self) -> None:
        """Flush and close."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_results(folder: Path) -> Evaluation:
    """Read the evaluation in a folder, complete or interrupted.

    Without a `summary.json` the folder's name is the label, and the questions are unknown.
    """
    if not (folder / SAMPLES).exists():
        raise DataError(folder, f"the folder of an evaluation must have {SAMPLES}; check the path")
    unknown = Evaluation(label=folder.resolve().name, answers=())
    head = _read_head(folder / SUMMARY) or unknown
    return replace(head, answers=tuple(_read_samples(folder / SAMPLES)))


def refuse_answers(folder: Path) -> None:
    """Refuse a folder with answers, which only a resumed evaluation may continue."""
    if answers := _answers_in(folder):
        raise DataError(
            folder,
            f"already holds {len(answers)} answers; resume it (--resume), or choose another folder",
        )


def _answers_in(folder: Path) -> list[Answer]:
    return list(_read_samples(folder / SAMPLES)) if (folder / SAMPLES).exists() else []


def _existing_answers(folder: Path, *, head: Evaluation, resume: bool) -> list[Answer]:
    """The existing answers; refused if they belong to another evaluation."""
    if not resume:
        refuse_answers(folder)
        return []
    answers = _answers_in(folder)
    if not answers:
        return []
    before = _read_head(folder / SUMMARY)
    if before is not None:
        _check_same(folder, before, head)
    _check_asked(folder, answers, head.asked)
    return answers


def _refuse_foreign_files(folder: Path) -> None:
    """Refuse a folder with files of our names that no evaluation wrote."""
    refuse_foreign(folder / SUMMARY, mark=_SUMMARY_MARK)
    samples = folder / SAMPLES
    try:
        with samples.open("rb") as file:
            beginning = file.read(len(_SAMPLES_MARK))
    except OSError:
        return  # it is missing, or refused when it is read
    if not _SAMPLES_MARK.startswith(beginning):  # our own first line may be truncated
        refuse_foreign(samples, mark=_SAMPLES_MARK)


def _check_asked(folder: Path, answers: Sequence[Answer], asked: Mapping[str, Asked]) -> None:
    """Refuse to resume with fewer tasks, rows or samples than there are answers."""
    for name in dict.fromkeys(answer.task for answer in answers):
        of_task = [answer for answer in answers if answer.task == name]
        if name not in asked:
            raise DataError(
                folder,
                f"holds {len(of_task)} answers to the task {name}, which this evaluation does not "
                "include; add it, or choose another folder",
            )
        for what, there, now in (
            ("rows", 1 + max(answer.prompt_id for answer in of_task), asked[name].prompts),
            ("samples", 1 + max(answer.sample_index for answer in of_task), asked[name].samples),
        ):
            if now < there:
                raise DataError(
                    folder,
                    f"holds answers for {there} {what} of {name}, more than the {now} of this "
                    f"evaluation; ask for at least {there}, or choose another folder",
                )


def _check_questions(
    folder: Path,
    answers: Sequence[Answer],
    questions: Mapping[str, Sequence[tuple[str, str | None]]],
) -> None:
    """Refuse to resume if the answered rows have changed."""
    for answer in answers:
        if answer.task not in questions:
            continue
        question, gold = questions[answer.task][answer.prompt_id]
        asked = replace(answer, question=question, gold=gold)
        for what, was, now in differences(answer, asked, "question", "gold"):
            raise DataError(
                folder,
                f"holds answers to other rows of {answer.task}: the {what} of row "
                f"{answer.prompt_id + 1} was {was} and is {now}; choose another folder",
            )


def _check_same(folder: Path, before: Evaluation, now: Evaluation) -> None:
    """Refuse to mix answers of different models or settings."""
    old = {"model": before.label, **before.settings}
    new = {"model": now.label, **now.settings}
    changed = [
        "the weights of the model have changed"
        if name == WEIGHTS
        else f"{name} was {old.get(name)!r} and is {new.get(name)!r}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name) and (name != WEIGHTS or WEIGHTS in old)
    ]
    if changed:
        raise DataError(
            folder,
            f"can be resumed only with the same model and settings, but {'; '.join(changed)}; "
            "choose another folder",
        )


def _plain(folder: Path, settings: Mapping[str, object]) -> dict[str, object]:
    """The settings after a round trip through JSON."""
    try:
        plain: dict[str, object] = json.loads(json.dumps(settings, allow_nan=False, default=str))
    except ValueError as error:
        raise DataError(folder, f"the settings must be JSON values ({error})") from error
    return plain


def _write_summary(folder: Path, head: Evaluation, *, summary: Summary | None) -> None:
    content = {
        "label": head.label,
        "settings": head.settings,
        "asked": {task: asdict(asked) for task, asked in head.asked.items()},
        "estimates": None if summary is None else summary_rows(summary),
    }
    text = json.dumps(content, allow_nan=False, indent=2)
    write_whole(folder / SUMMARY, f"{text}\n".encode())


def _read_head(path: Path) -> Evaluation | None:
    """The evaluation without its answers; `None` without the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
        label, settings = content["label"], content["settings"]
        if not isinstance(label, str) or not isinstance(settings, dict):
            raise TypeError("label must be a text and settings an object")
        asked = {task: Asked(**counts) for task, counts in content["asked"].items()}
        return Evaluation(label=label, answers=(), asked=asked, settings=settings)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            path, f"not the summary of an evaluation ({error!r}); delete it to continue without it"
        ) from error


def _read_samples(path: Path) -> Iterator[Answer]:
    seen: dict[AnswerKey, int] = {}
    with os_errors(path, "cannot be read"):
        for number, line in read_lines(path):
            try:
                answer = _answer(json.loads(line, parse_constant=_refuse))
            except (ValueError, RecursionError) as error:
                raise DataError(path, str(error), line=number) from error
            if answer.key in seen:
                reason = f"the answer {answer.key} is already in line {seen[answer.key]}"
                raise DataError(path, reason, line=number)
            seen[answer.key] = number
            yield answer


def _row(answer: Answer) -> dict[str, object]:
    row = dict(zip(_NAMES, _VALUES(answer), strict=True))
    return row | {"parts": dict(answer.parts)}


def _answer(row: object) -> Answer:
    """The answer on a line; `ValueError` if it is invalid."""
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {row!r:.80}")
    for name in row:
        if name not in _NAMES:
            raise ValueError(unknown_name("field", name, _NAMES))
    for name in _NAMES:
        if name not in row:
            raise ValueError(f"an answer must have the field {name!r}")
        _check_field(name, row[name])
    return Answer(**row)


def _check_field(name: str, value: object) -> None:
    if name == "finish_reason" or name == "failure":
        choices = get_args(FinishReason) if name == "finish_reason" else (*get_args(Failure), None)
        fits, wanted = value in choices, f"one of {', '.join(map(str, choices))}"
    else:
        check, wanted = _FIELDS[name]
        fits = check(value)
    if not fits:
        raise ValueError(f"{name} must be {wanted}, got {value!r:.80}")


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_TEXT = (lambda value: isinstance(value, str), "a text")
_TEXT_OR_NONE = (lambda value: value is None or isinstance(value, str), "a text or null")
_COUNT = (_is_count, "a whole number of at least 0")
_FIELDS: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(("task", "question", "response"), _TEXT),
    **dict.fromkeys(("level", "gold"), _TEXT_OR_NONE),
    **dict.fromkeys(("prompt_id", "sample_index", "num_tokens"), _COUNT),
    "reward": (lambda value: value is None or _is_number(value), "a number or null"),
    "parts": (
        lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
        "named numbers",
    ),
    "is_correct": (lambda value: isinstance(value, bool), "true or false"),
}
"""The required type of each field."""


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"numbers must be finite, got {constant}")
