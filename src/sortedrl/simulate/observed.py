"""Answer lengths from other trainers: read from their logs, or recorded by `measure`.

what                                   file                       fields read
`sortedrl.measure`                     .jsonl                     tokens, step, prompt
verl, `rollout_data_dir`               folder of STEP.jsonl       output, step, input
TRL, `log_completions`                 folder of .parquet         completion, step, prompt
verifiers and prime-rl, results        .jsonl                     token_usage, or completion
anything else                          .jsonl, .parquet           length, tokens or response_length

If a log has text but no token counts, a token is taken as four characters: the shape of the
distribution matters, not its scale. Pickle files are never opened.

`measure` is a reward function that records lengths and changes nothing:

    trainer = GRPOTrainer(..., reward_funcs=[mine, sortedrl.measure("lengths.jsonl")])

caller            how                                                      returns
TRL               reward_funcs=[mine, measure(path)]                       None for each answer
verl              reward.custom_reward_function, around yours              the reward's result
slime             --custom-rm-path, around yours                           the reward's result
OpenRLHF          --remote_rm_url FILE, around yours                       the reward's result

Then `sortedrl compare lengths.jsonl` shows how idle the slots were and the gain of each schedule.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any, TypeGuard

from sortedrl.errors import ConfigError, DataError

SUFFIXES = (".jsonl", ".parquet")
_PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".bin")
_LETTERS_PER_TOKEN = 4
_COUNTS = ("tokens", "length", "response_length", "completion_length", "num_tokens")
_TEXTS = ("output", "completion", "response")
_PROMPTS = ("prompt", "input", "example_id", "prompt_id")
_STEPS = ("step", "global_step", "rollout_id")
_MOST_LENGTHS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The answers of a run: their lengths, and how they were sampled."""

    lengths: tuple[int, ...]
    """A sample of the lengths, evenly picked, if there are many."""
    answers_per_step: int
    """Answers of one synchronous step."""
    samples_per_prompt: int
    prompt_share: float
    """Share of the variance of the lengths that belongs to the prompt."""
    busy: float
    """Slot occupancy during generation, over engine steps."""
    is_estimated: bool
    """Whether tokens were estimated from text."""


@dataclass(frozen=True, slots=True)
class _LoggedAnswer:
    """One answer of a log."""

    tokens: int
    step: object
    prompt: str
    is_estimated: bool


def read_observed(path: Path) -> Observed:
    """Read a log of answers; of a folder, all files."""
    seen = [answer for file in _files(path) for answer in _answers_of_log(file)]
    if not seen:
        raise DataError(path, "has no answers; give a log of at least one step")
    steps: dict[object, list[_LoggedAnswer]] = defaultdict(list)
    for answer in seen:
        steps[answer.step].append(answer)
    sizes = Counter(len(answers) for answers in steps.values())
    size = max(sizes, key=lambda count: (sizes[count], count))
    every = max(1, len(seen) // _MOST_LENGTHS)
    return Observed(
        lengths=tuple(answer.tokens for answer in seen[::every]),
        answers_per_step=size,
        samples_per_prompt=_samples(steps.values()),
        prompt_share=_prompt_share(steps.values()),
        busy=_busy([[answer.tokens for answer in answers] for answers in steps.values()]),
        is_estimated=any(answer.is_estimated for answer in seen),
    )


def is_log(path: Path) -> bool:
    """Whether a path may be a log of answers: a folder, or a file with a known suffix."""
    is_folder = path.is_dir() and path.suffix != ".toml"
    return path.suffix in (*SUFFIXES, *_PICKLES) or is_folder


def observed_line(observed: Observed, *, name: str) -> str:
    """Summary of a log, in one line."""
    idle = f"{100 * (1 - observed.busy):.0f} %"
    estimated = " (tokens are estimated from the text)" if observed.is_estimated else ""
    return (
        f"{name}: steps of {observed.answers_per_step:,} answers, "
        f"{observed.samples_per_prompt} per prompt; {idle} of the slot time was idle, waiting for "
        f"the longest answer of a step{estimated}"
    )


def _files(path: Path) -> list[Path]:
    if path.suffix in _PICKLES:
        raise ConfigError(
            f"{path} is a pickle, which can run arbitrary code when loaded and is never read; "
            "record lengths with sortedrl.measure instead"
        )
    if not path.is_dir():
        return [path]
    files = sorted((p for p in path.rglob("*") if p.suffix in SUFFIXES), key=_number)
    if not files:
        raise DataError(path, f"has no log of answers ({', '.join(SUFFIXES)}); check the path")
    return files


def _number(path: Path) -> tuple[int, str]:
    digits = "".join(letter for letter in path.stem if letter.isdigit())
    return int(digits or 0), str(path)


def _answers_of_log(path: Path) -> Iterator[_LoggedAnswer]:
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    for number, row in rows:
        tokens, is_estimated = _tokens_of_row(row, path, number)
        if tokens:
            yield _LoggedAnswer(
                tokens,
                next((row[name] for name in _STEPS if name in row), str(path)),
                str(next((row[name] for name in _PROMPTS if name in row), number)),
                is_estimated,
            )


def _json_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    row = json.loads(line)
                    yield number, row if isinstance(row, dict) else {"tokens": row}
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror}); check the path") from error
    except (ValueError, RecursionError) as error:
        raise DataError(path, f"not JSON lines: {error}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"{path}: reading Parquet needs pyarrow; pip install 'sortedrl[data]'"
        ) from error
    known = {*_COUNTS, *_TEXTS, *_PROMPTS, *_STEPS}
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in known]
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror or error})") from error
    except pyarrow.ArrowException as error:
        raise DataError(path, f"not Parquet: {error}") from error


