"""Knights and Knaves by questions: ask people about each other, then decide.

    prompt    the puzzle, from any row of the task knights_knaves
    policy    A?B             ask A whether B is a knight
    reply     yes             a knight tells the truth, a knave lies
    policy    aBC             the decision: a capital is a knight, a small letter a knave

People are the letters A to H in the order in which they are introduced. A message that is neither
is answered with these rules. Deterministic and replayable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from sortedrl.environments.adapters import prompt_messages
from sortedrl.environments.protocol import Message, Opening, Reply
from sortedrl.tasks.knights.compact import PEOPLE, compact_answer
from sortedrl.tasks.knights.puzzle import Assignment, parse_puzzle, solutions

_QUESTION = re.compile(r"([A-H])\?([A-H])")
_RULES = "write A?B to ask A whether B is a knight, or decide: {example}\n"


class Questions:
    """The reward is 1 for the right decision less the cost of the questions, and 0 for others."""

    is_replayable = True

    def __init__(self, *, questions: int = 4, cost: float = 0.0) -> None:
        """At most so many questions; each costs so much of the reward of a right decision."""
        self._most = int(questions)
        self._cost = float(cost)
        self._roles: Assignment = ()
        self._asked = 0

    def open(self, row: Mapping[str, object]) -> Opening:
        """The puzzle, with the rules."""
        (self._roles,) = solutions(parse_puzzle(str(row["statements"])))
        messages = [dict(message) for message in prompt_messages(row)]
        if not isinstance(row["prompt"], str):  # the compact form has no room for words
            messages[-1]["content"] += "\n\nPeople are A, B, ... in this order; " + self._rules
        return Opening(messages)

    def reply(self, message: Message) -> Reply:
        """An answer to a question, or the end."""
        text = message["content"].strip()
        people = PEOPLE[: len(self._roles)]
        if text.upper() == people or self._asked >= self._most:
            return self._decided(text)
        self._asked += 1
        match = _QUESTION.fullmatch(text)
        if match is None or match[1] not in people or match[2] not in people:
            return Reply(messages=[{"role": "user", "content": self._rules}])
        speaker, subject = (self._roles[people.index(person)] for person in match.groups())
        said = "yes\n" if speaker == subject else "no\n"
        return Reply(messages=[{"role": "user", "content": said}])

    def close(self) -> None:
        """Nothing is held."""

    @property
    def _rules(self) -> str:
        return _RULES.format(example=PEOPLE[: len(self._roles)].lower())

    def _decided(self, text: str) -> Reply:
        is_right = text == compact_answer(self._roles)
        return Reply(
            is_done=True,
            reward=max(0.0, 1.0 - self._cost * self._asked) if is_right else 0.0,
            metrics={"correct": float(is_right), "questions": float(self._asked)},
        )
