"""The seam to an outside engine: a question in, a stream of tokens out.

    ask -> stream of pieces -> the last piece says how it ended

A backend keeps no books: it hands on what the outside engine says, in order. Who asked, which
weights wrote and what was cached before is known to the `StreamedEngine` above it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from sortedrl.engines.sampling import Sampling
from sortedrl.types import Weights

End = Literal["stop", "length", "abort"]
"""How a stream ended: the model ended the answer, the limit was reached, or it was broken off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One answer to be written, or to be written on."""

    id: str
    """Of fixed width, so that none is the beginning of another, and used once."""
    tokens: Sequence[int]
    """The prompt and what is already there of the answer."""
    max_tokens: int
    """Tokens that may be added; at least 1."""
    stop_tokens: frozenset[int]
    """Tokens that end the answer, and belong to it. No others do, not even the model's own."""
    sampling: Sampling
    priority: int
    """Lower goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The next tokens of an answer, each with its log-probability.

    The log-probability is that of the distribution it was drawn from: after temperature and
    filters. Of a greedy choice it is that of temperature 1.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    end: End | None = None
    """Known in the last piece, which may have no tokens."""
    reused_tokens: int = 0
    """Of the tokens of the ask, those that were not computed again; known in the first piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an outside engine can be asked for."""

    slots: int
    """Answers written at the same time; more may be asked for and will queue."""
    context: int
    """Tokens of prompt and answer together."""
    vocabulary: int
    """Token ids lie below."""


class Backend(Protocol):
    """An outside engine; every method is called on the same event loop."""

    @property
    def name(self) -> str:
        """What it is and which version, for messages."""

    @property
    def limits(self) -> Limits:
        """What it can be asked for."""

    def stream(self, ask: Ask) -> AsyncIterator[Piece]:
        """Write an answer; raises `EngineLost` where the engine is gone."""

    async def abort(self, ids: Sequence[str]) -> None:
        """Break these answers off: each stream ends with what it had, and `end` is "abort".

        A stream that has ended in the meantime is left as it is.
        """

    async def load_weights(self, weights: Weights) -> None:
        """Write with these weights from now on, and forget every cached prefix.

        Nothing is being written. `weights.tensors` are those of the trainer, by the names that
        the model's checkpoint has.
        """

    async def close(self) -> None:
        """Let go of everything: processes, files, connections."""
