"""A reward function that only measures: what a schedule would gain, without changing anything.

    trainer = GRPOTrainer(..., reward_funcs=[mine, sortedrl.measure("lengths.jsonl")])

It notes the length of every answer and the time, one JSON line each, and gives no reward. Then
`sortedrl compare lengths.jsonl` says how idle the slots were and what each schedule would bring.

who calls it      how                                                      what it gives
TRL               reward_funcs=[mine, measure(path)]                       None for each answer
verl              reward.custom_reward_function, around yours              what yours gives
slime             --custom-rm-path, around yours                           what yours gives
OpenRLHF          --remote_rm_url FILE, around yours                       what yours gives
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from sortedrl.errors import ConfigError

_LETTERS_PER_TOKEN = 4
_LISTS = ("completion_ids", "completions", "queries", "responses")
_SINGLE = ("solution_str", "response", "response_str")
_PAUSE_SECONDS = 1.0


def measure(path: str | Path, reward: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A reward function that notes lengths in `path`; around `reward`, where one is given.

    Without one it gives `None` for every answer, which trainers that take several rewards leave
    out of the sum. Every process may write to the same file.
    """
    target = Path(path)
    if target.suffix != ".jsonl":
        raise ConfigError(f"lengths are kept as JSON lines, so path must end in .jsonl, got {path}")
    notes = _Notes(target)

    if reward is not None and inspect.iscoroutinefunction(reward):

        async def measured_later(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            notes.take(arguments, named)
            return await reward(*arguments, **named)

        return measured_later

    # The arguments are those of another framework, and go on to the user's function as they are.
    def sortedrl_measure(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        count = notes.take(arguments, named)
        if reward is not None:
            return reward(*arguments, **named)
        return [None] * count

    return sortedrl_measure


class _Notes:
    """Writes lengths down; calls that follow each other closely belong to one step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._step = 0
        self._last: float | None = None

    def take(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> int:
        """Note the answers of a call; gives how many there were."""
        answers = list(_answers(arguments, named))
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


def _answers(arguments: Sequence[Any], named: Mapping[str, Any]) -> Iterable[int]:
    """The tokens of each answer that a call is about."""
    for name in _LISTS:
        if name in named:
            return [_tokens(answer) for answer in named[name]]
    for name in _SINGLE:
        if name in named:
            return [_tokens(named[name])]
    samples = [sample for argument in arguments for sample in _slime_samples(argument)]
    if samples:
        return [int(sample.response_length) for sample in samples]
    if arguments and _is_list(arguments[0]):
        return [_tokens(answer) for answer in _without_prompts(arguments)]
    raise ConfigError(
        "measure finds the answers of TRL (completion_ids), verl (solution_str), slime (samples) "
        f"and OpenRLHF (queries), got arguments {sorted(named)}; wrap your own reward so that it "
        "passes completion_ids=..."
    )


def _slime_samples(argument: object) -> list[Any]:
    """Slime's samples, one or many, known by the name of their class: slime is not imported."""
    parts = argument if isinstance(argument, list) else [argument]
    return [part for part in parts if type(part).__name__ == "Sample"]


def _tokens(answer: object) -> int:
    """Token ids are counted; of text, four letters are a token."""
    if isinstance(answer, str):
        return -(-len(answer) // _LETTERS_PER_TOKEN)
    if not isinstance(answer, Sequence):
        raise ConfigError(f"an answer must be text, token ids or messages, got {answer!r:.80}")
    if answer and isinstance(answer[0], Mapping):
        return sum(_tokens(str(message.get("content") or "")) for message in answer)
    return len(answer)


def _prompts(arguments: Sequence[Any], named: Mapping[str, Any], count: int) -> list[str]:
    """What tells the prompts apart, so that siblings are known; their text is not kept."""
    samples = [sample for argument in arguments for sample in _slime_samples(argument)]
    if samples:
        return [_key(s.prompt if s.group_index is None else s.group_index) for s in samples]
    given = named.get("prompts", arguments[1] if len(arguments) > 1 else None)
    if _is_list(given) and len(given) == count:
        return [_key(prompt) for prompt in given]
    one = named.get("extra_info") or named.get("ground_truth") or named.get("prompt")
    if isinstance(one, Mapping) and "index" in one:
        # verl adds what differs between siblings to the rest.
        one = one["index"]
    return [_key(one) if one is not None else str(place) for place in range(count)]


def _without_prompts(arguments: Sequence[Any]) -> Iterable[object]:
    """OpenRLHF's answers: its queries are prompt and answer in one text, the prompts follow."""
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
