"""What travels between the stations: prompts, segments, trajectories, batches, weights.

Everything here is frozen.
A station that changes a trajectory hands on a new one, so a value seen once stays true.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, get_args

Key = tuple[int, int]
"""`(prompt_id, sample_index)`: the name of a trajectory for the whole run."""

FinishReason = Literal["stop", "length"]
"""Why an answer is complete: the model ended it, or it reached the token limit."""

_ROUNDING_NATS = 0.01
_NO_NUMBER = -9999.0
"""What vLLM's server writes for a log-probability of minus infinity."""
LARGEST_REWARD = 1e6
"""Rewards beyond this size are refused like NaN: no advantage could hold them."""

_NO_FIELDS: Mapping[str, object] = MappingProxyType({})
_NO_PARTS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One row of the data set, at its place in the stream of prompts.

    `id` counts up over the whole run: the same row met in a second epoch has a new id.
    """

    id: int
    tokens: Sequence[int] = ()
    fields: Mapping[str, object] = field(default_factory=lambda: _NO_FIELDS)
    """What the reward is given: the columns of the row under their own names."""
    end: str | None = None
    """How the text ends that the model sees; `None` where it is not known."""

    def __eq__(self, other: object) -> bool:
        """Equal content is equal, whatever sequence type holds the tokens."""
        return (
            isinstance(other, Prompt)
            and self.id == other.id
            and list(self.tokens) == list(other.tokens)
            and self.fields == other.fields
            and self.end == other.end
        )

    def __hash__(self) -> int:
        """Consistent with equality, and cheap."""
        return hash(self.id)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of tokens sampled under one policy version, with their log-probabilities.

    `given` is what an environment said right before them: no log-probability, no version, no loss.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    version: int
    given: Sequence[int] = ()

    def __eq__(self, other: object) -> bool:
        """Equal content is equal, whatever sequence types hold it."""
        return (
            isinstance(other, Segment)
            and self.version == other.version
            and list(self.tokens) == list(other.tokens)
            and list(self.logprobs) == list(other.logprobs)
            and list(self.given) == list(other.given)
        )

    def __hash__(self) -> int:
        """Consistent with equality, and cheap."""
        return hash((self.version, len(self.tokens)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """When an answer was scored, in seconds of the run, and by which worker."""

    worker: int
    start: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One answer to one prompt, complete or not; in an environment, one conversation.

    `segments` hold what the policy wrote and, before it, what an environment said. A reply that the
    policy has not answered yet is in `given`. Lengths and token counts are those of written tokens.

    `attempt` numbers the noise stream: it counts up only where the answer is redrawn.
    `decoded_tokens` counts every token ever decoded for it, also those thrown away since.
    `reward` is `None` until it is scored, and for an answer whose scoring failed and is skipped.
    """

    prompt: Prompt
    sample_index: int
    group: int
    seed: int
    attempt: int = 0
    interruptions: int = 0
    segments: tuple[Segment, ...] = ()
    given: Sequence[int] = ()
    decoded_tokens: int = 0
    finish_reason: FinishReason | None = None
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=lambda: _NO_PARTS, hash=False)
    scoring: Scoring | None = field(default=None, compare=False)
    """Known where the scorer took the time; two equal answers may have been scored apart."""

    @property
    def key(self) -> Key:
        """Its name for the whole run."""
        return (self.prompt.id, self.sample_index)

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy wrote so far."""
        return sum(len(segment.tokens) for segment in self.segments)

    @property
    def tokens(self) -> list[int]:
        """What the policy wrote so far."""
        return [token for segment in self.segments for token in segment.tokens]

    @property
    def response(self) -> list[int]:
        """Everything after the prompt: written and given tokens in their order."""
        spoken = [t for segment in self.segments for t in (*segment.given, *segment.tokens)]
        return [*spoken, *self.given]

    @property
    def loss_mask(self) -> list[int]:
        """For each token of `response`, 1 if the policy wrote it and 0 if it was given."""
        runs = [([0] * len(s.given), [1] * len(s.tokens)) for s in self.segments]
        return [bit for run in runs for part in run for bit in part] + [0] * len(self.given)

    @property
    def num_given(self) -> int:
        """Tokens that an environment said so far."""
        return sum(len(segment.given) for segment in self.segments) + len(self.given)

    @property
    def num_turns(self) -> int:
        """Turns of the policy so far, the one that is being written included."""
        replies = sum(1 for segment in self.segments if segment.given)
        return 1 + replies + bool(self.given)

    @property
    def turns(self) -> list[list[int]]:
        """The tokens of each turn of the policy so far."""
        turns: list[list[int]] = []
        for segment in self.segments:
            if segment.given or not turns:
                turns.append([])
            turns[-1] += segment.tokens
        return turns

    @property
    def replies(self) -> list[list[int]]:
        """The tokens of each reply that a turn of the policy followed."""
        return [list(segment.given) for segment in self.segments if segment.given]

    @property
    def logprobs(self) -> list[float]:
        """For each token, its log-probability under the policy that sampled it."""
        return [logprob for segment in self.segments for logprob in segment.logprobs]

    def extended(
        self, tokens: Sequence[int], logprobs: Sequence[float], *, version: int
    ) -> Trajectory:
        """The answer with these tokens after it, sampled under weights of this version."""
        if len(tokens) != len(logprobs):
            raise ValueError(
                f"every token needs its log-probability, got {len(tokens)} tokens and "
                f"{len(logprobs)} log-probabilities"
            )
        if not tokens:
            return self
        before, given = self.segments, self.given
        if before and before[-1].version == version and not given:
            last = before[-1]
            tokens, logprobs = [*last.tokens, *tokens], [*last.logprobs, *logprobs]
            before, given = before[:-1], last.given
        segments = (*before, Segment(tokens, logprobs, version, given))
        decoded = self.decoded_tokens + sum(len(s.tokens) for s in segments) - self.num_tokens
        return replace(self, segments=segments, given=(), decoded_tokens=decoded)

    def finished(self, reason: FinishReason = "stop") -> Trajectory:
        """The answer, complete: the model ended it, or it reached the token limit ("length")."""
        if reason not in get_args(FinishReason):
            raise ValueError(
                f"a finish reason must be 'stop' (the model ended the answer) or 'length' (the "
                f"token limit did), got {reason!r}"
            )
        return replace(self, finish_reason=reason)

    @property
    def oldest_version(self) -> int | None:
        """The version its oldest token was sampled under; `None` without tokens."""
        return min((segment.version for segment in self.segments), default=None)


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The trajectories of one update, and the version of the weights they update."""

    version: int
    trajectories: tuple[Trajectory, ...]

    @property
    def num_tokens(self) -> int:
        """Answer tokens in the batch."""
        return sum(trajectory.num_tokens for trajectory in self.trajectories)


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights on their way to an engine.

    `tensors` is `None` where engine and trainer share the parameters: nothing is copied. What an
    engine is given are torch tensors by their names in the model.
    """

    version: int
    tensors: Mapping[str, object] | None = None
    is_streamed: bool = False
    """Whether the tensors are received or made one by one, as they are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one engine step did: the answers it completed and the tokens it worked on."""

    finished: tuple[Trajectory, ...]
    decoded_tokens: int
    prefilled_tokens: int


def impossible_logprob(logprobs: Sequence[float | None]) -> int | None:
    """The first place whose number no sampled token can have, or `None`.

    Such a number is missing, infinite, NaN, or above 0 by more than rounding.

    >>> impossible_logprob([-0.5, -30.0, 0.0]), impossible_logprob([-0.5, float("nan")])
    (None, 1)
    """
    for place, logprob in enumerate(logprobs):
        # No comparison with NaN holds.
        if logprob is None or not _NO_NUMBER < logprob <= _ROUNDING_NATS:
            return place
    return None
