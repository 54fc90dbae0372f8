"""One trajectory while an outside engine writes it: what came of it so far."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from sortedrl.engines.segments import joined
from sortedrl.engines.streamed.backend import Ask, End, Piece
from sortedrl.errors import EngineError
from sortedrl.types import FinishReason, Key, Segment, Trajectory, impossible_logprob


@dataclass(slots=True, eq=False)
class Tally:
    """Counts every token once, and stamps it with the version that was asked to write it."""

    trajectory: Trajectory
    ask: Ask
    version: int
    tolerance: float | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    has_begun: bool = False
    is_faulty: bool = False
    """Whether a piece could not be taken: what comes after it would leave a gap."""
    end: End | None = None

    @property
    def key(self) -> Key:
        """The name of the trajectory."""
        return self.trajectory.key

    @property
    def is_verified(self) -> bool:
        """Whether tokens of older weights must be verified, which an outside engine cannot do."""
        return is_finite(self.tolerance)

    def take(self, piece: Piece, *, engine: str) -> None:
        """Add the next tokens of the stream, all or none of them; `engine` is for messages."""
        self.has_begun = True
        self.is_faulty = True
        self._check(piece, engine)
        self.is_faulty = False
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.end = piece.end

    def _check(self, piece: Piece, engine: str) -> None:
        tokens, logprobs = piece.tokens, piece.logprobs
        name = f"{engine}: the answer to prompt {self.key[0]}, sample {self.key[1]},"
        if len(tokens) != len(logprobs):
            raise EngineError(
                f"{name} came with {len(logprobs)} log-probabilities for {len(tokens)} tokens; "
                "every token needs its own, or it cannot be trained on"
            )
        if len(self.tokens) + len(tokens) > self.ask.max_tokens:
            raise EngineError(
                f"{name} may have {self.ask.max_tokens} more tokens, "
                f"got {len(self.tokens) + len(tokens)}"
            )
        place = impossible_logprob(logprobs)
        if place is not None:
            position = self.trajectory.num_tokens + len(self.tokens) + place
            raise EngineError(
                f"{name} came with {logprobs[place]} as the log-probability of its token "
                f"{position} (counted from 0), which must be a finite number, at most 0: the "
                "engine's model is damaged or overflows. Look at its weights and precision, then "
                "go on from the last checkpoint (--resume)"
            )

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer is complete; `None` if it is not, or was broken off.

        Engines differ in what they call a stop token that is the last one allowed.
        """
        if self.end == "abort" or self.end is None:
            return None
        is_stopped = bool(self.tokens) and self.tokens[-1] in self.ask.stop_tokens
        return "stop" if is_stopped else self.end

    def result(self) -> Trajectory:
        """The trajectory as it stands."""
        segments = self.trajectory.segments
        if self.tokens:
            fresh = Segment(tuple(self.tokens), tuple(self.logprobs), self.version)
            segments = joined(segments, fresh)
        return replace(
            self.trajectory,
            segments=segments,
            decoded_tokens=self.trajectory.decoded_tokens + len(self.tokens),
            finish_reason=self.finish_reason,
        )


def is_finite(tolerance: float | None) -> bool:
    """Whether a tolerance asks for cached tokens to be verified."""
    return tolerance is not None and tolerance < math.inf


def closing(trajectory: Trajectory, stop_tokens: frozenset[int], limit: int) -> FinishReason | None:
    """Why an answer that comes with tokens is complete already; `None` if it is not."""
    if trajectory.segments and trajectory.segments[-1].tokens[-1] in stop_tokens:
        return "stop"
    return "length" if trajectory.num_tokens >= limit else None