def _tokens_of_row(row: Mapping[str, Any], path: Path, number: int) -> tuple[int, bool]:
    """Tokens of an answer, and whether they are an estimate."""
    counted = next((row[name] for name in _COUNTS if row.get(name) is not None), None)
    if counted is None and isinstance(row.get("token_usage"), Mapping):
        counted = row["token_usage"].get("output_tokens")
    if counted is not None:
        is_count = isinstance(counted, int | float) and not isinstance(counted, bool)
        if not is_count or not 0 <= counted < math.inf:
            raise DataError(path, f"tokens must be a number, got {counted!r:.80}", line=number)
        return int(counted), False
    texts = [row[name] for name in _TEXTS if row.get(name) is not None]
    if not texts:
        raise DataError(
            path,
            f"a line must have one of {', '.join((*_COUNTS, *_TEXTS))}, got {sorted(row)!r:.200}",
            line=number,
        )
    letters = sum(len(text) for text in _written(texts[0]))
    return -(-letters // _LETTERS_PER_TOKEN), True


def _written(completion: object) -> Iterator[str]:
    """The text of the model: a string, or the assistant's messages."""
    if isinstance(completion, str):
        yield completion
    elif isinstance(completion, Sequence):
        for message in completion:
            if isinstance(message, Mapping) and message.get("role", "assistant") == "assistant":
                yield from _written(message.get("content") or "")


def _samples(steps: Iterable[Sequence[_LoggedAnswer]]) -> int:
    """Answers per prompt within a step: the most common number."""
    counts = Counter(
        count
        for answers in steps
        for count in Counter(answer.prompt for answer in answers).values()
    )
    return max(counts, key=lambda count: (counts[count], count))


def _prompt_share(steps: Iterable[Sequence[_LoggedAnswer]]) -> float:
    """The share of the variance of log lengths that belongs to the prompt."""
    groups: dict[tuple[object, str], list[float]] = defaultdict(list)
    for answers in steps:
        for answer in answers:
            groups[answer.step, answer.prompt].append(math.log(answer.tokens))
    several = [group for group in groups.values() if len(group) > 1]
    if len(several) < 2:
        return 0.0
    everything = [value for group in several for value in group]
    total = pvariance(everything)
    # The variance of a few siblings is too small by the share of their own mean.
    within = fmean(pvariance(group) * len(group) / (len(group) - 1) for group in several)
    return 0.0 if total == 0 else min(1.0, max(0.0, 1 - within / total))


def _busy(steps: Sequence[Sequence[int]]) -> float:
    """Slot occupancy if every step waits for its longest answer."""
    waited = sum(len(lengths) * max(lengths) for lengths in steps)
    return sum(sum(lengths) for lengths in steps) / waited


_LISTS = ("completion_ids", "completions", "queries", "responses")
_SINGLE = ("solution_str", "response", "response_str")
_PAUSE_SECONDS = 1.0


def measure(path: str | Path, reward: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A reward function that records lengths in `path`, wrapping `reward` if one is given.

    Without `reward` it returns `None` for every answer, which trainers with several rewards leave
    out of the sum. Several processes may write to the same file.
    """
    target = Path(path)
    if target.suffix != ".jsonl":
        raise ConfigError(f"lengths are kept as JSON lines, so path must end in .jsonl, got {path}")
    notes = _LengthLog(target)

    if reward is not None and inspect.iscoroutinefunction(reward):

        async def measured_later(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            notes.take(arguments, named)
            return await reward(*arguments, **named)

        return measured_later

    # The arguments are those of another framework, passed on unchanged to the user's function.
    def sortedrl_measure(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        count = notes.take(arguments, named)
        if reward is not None:
            return reward(*arguments, **named)
        return [None] * count

    return sortedrl_measure


class _LengthLog:
    """Writes lengths; calls in quick succession belong to one step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._step = 0
        self._last: float | None = None

    def take(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> int:
        """Record the answers of a call; returns their number."""
        answers = list(_answers_of_call(arguments, named))
        prompts = _prompts(arguments, named, len(answers))
        now = time.time()
        with self._lock:
            is_whole_step = any(name in named for name in _LISTS)
            if self._last is None or is_whole_step or now - self._last > _PAUSE_SECONDS:
                self._step += 1
            self._last = now
            step = f"{os.getpid()}-{self._step}"
            lines = [
                json.dumps(
                    {"step": step, "prompt": prompt, "tokens": max(1, tokens), "seconds": now}
                )
                for prompt, tokens in zip(prompts, answers, strict=True)
            ]
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
        return len(answers)


def _answers_of_call(arguments: Sequence[Any], named: Mapping[str, Any]) -> Iterable[int]:
    """The token counts of the answers of a call."""
    for name in _LISTS:
        if name in named:
            return [_num_tokens(answer) for answer in named[name]]
    for name in _SINGLE:
        if name in named:
            return [_num_tokens(named[name])]
    samples = [sample for argument in arguments for sample in _slime_samples(argument)]
    if samples:
        return [int(sample.response_length) for sample in samples]
    if arguments and _is_list(arguments[0]):
        return [_num_tokens(answer) for answer in _without_prompts(arguments)]
    raise ConfigError(
        "measure finds the answers of TRL (completion_ids), verl (solution_str), slime (samples) "
        f"and OpenRLHF (queries), got arguments {sorted(named)}; wrap your own reward so that it "
        "passes completion_ids=..."
    )


def _slime_samples(argument: object) -> list[Any]:
    """Slime's samples, one or many, known by the name of their class: slime is not imported."""
    parts = argument if isinstance(argument, list) else [argument]
    return [part for part in parts if type(part).__name__ == "Sample"]


def _num_tokens(answer: object) -> int:
    """Count token ids; four characters of text are a token."""
    if isinstance(answer, str):
        return -(-len(answer) // _LETTERS_PER_TOKEN)
    if not isinstance(answer, Sequence):
        raise ConfigError(f"an answer must be text, token ids or messages, got {answer!r:.80}")
    if answer and isinstance(answer[0], Mapping):
        return sum(_num_tokens(str(message.get("content") or "")) for message in answer)
    return len(answer)


def _prompts(arguments: Sequence[Any], named: Mapping[str, Any], count: int) -> list[str]:
    """Keys that identify prompts, so that siblings are known; their text is not stored."""
    samples = [sample for argument in arguments for sample in _slime_samples(argument)]
    if samples:
        return [_key(s.prompt if s.group_index is None else s.group_index) for s in samples]
    given = named.get("prompts", arguments[1] if len(arguments) > 1 else None)
    if _is_list(given) and len(given) == count:
        return [_key(prompt) for prompt in given]
    one = named.get("extra_info") or named.get("ground_truth") or named.get("prompt")
    if isinstance(one, Mapping) and "index" in one:
        # verl adds fields that differ between siblings.
        one = one["index"]
    return [_key(one) if one is not None else str(place) for place in range(count)]


def _without_prompts(arguments: Sequence[Any]) -> Iterable[object]:
    """OpenRLHF's answers: its queries are prompt and answer as one text, then come the prompts."""
    queries, *rest = arguments
    if not rest or not _is_list(rest[0]) or len(rest[0]) != len(queries):
        return list(queries)
    return [
        query.removeprefix(prompt) if isinstance(query, str) and isinstance(prompt, str) else query
        for query, prompt in zip(queries, rest[0], strict=True)
    ]


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _key(prompt: object) -> str:
    return hashlib.sha256(repr(prompt).encode(errors="replace")).hexdigest()[:12]
