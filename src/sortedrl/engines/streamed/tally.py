"""One trajectory while an outside engine writes it: what came of it so far."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sortedrl.engines.segments import joined
from sortedrl.engines.streamed.backend import Ask, End, Piece
from sortedrl.errors import EngineError
from sortedrl.types import FinishReason, Segment, Trajectory


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
    end: End | None = None

    def take(self, piece: Piece) -> None:
        """Add the next tokens of the stream."""
        tokens, logprobs = piece.tokens, piece.logprobs
        name = f"the answer to trajectory {self.trajectory.key}"
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
        self.has_begun = True
        self.tokens += tokens
        self.logprobs += logprobs
        self.end = piece.end

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer is complete; `None` if it is not, or was broken off."""
        return None if self.end == "abort" else self.end

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


def closing(trajectory: Trajectory, stop_tokens: frozenset[int], limit: int) -> FinishReason | None:
    """Why an answer that comes with tokens is complete already; `None` if it is not."""
    if trajectory.segments and trajectory.segments[-1].tokens[-1] in stop_tokens:
        return "stop"
    return "length" if trajectory.num_tokens >= limit else None
