"""One trajectory during generation: what the host knows, and what is in flight.

    tokens               prompt and answer as far as the host has read them; in a conversation,
                         with the replies of its environment (`given_positions`)
    num_inflight_tokens  tokens sampled after those but not read yet: the device runs ahead
    num_computed_tokens  positions whose rows were launched, so that their keys are in the KV cache

A row is one position of one request. The row at position `p` takes the token at `p` as input; if it
is sampled, it yields the token at `p + 1`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby, islice

from sortedrl.engines.native.kv_cache import EMPTY_PREFIX, PrefixId
from sortedrl.engines.native.sampler import stream
from sortedrl.engines.sampling import Sampling, joined
from sortedrl.types import FinishReason, Segment, Trajectory

Decode = Callable[[list[int]], str]
_MARGIN_TOKENS = 8


@dataclass(slots=True, eq=False)
class Request:
    """A trajectory in the engine's queue or in one of its slots.

    `num_unverified` counts the cached tokens that the current weights may reject. While there are
    any, the rows from the last verified token on are sampled and compared with them. A reply in
    between is kept if everything before it is. `epoch` increases whenever results in flight become
    invalid.
    """

    trajectory: Trajectory
    sampling: Sampling
    stop_tokens: frozenset[int]
    max_tokens: int
    """Tokens that the policy may generate."""
    max_context: int
    """Tokens of prompt, answer and replies."""
    stream: int
    tolerance: float
    tokens: list[int]
    kept_segments: tuple[Segment, ...]
    num_unverified: int
    decode: Decode | None = None
    logprobs: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """For each verified token, the nats by which it falls short of the best one."""
    num_decoded: int = 0
    num_inflight_tokens: int = 0
    num_inflight_passes: int = 0
    num_computed_tokens: int = 0
    prefill_end: int = 0
    epoch: int = 0
    admission: int = 0
    """Counts admissions to a slot, over all requests: the order of age."""
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0
    prefix_id: PrefixId = EMPTY_PREFIX
    prompt_tokens: int = field(init=False)
    given_positions: set[int] = field(init=False)
    """Positions of tokens from an environment."""
    turn_start: int = field(init=False)
    """Start of the current turn of the policy."""
    max_length: int = field(init=False)
    longest_stop: int = field(init=False)
    """Bytes of the longest stop string; 0 without any."""
    finish_reason_if_verified: FinishReason | None = None
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        """Detect an answer that is submitted complete: it finishes if all its tokens are kept."""
        self.prompt_tokens = len(self.trajectory.prompt.tokens)
        mask = self.trajectory.loss_mask if self.trajectory.num_given else ()
        self.given_positions = {
            self.prompt_tokens + place for place, is_written in enumerate(mask) if not is_written
        }
        self.longest_stop = max((len(s.encode()) for s in self.sampling.stop_strings), default=0)
        self._set_limits()
        if len(self.tokens) > self.prompt_tokens:
            self.finish_reason_if_verified = self._reason_to_finish()
        if not self.num_unverified:
            self.finish_reason = self.finish_reason_if_verified

    @classmethod
    def resumed(
        cls,
        trajectory: Trajectory,
        *,
        max_tokens: int,
        max_context: int,
        tolerance: float | None,
        sampling: Sampling,
        version: int,
        stop_tokens: frozenset[int],
        decode: Decode | None,
    ) -> Request:
        """A request for the rest of a trajectory, for weights of this version.

        Cached tokens of the same version are always kept: these weights sampled them.
        """
        tolerance = math.inf if tolerance is None else tolerance
        stands = tolerance == math.inf or all(
            segment.version == version for segment in trajectory.segments
        )
        return cls(
            trajectory=trajectory,
            sampling=sampling,
            stop_tokens=stop_tokens if sampling.stop_tokens is None else sampling.stop_tokens,
            max_tokens=max_tokens,
            max_context=max_context,
            stream=stream(trajectory.seed, trajectory.attempt),
            tolerance=tolerance,
            tokens=[*trajectory.prompt.tokens, *trajectory.response],
            kept_segments=trajectory.segments if stands else (),
            num_unverified=0 if stands else len(trajectory.response),
            decode=decode,
        )

    @classmethod
    def scored(cls, trajectory: Trajectory, *, sampling: Sampling) -> Request:
        """A request that verifies every token, keeps all of them and samples none."""
        return cls(
            trajectory=trajectory,
            sampling=replace(sampling, stop_strings=()),
            stop_tokens=frozenset(),
            max_tokens=trajectory.num_tokens,
            max_context=len(trajectory.prompt.tokens) + len(trajectory.response),
            stream=stream(trajectory.seed, trajectory.attempt),
            tolerance=math.inf,
            tokens=[*trajectory.prompt.tokens, *trajectory.response],
            kept_segments=(),
            num_unverified=len(trajectory.response),
        )

    @property
    def end(self) -> int:
        """Positions to compute; the last token of a complete answer is not needed."""
        end = len(self.tokens) + self.num_inflight_tokens
        is_last = self.finish_reason_if_verified is not None or end >= self.max_length
        return end - 1 if is_last else end

    @property
    def first_sampled(self) -> int:
        """The first position whose row must be sampled."""
        return len(self.tokens) + self.num_inflight_tokens - self.num_unverified - 1

    @property
    def next_is_given(self) -> bool:
        """Whether the next unverified token is from an environment."""
        return len(self.tokens) - self.num_unverified in self.given_positions

    def confirm(self, logprob: float, *, gap: float) -> None:
        """Keep the next cached token, with its log-probability under the present weights."""
        self.logprobs.append(logprob)
        self.gaps.append(gap)
        self.confirm_given()

    def confirm_given(self) -> None:
        """Keep the next cached token, which needs no log-probability."""
        self.num_unverified -= 1
        if not self.num_unverified:
            self.finish_reason = self.finish_reason_if_verified

    def diverge(self, token: int, logprob: float) -> None:
        """Reject the next cached token and all after it; the answer continues with this one.

        Replies to rejected tokens are dropped too. A reply right before the rejected token is kept.
        """
        del self.tokens[len(self.tokens) - self.num_unverified :]
        self.num_unverified = 0
        self.given_positions = {p for p in self.given_positions if p < len(self.tokens)}
        self._set_limits()
        self.finish_reason_if_verified = None
        self.epoch += 1
        self.num_computed_tokens = min(self.num_computed_tokens, len(self.tokens))
        self.accept(token, logprob)

    def accept(self, token: int, logprob: float) -> None:
        """Append a token that the present weights sampled."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.num_decoded += 1
        if token in self.stop_tokens or (self.longest_stop and self._ends_in_stop_string()):
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_length:
            self.finish_reason = "length"

    def release_cache(self) -> None:
        """Release the slot and the blocks, but keep the tokens."""
        self.slot = None
        self.blocks = []
        self.num_computed_tokens = self.num_cached_blocks = 0
        self.prefix_id = EMPTY_PREFIX

    def result(self, version: int) -> Trajectory:
        """The trajectory so far; while its tokens are being verified, as it was submitted."""
        if self.num_unverified:
            return self.trajectory
        segments = self.kept_segments
        start = self.prompt_tokens + sum(len(s.given) + len(s.tokens) for s in segments)
        given: list[int] = []
        logprobs = iter(self.logprobs)
        for position, is_given in self._runs(start):
            if is_given:
                given = self.tokens[position]
            else:
                fresh = tuple(self.tokens[position])
                new = tuple(islice(logprobs, len(fresh)))
                segments = joined(segments, Segment(fresh, new, version, tuple(given)))
                given = []
        return replace(
            self.trajectory,
            segments=segments,
            given=() if self.finish_reason is not None else tuple(given),
            decoded_tokens=self.trajectory.decoded_tokens + self.num_decoded,
            finish_reason=self.finish_reason,
        )

    def _runs(self, start: int) -> Iterator[tuple[slice, bool]]:
        """The tokens from `start` on, as runs of given and of sampled tokens."""
        if not self.given_positions:
            if start < len(self.tokens):
                yield slice(start, len(self.tokens)), False
            return
        positions = range(start, len(self.tokens))
        for is_given, run in groupby(positions, key=self.given_positions.__contains__):
            members = list(run)
            yield slice(members[0], members[-1] + 1), is_given

    def _set_limits(self) -> None:
        """Set the start of the turn and the end of the answer, given its replies."""
        self.turn_start = max(self.given_positions, default=self.prompt_tokens - 1) + 1
        length = self.prompt_tokens + len(self.given_positions) + self.max_tokens
        self.max_length = min(length, self.max_context)

    def _reason_to_finish(self) -> FinishReason | None:
        if len(self.tokens) > self.turn_start:
            if self.tokens[-1] in self.stop_tokens:
                return "stop"
            if self.longest_stop and self._ends_in_stop_string():
                return "stop"
        return "length" if len(self.tokens) >= self.max_length else None

    def _ends_in_stop_string(self) -> bool:
        assert self.decode is not None, "stop strings need a tokenizer"
        # A token has at least one byte, so what the last token completed lies within this tail.
        start = len(self.tokens) - self.longest_stop - _MARGIN_TOKENS
        text = self.decode(self.tokens[max(start, self.turn_start) :])
        return any(stop in text for stop in self.sampling.stop_strings)
