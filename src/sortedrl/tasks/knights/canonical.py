"""One key for all puzzles that differ only in who is who.

Two puzzles have the same key exactly if renaming and reordering the people, and reordering the
parts of `and`, `or` and `<=>`, turns one into the other.

People are coloured by what they say and by who speaks of them, until the colours settle.
Where people still share a colour, each of them is singled out in turn, and the smallest text
that comes of it is the key. People whose exchange changes nothing stand for each other, so
puzzles full of symmetry stay quick as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Literal

from sortedrl.config import require
from sortedrl.tasks.knights.puzzle import Claim, Puzzle, Statement, mentioned

Split = Literal["train", "test"]


def canonical_key(puzzle: Puzzle) -> str:
    """The text of the puzzle after the renaming that makes it smallest."""
    search = _Search(puzzle)
    return min(search.text(places) for places in search.leaves([0] * puzzle.people))


def split_of(puzzle: Puzzle, test_share: float) -> Split:
    """Where the puzzle belongs, decided by its key alone.

    A puzzle in the test set of some share is in that of every larger share too, so keep to one
    share: a puzzle tested under 0.2 may be trained on under 0.1.
    """
    return split_of_key(canonical_key(puzzle), test_share)


def split_of_key(key: str, test_share: float) -> Split:
    """The same, for a key already at hand."""
    require_share(test_share)
    digest = blake2b(key.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest) < test_share * 2**64 else "train"


def require_share(test_share: float) -> None:
    """Refuse a share that leaves one of the splits empty, or next to empty."""
    require(
        0.001 <= test_share <= 0.999,
        f"knights.test_share must lie in 0.001..0.999, got {test_share}; without a test set, keep "
        "any share and train on the split 'train'",
    )


class _Search:
    """The ways to put the people of a puzzle in order that colours cannot tell apart."""

    def __init__(self, puzzle: Puzzle) -> None:
        self._statements = puzzle.statements
        spoken_of = [mentioned(statement) for statement in puzzle.statements]
        self._speakers_about = [
            [s for s, people in enumerate(spoken_of) if person in people and s != person]
            for person in range(puzzle.people)
        ]

    def leaves(self, colours: list[int]) -> Iterator[list[int]]:
        """Colours that differ for everyone: places 0, 1, ... for the people."""
        colours = self._settled(colours)
        shared = _first_shared(colours)
        if shared is None:
            yield colours
            return
        tried: list[int] = []
        for person in shared:
            if any(self._interchangeable(person, other) for other in tried):
                continue
            tried.append(person)
            singled_out = [2 * colour + 1 for colour in colours]
            singled_out[person] -= 1
            yield from self.leaves(singled_out)

    def text(self, places: list[int]) -> str:
        """The puzzle with everyone at their place."""
        labels = [str(place) for place in places]
        texts = [""] * len(places)
        for place, statement in zip(places, self._statements, strict=True):
            texts[place] = _text(statement, labels)
        return ";".join(texts)

    def _settled(self, colours: list[int]) -> list[int]:
        """The colours refined until another round tells no more people apart."""
        num_colours = 0
        while True:
            looks = [self._looks(person, colours) for person in range(len(colours))]
            ranks = {look: rank for rank, look in enumerate(sorted(set(looks)))}
            colours = [ranks[look] for look in looks]
            if len(ranks) in (num_colours, len(colours)):
                return colours
            num_colours = len(ranks)

    def _looks(self, person: int, colours: list[int]) -> tuple[int, str, tuple[str, ...]]:
        """What tells a person apart: their colour, what they say, what is said of them."""
        labels = [str(colour) for colour in colours]
        labels[person] = "*"
        heard = sorted(
            f"{colours[speaker]}:{_text(self._statements[speaker], labels)}"
            for speaker in self._speakers_about[person]
        )
        return colours[person], _text(self._statements[person], labels), tuple(heard)

    def _interchangeable(self, one: int, other: int) -> bool:
        """Whether the puzzle stays the same when these two change places."""
        places = list(range(len(self._statements)))
        before = self.text(places)
        places[one], places[other] = other, one
        return self.text(places) == before


def _first_shared(colours: list[int]) -> list[int] | None:
    """The people of the first colour that several have."""
    for colour in range(len(colours)):
        people = [person for person, own in enumerate(colours) if own == colour]
        if len(people) > 1:
            return people
    return None


def _text(statement: Statement, labels: Sequence[str]) -> str:
    """The statement with people by label and unordered parts sorted."""
    if isinstance(statement, Claim):
        return ("+" if statement.is_knight else "-") + labels[statement.person]
    parts = [_text(part, labels) for part in statement.parts]
    if statement.kind != "->":
        parts.sort()
    return f"{statement.kind}({','.join(parts)})"
