"""Environments for the tests: well-behaved ones of every kind, and hostile ones."""

import os
import time
from dataclasses import dataclass
from typing import ClassVar
from uuid import uuid4

from sortedrl.environments import Opening, Reply
from sortedrl.errors import ConfigError


class Adding:
    """Replies with the sum of all numbers so far; a message `done` ends the conversation."""

    is_replayable = True

    def open(self, row):
        self.total = 0
        return Opening([{"role": "user", "content": f"Count from {row['start']}. "}])

    def reply(self, message):
        text = message["content"].strip()
        if text == "done":
            return Reply(is_done=True, reward=self.total, metrics={"total": self.total})
        if text == "raise":
            raise RuntimeError("the environment is broken")
        if text == "hang":
            time.sleep(1000)
        if text == "die":
            os._exit(3)
        if text == "empty":
            return Reply()
        self.total += len(text)
        return Reply(messages=[{"role": "user", "content": f"={self.total};"}], reward=self.total)

    def close(self):
        pass


class Forgetful(Adding):
    """Cannot be replayed."""

    is_replayable = False


class Lying(Adding):
    """Says that it can be replayed, and never gives the same reply twice."""

    def reply(self, message):
        return Reply(messages=[{"role": "user", "content": f"{uuid4()};"}])


class Stuck(Adding):
    """Answers, and cannot be closed."""

    def close(self):
        time.sleep(1000)


class Calculator:
    """TRL's form."""

    is_replayable = True

    def reset(self, prompt, start=0, **row):
        """Begin anew."""
        self.value = start
        return f" The display shows {start}."

    def add(self, number: int, times: int = 1) -> str:
        """Add a number to the display.

        Args:
            number: What to add.
            times: How often.
        """
        self.value += number * times
        return f"The display shows {self.value}."

    def crash(self) -> str:
        """Fail."""
        raise ValueError("out of order")

    async def show(self) -> str:
        """Show the display, in time."""
        return str(self.value)

    def circle(self) -> list:
        """Give what is no JSON."""
        circle = []
        circle.append(circle)
        return circle

    def unable(self):
        """Be useless on this machine."""
        raise ConfigError("no display in this machine")

    def _hidden(self):
        """Not a tool."""

    def get_reward(self):
        """Score the display."""
        return float(self.value == 10)


class Gym:
    """Gym style: guess a number."""

    secret: ClassVar[int] = 3

    def reset(self):
        return "Guess a digit.", {}

    def step(self, action):
        is_right = action.strip() == str(self.secret)
        return ("Right." if is_right else "Wrong."), float(is_right), is_right, False, {}


class SkyGym:
    """The form of skyrl-gym, made from the row."""

    def __init__(self, extras):
        self.turns = 0
        self.answer = extras["answer"]

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        self.turns += 1
        is_right = action == self.answer
        return {
            "observations": [] if is_right else [{"role": "user", "content": "Try again."}],
            "reward": 1.0 if is_right else 0.0,
            "done": is_right or self.turns >= 3,
            "metadata": {},
        }

    def close(self):
        pass


def sky_gym(row):
    return SkyGym(row)


@dataclass
class StepResult:
    """The form of what OpenEnv's clients return."""

    observation: object
    reward: float | None
    done: bool


class OpenEnvClient:
    """An OpenEnv client as it comes: observations are objects, and so are actions."""

    def reset(self):
        return StepResult({"echo": ""}, None, False)

    def step(self, action):
        return StepResult({"echo": action}, 1.0, False)


class WrappedClient:
    """The wrapper that such a client needs: text in, text out."""

    def __init__(self):
        self.client = OpenEnvClient()

    def reset(self):
        return StepResult("Say something.", None, False)

    def step(self, text):
        result = self.client.step(text)
        said = result.observation["echo"]
        return StepResult(f"You said {said}.", result.reward, said == "bye")
