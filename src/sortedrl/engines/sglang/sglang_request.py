"""One request in SGLang's format, and how its response chunks are read.

A chunk of SGLang may hold the whole answer so far or only what is new, and the last chunk of an
aborted request may hold either. `completion_tokens` counts the whole answer in every chunk, and so
tells what is new. Each token is passed on exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sortedrl.engines.streaming.backend import Delta, GenerationRequest, StreamEnd
from sortedrl.errors import EngineError

_MARGIN = 6
LOW_FIRST, HIGH_FIRST, NO_ORDER = 1, -1, 0
"""Factor of the priority, for a server that takes low or high values first, or has none."""

Chunk = Mapping[str, Any]
"""One response chunk: `output_ids` and `meta_info`."""


def server_context(context: int) -> int:
    """The context length SGLang must be started with for sequences of `context` tokens.

    It reserves a few tokens, more for a long prompt than for a short one.
    """
    return context + _MARGIN


class SglangStream:
    """The state of one request: what was received so far."""

    def __init__(self, request: GenerationRequest, *, priority_sign: int) -> None:
        """Nothing is received yet."""
        self.is_over = False
        """Whether the answer is complete or aborted."""
        self.is_broken = False
        """Whether the present call has not ended."""
        self._request = request
        self._priority_sign = priority_sign
        if self._is_filtered and request.sampling.top_k is None:
            raise EngineError(
                "SGLang returns log-probabilities before top_p and min_p, unless top_k is at most "
                "4096; set sampling.top_k too, or leave the filters out"
            )
        self._tokens: list[int] = []
        self._num_calls = 0
        self._num_earlier_tokens = 0

    @property
    def request_id(self) -> str:
        """The id of the present call; no id is a prefix of that of another request."""
        return f"{self._request.id}-{self._num_calls}"

    def next_body(self) -> dict[str, Any]:
        """The body of a call for the missing tokens."""
        wanted, sampling = self._request, self._request.sampling
        self.is_broken = True
        self._num_calls += 1
        self._num_earlier_tokens = len(self._tokens)
        body: dict[str, Any] = {
            "rid": self.request_id,
            "input_ids": [*wanted.tokens, *self._tokens],
            "sampling_params": {
                "max_new_tokens": wanted.max_tokens - len(self._tokens),
                "temperature": sampling.temperature,
                "top_k": -1 if sampling.top_k is None else sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "stop_token_ids": sorted(wanted.stop_tokens),
                # It makes SGLang ignore `stop_token_ids` too.
                "ignore_eos": not wanted.stop_tokens,
            },
            "return_logprob": True,
            "stream": True,
        }
        if wanted.seed is not None:
            body["sampling_params"] |= {"sampling_seed": wanted.seed}
        if self._is_filtered:
            # Its default log-probabilities are those before the filters.
            body["return_sampling_mask"] = True
        if self._priority_sign:
            body["priority"] = self._priority_sign * wanted.priority
        return body

    def delta(self, chunk: Chunk) -> Delta:
        """The new tokens of a chunk."""
        if "error" in chunk:
            raise EngineError(f"SGLang refused a request: {chunk['error'].get('message')}")
        about = chunk["meta_info"]
        end = self._end(about["finish_reason"])
        is_first = not self._tokens
        so_far = about["completion_tokens"]
        fresh = self._num_earlier_tokens + so_far - len(self._tokens)
        tokens = list(_last(fresh, chunk["output_ids"], so_far=so_far))
        logprobs = self._logprobs(about, fresh=fresh, so_far=so_far)
        if not len(tokens) == len(logprobs) == fresh:
            raise EngineError(
                f"every token must come with its log-probability, but SGLang sent {len(tokens)} "
                f"tokens and {len(logprobs)} log-probabilities for {fresh} new tokens"
            )
        self._tokens += tokens
        if end == "stop" and self._tokens[-1] not in self._request.stop_tokens:
            # A stop token of the model, which does not count here.
            end = "length" if len(self._tokens) == self._request.max_tokens else None
        self.is_over = end is not None
        self.is_broken = about["finish_reason"] is None
        reused = about.get("cached_tokens", 0) if is_first else 0
        return Delta(tokens=tokens, logprobs=logprobs, end=end, num_cached_tokens=reused)

    @property
    def _is_filtered(self) -> bool:
        return self._request.sampling.is_filtered and self._request.sampling.temperature > 0

    def _logprobs(self, about: Mapping[str, Any], *, fresh: int, so_far: int) -> list[float]:
        if self._is_filtered:
            return list(_last(fresh, about.get("output_token_sampling_logprobs"), so_far=so_far))
        triples = _last(fresh, about.get("output_token_logprobs"), so_far=so_far)
        return [logprob for logprob, *_ in triples]

    def _end(self, reason: Mapping[str, Any] | None) -> StreamEnd | None:
        if reason is None:
            return None
        kind: StreamEnd = reason["type"]
        if kind == "abort" and reason.get("status_code") is not None:
            raise EngineError(f"SGLang refused a request: {reason.get('message')}")
        return kind


def scoring_body(tokens: Sequence[int], *, start: int) -> dict[str, Any]:
    """The body of a call that only scores the tokens from `start` on."""
    return {
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        # The first position has no log-probability.
        "logprob_start_len": start - 1,
    }


def scores_of(chunk: Chunk, *, count: int) -> list[float]:
    """The log-probabilities of the last `count` tokens of a request that was scored."""
    triples = chunk["meta_info"].get("input_token_logprobs") or ()
    if len(triples) < count:
        raise EngineError(
            f"SGLang must return {count} log-probabilities of the request's own tokens, got "
            f"{len(triples)}"
        )
    return [logprob for logprob, *_ in triples[len(triples) - count :]]


def _last(fresh: int, values: Sequence[Any] | None, *, so_far: int) -> Sequence[Any]:
    """The last `fresh` of the first `so_far`; `values` may hold all of these or the last only."""
    values = values or ()
    if len(values) >= so_far:
        return values[so_far - fresh : so_far]
    return values[len(values) - fresh :] if len(values) >= fresh else values
