"""Parsing of `<think>...</think><answer>...</answer>`.

In the strict form each of the four tags occurs exactly once and in this order, with only white
space around and between the two parts, and at least one letter or digit in the first: a response
cannot give two answers, or one inside the thoughts. If the prompt ends in `<think>`, that tag is
the first of the four.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sortedrl.types import Prompt

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@dataclass(frozen=True, slots=True)
class Tagged:
    """The two parts of a response in the strict form."""

    think: str
    answer: str


@dataclass(frozen=True, slots=True)
class Untagged:
    """Why a response is not in the strict form."""

    reason: str


def read_tags(response: str, *, is_prefilled: bool = False) -> Tagged | Untagged:
    """The thought and the answer of a response, or why it is not in the strict form.

    `is_prefilled` means that the prompt ends in `<think>`: the response starts inside the thought
    and must not open it again.
    """
    rest = TAGS[0] + response if is_prefilled else response
    for tag in TAGS:
        count = rest.count(tag)
        if count != 1:
            seen = ", counting the one the prompt ends in" if is_prefilled and count > 1 else ""
            return Untagged(f"{tag} must occur exactly once, found {count}{seen}")
    parts = []
    for tag in TAGS:
        part, found, rest = rest.partition(tag)
        if not found:
            return Untagged(f"the tags must come in the order {' '.join(TAGS)}, {tag} comes early")
        parts.append(part)
    before, think, between, answer = parts
    gaps = {"before <think>": before, "between the parts": between, "after </answer>": rest}
    for where, gap in gaps.items():
        if gap.strip():
            return Untagged(f"there must be no text {where}, found {gap.strip()[:40]!r}")
    if not any(map(str.isalnum, think)):
        return Untagged("the thought must hold at least one letter or digit, found none")
    return Tagged(think, answer)


def conclusion(response: str, *, is_prefilled: bool = False) -> str:
    """The text after the thoughts: all of it if there are none, nothing if they never end.

    Thoughts that are opened again and not closed again never end either.
    """
    opening, closing = TAGS[:2]
    _, found, rest = response.rpartition(closing)
    return "" if opening in rest or (is_prefilled and not found) else rest


def starts_in_thoughts(prompt: Prompt) -> bool:
    """Whether the prompt ends in `<think>`, so that a response starts inside the thoughts.

    If `prompt.end` is unknown, the fields `prompt_end` or `prompt` are used.
    """
    seen: object = prompt.end
    if seen is None:
        seen = prompt.fields.get("prompt_end", prompt.fields.get("prompt"))
    if isinstance(seen, Sequence) and not isinstance(seen, str):
        last = seen[-1] if seen else None
        seen = last.get("content") if isinstance(last, Mapping) else None
    return isinstance(seen, str) and seen.rstrip().endswith(TAGS[0])
