"""Who appears in a puzzle: first names, and the words for the two roles.

No name is a part of another, so that a name found in a text is always the person meant.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from sortedrl.config import require

NAMES = (
    *("Ada", "Amir", "Anton", "Bella", "Bruno", "Carmen", "Clara", "Cyrus", "Dario", "Delia"),
    *("Diego", "Edith", "Elsa", "Emeka", "Farid", "Felix", "Fiona", "Gavin", "Greta", "Hana"),
    *("Helen", "Hugo", "Irene", "Isaac", "Jonas", "Julia", "Karim", "Kofi", "Lena", "Linus"),
    *("Mabel", "Marco", "Maya", "Nadia", "Nils", "Nora", "Omar", "Oscar", "Paula", "Priya"),
    *("Quinn", "Ravi", "Rosa", "Ruben", "Simon", "Stella", "Tariq", "Tessa", "Ulla", "Vera"),
    *("Viktor", "Wanda", "Xenia", "Yara", "Yusuf", "Zane", "Zelda"),
)
"""Common first names from many places; none is a word of the puzzles."""


@dataclass(frozen=True, slots=True)
class Roles:
    """The words for those who tell the truth and for those who lie."""

    truthful: str = "knight"
    lying: str = "knave"

    def __post_init__(self) -> None:
        """Refuse words that a text could not tell apart."""
        for word in (self.truthful, self.lying):
            require(
                re.fullmatch(r"[a-z]+", word) is not None,
                f"knights.roles must be two nouns, each one word in small letters, got {word!r}",
            )
        require(
            self.truthful not in self.lying and self.lying not in self.truthful,
            "knights.roles must be two words of which none is a part of the other, got "
            f"{self.truthful!r} and {self.lying!r}",
        )

    def word(self, is_knight: bool) -> str:
        """The word for a role."""
        return self.truthful if is_knight else self.lying

    def a(self, is_knight: bool) -> str:
        """The word with its article: `a knight`, `an angel`."""
        word = self.word(is_knight)
        return f"an {word}" if word[0] in "aeiou" else f"a {word}"

    def plural(self, is_knight: bool) -> str:
        """The word for several: `knights`, `heroes`, `spies`."""
        word = self.word(is_knight)
        if re.search(r"([^aeiou]o|s|x|z|ch|sh)$", word):
            return f"{word}es"
        if re.search(r"[^aeiou]y$", word):
            return f"{word[:-1]}ies"
        return f"{word}s"


def draw_names(count: int, seed: int) -> tuple[str, ...]:
    """Different names, in the order in which the people are introduced."""
    generator = random.Random(seed)
    left = list(NAMES)
    return tuple(left.pop(int(generator.random() * len(left))) for _ in range(count))
