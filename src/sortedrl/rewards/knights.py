"""The rule-based reward of Knights and Knaves: the form of the response, then its answer.

    form      right: <think>...</think><answer>...</answer>, see `tags`
    answer    right: all roles; partly right: some; wrong: none;
              unparsable: not in the form, or unclear, see `knights_claims`

A prompt has the fields `names` and `solution` (for each name, whether it is a knight), and may have
`roles` (two words instead of knight and knave) and `prompt` or `prompt_end` (the prompt text).
An answer earns `right` only if it gives each person their role and no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sortedrl.errors import DataError
from sortedrl.rewards.knights_claims import ROLES, Claims, Unclear, read_claims, vocabulary_fault
from sortedrl.rewards.tags import Tagged, read_tags, starts_in_thoughts
from sortedrl.types import Prompt


def logic_reward(
    prompt: Prompt,
    response: str,
    *,
    is_compact: bool = False,
    format_right: float = 1.0,
    format_wrong: float = -1.0,
    right: float = 2.0,
    partly_right: float = -1.5,
    wrong: float = -1.5,
    unparsable: float = -2.0,
) -> dict[str, float]:
    """The score of an answer in words, such as `(1) Zoey is a knight (2) Ethan is a knave`.

    A compact answer has one letter for each person in order, knights as capitals: `ABc`.
    """
    puzzle = _lettered_puzzle(prompt) if is_compact else _puzzle(prompt)
    tagged = read_tags(response, is_prefilled=puzzle.is_prefilled)
    form, grade = format_wrong, unparsable
    hits: list[bool] | None = None
    if isinstance(tagged, Tagged):
        form = format_right
        claims = (_read_letters if is_compact else _read_words)(puzzle, tagged.answer)
        if isinstance(claims, Claims):
            hits = [a == b for a, b in zip(claims.is_knight, puzzle.solution, strict=True)]
            grade = right if all(hits) else partly_right if any(hits) else wrong
    return {
        "reward": form + grade,
        "format": form,
        "answer": grade,
        "correct": float(hits is not None and all(hits)),
        "answered": float(hits is not None),
    }


def lowest_logic_reward(options: Mapping[str, float]) -> float:
    """The lowest reward with these options: usually that of an unparsable answer."""
    answers = ("right", "partly_right", "wrong", "unparsable")
    in_form = options["format_right"] + min(options[answer] for answer in answers)
    return min(in_form, options["format_wrong"] + options["unparsable"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Puzzle:
    """The fields of a prompt, checked."""

    names: tuple[str, ...]
    solution: tuple[bool, ...]
    roles: tuple[str, str]
    is_prefilled: bool


def _read_words(puzzle: _Puzzle, answer: str) -> Claims | Unclear:
    return read_claims(answer, names=puzzle.names, roles=puzzle.roles)


def _read_letters(puzzle: _Puzzle, answer: str) -> Claims | Unclear:
    letters, expected = answer.strip(), "".join(puzzle.names).lower()
    # Only ASCII: other letters, such as the Kelvin sign, become one of ours in lower case.
    if not letters.isascii() or letters.lower() != expected:
        return Unclear(f"must be {expected!r} with knights as capitals, got {letters[:40]!r}")
    return Claims(tuple(letter.isupper() for letter in letters))


def _puzzle(prompt: Prompt) -> _Puzzle:
    """The puzzle of a prompt; raises `DataError` if its fields are not valid."""
    names = _words(prompt, "names", prompt.fields.get("names"))
    roles = _words(prompt, "roles", prompt.fields.get("roles", ROLES))
    if len(roles) != 2:
        raise _fault(prompt, f"field roles must be two words, got {list(roles)}")
    fault = vocabulary_fault(names, (roles[0], roles[1]))
    if fault is not None:
        raise _fault(prompt, fault)
    solution = prompt.fields.get("solution")
    if not isinstance(solution, Sequence) or not all(isinstance(who, bool) for who in solution):
        raise _fault(prompt, f"field solution must be a list of booleans, got {solution!r:.100}")
    if len(solution) != len(names):
        raise _fault(
            prompt,
            f"field solution must have one boolean for each of {len(names)} names, "
            f"got {len(solution)}",
        )
    return _Puzzle(
        names=names,
        solution=tuple(solution),
        roles=(roles[0], roles[1]),
        is_prefilled=starts_in_thoughts(prompt),
    )


def _lettered_puzzle(prompt: Prompt) -> _Puzzle:
    """A puzzle whose names are single letters."""
    puzzle = _puzzle(prompt)
    if not all(len(name) == 1 and name.isascii() for name in puzzle.names):
        raise _fault(
            prompt, f"names must be single letters for the compact form, got {list(puzzle.names)}"
        )
    return puzzle


def _words(prompt: Prompt, field: str, value: object) -> tuple[str, ...]:
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        words = [word for word in value if isinstance(word, str)]
        if len(words) == len(value):
            return tuple(words)
    raise _fault(prompt, f"field {field} must be a list of words, got {value!r:.100}")


def _fault(prompt: Prompt, reason: str) -> DataError:
    return DataError(f"prompt {prompt.id}", reason)
