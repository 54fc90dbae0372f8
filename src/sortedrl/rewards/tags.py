"""Thoughts and answers told apart by their tags: `<think>...</think><answer>...</answer>`.

In the strict form each of the four tags stands exactly once and in this order, with only white
space around and between the two parts, and at least one letter or digit in the first: nobody can
offer two answers, or one inside the thoughts. Where the text the model saw ends in `<think>`, that
tag is the first of the four.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sortedrl.types import Prompt

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@dataclass(frozen=True, slots=True)
class Tagged:
    """The two parts of a response in the form, as they were written."""

    think: str
    answer: str


@dataclass(frozen=True, slots=True)
class Untagged:
    """Why a response is not in the form."""

    reason: str


def read_tags(response: str, *, is_prefilled: bool = False) -> Tagged | Untagged:
    """The thought and the answer of a response, or why it is not in the form.

    `is_prefilled` says that the text the model saw ends in `<think>`: the response starts inside
    the thought and must not open it again.
    """
    rest = TAGS[0] + response if is_prefilled else response
    for tag in TAGS:
        count = rest.count(tag)
        if count != 1:
            seen = ", counting the one the prompt ends in" if is_prefilled and count > 1 else ""
            return Untagged(f"{tag} must stand exactly once, found {count}{seen}")
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
            return Untagged(f"nothing may stand {where}, found {gap.strip()[:40]!r}")
    if not any(map(str.isalnum, think)):
        return Untagged("the thought must hold at least one letter or digit, found none")
    return Tagged(think, answer)


def conclusion(response: str, *, is_prefilled: bool = False) -> str:
    """What follows the thoughts: all of it where there are none, nothing where they never end.

    Thoughts that are begun again after they ended, and not ended again, never end either.
    """
    opening, closing = TAGS[:2]
    _, found, rest = response.rpartition(closing)
    return "" if opening in rest or (is_prefilled and not found) else rest


def starts_in_thoughts(prompt: Prompt) -> bool:
    """Whether the text the model saw ends in `<think>`, so that a response starts inside it.

    Where it is not known how that text ends, `prompt_end` or `prompt` among the fields say.
    """
    seen: object = prompt.end
    if seen is None:
        seen = prompt.fields.get("prompt_end", prompt.fields.get("prompt"))
    if isinstance(seen, Sequence) and not isinstance(seen, str):
        last = seen[-1] if seen else None
        seen = last.get("content") if isinstance(last, Mapping) else None
    return isinstance(seen, str) and seen.rstrip().endswith(TAGS[0])
