"""The form `<think>...</think><answer>...</answer>`: a thought, then an answer, nothing else.

Each of the four tags stands exactly once and in this order, with only white space around and
between the two parts. So nobody can offer two answers, or an answer inside the thought.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


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
    rest = _TAGS[0] + response if is_prefilled else response
    for tag in _TAGS:
        count = rest.count(tag)
        if count != 1:
            seen = ", counting the one the prompt ends in" if is_prefilled and count > 1 else ""
            return Untagged(f"{tag} must stand exactly once, found {count}{seen}")
    parts = []
    for tag in _TAGS:
        part, found, rest = rest.partition(tag)
        if not found:
            return Untagged(f"the tags must come in the order {' '.join(_TAGS)}, {tag} comes early")
        parts.append(part)
    before, think, between, answer = parts
    gaps = {"before <think>": before, "between the parts": between, "after </answer>": rest}
    for where, gap in gaps.items():
        if gap.strip():
            return Untagged(f"nothing may stand {where}, found {gap.strip()[:40]!r}")
    if not any(map(str.isalnum, think)):
        return Untagged("the thought must hold at least one letter or digit, found none")
    return Tagged(think, answer)


def ends_in_think(prompt: object) -> bool:
    """Whether the text the model saw, a string or chat messages, ends in `<think>`."""
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        last = prompt[-1] if prompt else None
        prompt = last.get("content") if isinstance(last, Mapping) else None
    return isinstance(prompt, str) and prompt.rstrip().endswith(_TAGS[0])
