"""The native engine: submit, step, interrupt, over a planner and a model runner.

    trajectories -> requests -> planner -> plan -> runner -> tokens -> requests -> trajectories

The planner decides in plain Python, the runner computes on its device. A runner with `lag` gets the
next pass before the results of the last one are read, so its device never waits for the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel

from sortedrl.config.checks import require
from sortedrl.data.stream import Tokenizer
from sortedrl.engines.generation import TokenScores, fresh_trajectories, run_to_end
from sortedrl.engines.native.cpu_runner import CpuRunner
from sortedrl.engines.native.hf_model import (
    HFModel,
    checked_weights,
    copy_weights,
    probe,
    refuse_other_logprobs,
)
from sortedrl.engines.native.kv_cache import BlockPool, cache_size
from sortedrl.engines.native.native_request import Request
from sortedrl.engines.native.planner import DecodeRows, Plan, Planner, RowSpan
from sortedrl.engines.native.sampler import SampledTokens
from sortedrl.engines.sampling import CacheSize, MaxTokens, RequestLimits, Sampling
from sortedrl.errors import EngineError, ModelError, RequestError
from sortedrl.models.attention_interface import why_not_finite
from sortedrl.models.loading import load_model, load_tokenizer
from sortedrl.models.loading import stop_tokens as model_stop_tokens
from sortedrl.types import Step, Trajectory, Weights, impossible_logprob

_LOGITS_BYTES = 1 << 30


class ModelRunner(Protocol):
    """Runs plans on a device, in order."""

    @property
    def lag(self) -> int:
        """How many passes may be in flight when the next one is launched."""

    def launch(self, plan: Plan) -> object:
        """Start a pass; returns a ticket for its results."""

    def collect(self, ticket: object) -> SampledTokens:
        """Wait for the results of a pass: one entry per sampled row, in order."""

    def weights_changed(self) -> None:
        """Rebuild what was derived from the weights."""

    def release(self) -> None:
        """Free the memory of the KV cache; nothing is in flight."""

    def restore(self) -> None:
        """Allocate the KV cache again, empty."""


@dataclass(slots=True)
class Stats:
    """Counters since the last reset."""

    steps: int = 0
    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    slot_steps: int = 0


class NativeEngine:
    """Continuous batching on the trained module.

    Weights that change in place must be announced with `load_weights`: the KV cache depends on
    them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int = 32,
        max_tokens: MaxTokens = 1024,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] | None = None,
        tokenizer: Tokenizer | None = None,
        cache_bytes: int | None = None,
        block_tokens: int = 32,
        chunk_tokens: int | None = None,
        is_compiled: bool = True,
        keeps_prefixes: bool = False,
        version: int = 0,
    ) -> None:
        """An idle engine; `stop_tokens` default to those of the model.

        `cache_bytes` is the memory of the KV cache (default: most of the free GPU memory, or a
        quarter of the RAM), `chunk_tokens` the rows that a pass may have beyond one per slot.
        With `keeps_prefixes`, prompts are expected to continue earlier answers, as turns do: the
        cache of an answer is kept as long as there is room.
        """
        require(slots >= 1, f"slots must be at least 1, got {slots}")
        require(block_tokens >= 1, f"block_tokens must be at least 1, got {block_tokens}")
        self._hf_model = HFModel(model)
        on_gpu = self._hf_model.device.type == "cuda"
        chunk = chunk_tokens
        if chunk is None:
            chunk = max(256, 2048 - slots) if on_gpu else 256
        require(chunk >= 1, f"chunk_tokens must be at least 1, got {chunk}")
        self.slots = slots
        self.version = version
        self.sampling = sampling if sampling is not None else Sampling()
        self.cache = cache_size(
            self._hf_model, slots=slots, cache_bytes=cache_bytes, block_tokens=block_tokens
        )
        self.stats = Stats()
        self._tokenizer = tokenizer
        self._stop_tokens = frozenset(
            model_stop_tokens(model) if stop_tokens is None else stop_tokens
        )
        self._limits = RequestLimits(
            engine=self.name,
            vocabulary=self._hf_model.vocabulary,
            context=self._hf_model.max_context,
            max_tokens=max_tokens,
            sampling=self.sampling,
            no_stop_strings=None if tokenizer else "stop strings need a tokenizer; give it one",
            cache=self.cache,
        )
        pool = BlockPool(self.cache.num_blocks, block_tokens=block_tokens)
        pool.keeps_cached = keeps_prefixes
        most_logits = _LOGITS_BYTES // (4 * self._hf_model.vocabulary)
        self._planner = Planner(
            slots=slots,
            pool=pool,
            max_rows=slots + chunk,
            max_sampled=max(slots, min(slots + chunk, most_logits)),
        )
        self._runner = _runner(
            self._hf_model,
            self.cache,
            slots=slots,
            max_rows=slots + chunk,
            is_compiled=is_compiled,
        )
        self._in_flight: deque[tuple[Plan, object]] = deque()
        self._complete: list[Request] = []
        self._unreported = 0
        self._fault: Request | None = None
        self._is_asleep = False
        self._is_closed = False
        self._is_mixed = False
        """Whether a failed load has left some of the new weights."""
        self._verify_model(model)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        slots: int = 32,
        max_tokens: MaxTokens = 1024,
        sampling: Sampling | None = None,
        cache_bytes: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> NativeEngine:
        """An engine with its own model: a hub name, a folder or a GGUF file."""
        tokenizer = load_tokenizer(name)
        return cls(
            load_model(name, dtype=dtype, device=device),
            slots=slots,
            max_tokens=max_tokens,
            sampling=sampling,
            tokenizer=tokenizer,
            cache_bytes=cache_bytes,
        )

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"the native engine on {self.device}"

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._hf_model.device

    @property
    def request_limits(self) -> Sequence[RequestLimits]:
        """What a request must satisfy."""
        return (self._limits,)

    def submit(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling | None = None,
    ) -> None:
        """Queue work in order of priority: all of it, or none if one is refused."""
        self._require_open()
        limits = self._limits.check(
            trajectories, tolerance=tolerance, sampling=sampling, version=self.version
        )
        self._enqueue(
            [
                self._request(t, max_tokens=limit, tolerance=tolerance, sampling=sampling)
                for t, limit in zip(trajectories, limits, strict=True)
            ]
        )

    def step(self) -> Step:
        """Work until at least one token was decoded or an answer is complete."""
        self._refuse_fault(self._unreported)
        finished = self._take_complete()
        decoded, self._unreported = self._unreported, 0
        prefilled = 0
        while not (decoded or finished):
            plan = self._planner.plan()
            if plan.num_rows:
                self._launch(plan)
                prefilled += plan.num_prefilled
                if len(self._in_flight) <= self._runner.lag:
                    continue
            if not self._in_flight:
                break
            decoded += self._collect()
            self._refuse_fault(decoded)
            finished += self._take_complete()
        return Step(finished=tuple(finished), decoded_tokens=decoded, prefilled_tokens=prefilled)

    def interrupt(self) -> Sequence[Trajectory]:
        """Stop, and return every unfinished trajectory with its tokens so far.

        An answer completed by a pass in flight is returned as unfinished too: submitted again, it
        is complete at once.
        """
        stopped = self._stop()
        return [replace(request.result(self.version), finish_reason=None) for request in stopped]

    def load_weights(self, weights: Weights) -> None:
        """Use these weights from now on; with shared weights nothing is copied.

        Running requests are stopped and queued again: their cached tokens are trusted or verified,
        as they were submitted. Weights that do not fit are refused without any change. Loading
        streamed ones may fail in the middle: then nothing is generated until all of them have been
        loaded.
        """
        self._require_open()
        model, tensors = self._hf_model.model, weights.tensors
        if tensors is not None and not weights.is_streamed:
            tensors = checked_weights(model, tensors)
        stopped = [(request, request.result(self.version)) for request in self._stop()]
        try:
            if tensors is not None:
                self._is_mixed = True
                copy_weights(model, tensors)
                self._is_mixed = False
            self.version = weights.version
            self._runner.weights_changed()
        finally:
            self._planner.pool.reset_prefix_cache()
            self._enqueue(
                [
                    self._request(
                        replace(trajectory, finish_reason=None),
                        max_tokens=request.max_tokens,
                        tolerance=request.tolerance,
                        sampling=request.sampling,
                    )
                    for request, trajectory in stopped
                ]
            )

    def score(
        self, trajectories: Sequence[Trajectory], *, sampling: Sampling | None = None
    ) -> list[TokenScores]:
        """Score the tokens of answers under the present weights; the engine must be idle.

        Log-probabilities are those at the temperature of `sampling`; nothing is generated.
        """
        self._require_idle("score")
        sampling = self.sampling if sampling is None else sampling
        for trajectory in trajectories:
            exact = replace(sampling, stop_strings=(), max_tokens=max(1, trajectory.num_tokens))
            self._limits.check([trajectory], tolerance=None, sampling=exact, version=self.version)
        requests = [Request.scored(trajectory, sampling=sampling) for trajectory in trajectories]
        self._enqueue([request for request in requests if request.num_unverified])
        try:
            while self._planner.has_work or self._complete:
                self.step()
        finally:
            self._stop()
        return [TokenScores(request.logprobs, request.gaps) for request in requests]

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        max_tokens: int | Sequence[int | None] | None = None,
        sampling: Sampling | None = None,
        samples_per_prompt: int = 1,
        seed: int = 0,
        progress: bool = True,
    ) -> list[Trajectory]:
        """Generate complete answers to prompts, given as text or tokens; in order of the prompts.

        `max_tokens` may be one number for each prompt. The engine must be idle.
        """
        self._require_idle("generate")
        if isinstance(prompts, str):
            raise RequestError("prompts must be a list, got a string; use generate([text])")
        rows = [self._encoded(prompt) for prompt in prompts]
        trajectories = fresh_trajectories(rows, samples_per_prompt=samples_per_prompt, seed=seed)
        if not isinstance(max_tokens, Sequence):
            max_tokens = [max_tokens] * len(prompts)
        if len(max_tokens) != len(prompts):
            raise RequestError(
                f"max_tokens must be one number or one for each of the {len(prompts)} prompts, "
                f"got {len(max_tokens)}"
            )
        sampling = self.sampling if sampling is None else sampling
        try:
            for trajectory in trajectories:
                limit = max_tokens[trajectory.prompt.id]
                own = sampling if limit is None else replace(sampling, max_tokens=limit)
                self.submit([trajectory], tolerance=None, sampling=own)
        except BaseException:
            self._stop()
            raise
        return run_to_end(self, [t.key for t in trajectories], show_progress=progress)

    def text(self, trajectory: Trajectory) -> str:
        """The decoded text of an answer, without special tokens; needs a tokenizer."""
        if self._tokenizer is None:
            raise RequestError("the engine has no tokenizer; give it one to decode answers")
        return self._tokenizer.decode(trajectory.response, skip_special_tokens=True)

    def sleep(self) -> bool:
        """Free the memory of the KV cache until the next submit; the engine must be idle.

        The weights stay: `False`.
        """
        if self._planner.has_work or self._in_flight:
            raise EngineError(
                "the native engine must be idle to free its KV cache, but it is generating; "
                "call interrupt() first"
            )
        if not self._is_asleep:
            self._planner.pool.reset_prefix_cache()
            self._runner.release()
            self._is_asleep = True
        return False

    def wake(self) -> None:
        """Allocate the KV cache again, empty."""
        if self._is_asleep:
            self._runner.restore()
            self._is_asleep = False

    def close(self) -> None:
        """Drop all work and free all memory except the model, which belongs to the caller.

        KV cache, CUDA graphs, packed weights and buffers are freed; the engine cannot be used
        again.
        """
        if self._is_closed:
            return
        self._stop()
        self.sleep()
        self._is_closed = True
        self._hf_model.replaced.clear()
        # Only the engine refers to the runner, so all its memory is freed here.
        del self._runner
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reset_stats(self) -> None:
        """Set all counters to zero."""
        self.stats = Stats()

    def _verify_model(self, model: PreTrainedModel) -> None:
        """Refuse a model that gives other results in the engine than in transformers."""
        known = probe(
            vocabulary=self._hf_model.vocabulary,
            max_tokens=min(self.cache.tokens, self._hf_model.max_context),
        )
        try:
            (scores,) = self.score([known], sampling=Sampling())
        except (RuntimeError, TypeError) as error:
            raise ModelError(f"{type(model).__name__} cannot be run: {error}") from error
        refuse_other_logprobs(model, known, scores.logprobs)
        self.reset_stats()

    def _request(
        self,
        trajectory: Trajectory,
        *,
        max_tokens: int,
        tolerance: float | None,
        sampling: Sampling | None,
    ) -> Request:
        sampling = self.sampling if sampling is None else sampling
        return Request.resumed(
            trajectory,
            max_tokens=max_tokens,
            max_context=self._limits.max_length_of(trajectory, sampling),
            tolerance=tolerance,
            sampling=sampling,
            version=self.version,
            stop_tokens=self._stop_tokens,
            decode=None if self._tokenizer is None else self._tokenizer.decode,
        )

    def _enqueue(self, requests: Sequence[Request]) -> None:
        """Queue requests after those that wait; complete ones need no slot."""
        self._complete += [r for r in requests if r.finish_reason is not None]
        if requests:
            self.wake()
        self._planner.enqueue(r for r in requests if r.finish_reason is None)

    def _encoded(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prompt, str):
            if any(isinstance(token, Mapping | str) for token in prompt):
                raise RequestError(
                    f"a prompt must be text or token ids, got {str(prompt)[:80]}; convert "
                    "chat messages with tokenizer.apply_chat_template(messages, tokenize=False, "
                    "add_generation_prompt=True)"
                )
            return prompt
        if self._tokenizer is None:
            raise RequestError("the engine has no tokenizer; give it one, or prompts as tokens")
        return self._tokenizer(prompt)["input_ids"]

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineError(f"{self.name} is closed; make a new one")

    def _require_idle(self, method: str) -> None:
        self._require_open()
        if self._planner.has_work or self._in_flight or self._complete:
            raise RequestError(f"{method} needs an idle engine; call interrupt() first")

    def _launch(self, plan: Plan) -> None:
        try:
            if self._is_mixed:
                raise EngineError(
                    f"{self.name} has only some of its new weights, because loading them failed; "
                    "load all of them before generating"
                )
            ticket = self._runner.launch(plan)
        except BaseException:
            self._withdraw(plan)
            raise
        self._in_flight.append((plan, ticket))
        self.stats.steps += 1
        self.stats.slot_steps += plan.num_running
        self.stats.prefilled_tokens += plan.num_prefilled

    def _withdraw(self, plan: Plan) -> None:
        """Undo a pass that failed to launch: nothing of it is in the KV cache."""
        for span in plan.sampled:
            span.request.num_inflight_passes -= 1
            span.request.num_inflight_tokens -= span.is_speculative
        requests = self._planner.clear()
        self._planner.pool.reset_prefix_cache()
        self._planner.enqueue(requests)

    def _collect(self) -> int:
        """Apply the results of the oldest pass in flight; returns how many tokens it decoded."""
        plan, ticket = self._in_flight.popleft()
        sampled = self._runner.collect(ticket)
        row = decoded = 0
        if impossible_logprob(sampled.logprobs[: len(plan.decode)]) is None:
            row = len(plan.decode)
            decoded = self._accept(plan.decode, sampled)
        for span in plan.verified if row else plan.sampled:
            request = span.request
            request.num_inflight_passes -= 1
            request.num_inflight_tokens -= span.is_speculative
            if span.epoch == request.epoch and request.finish_reason is None:
                before = request.num_decoded
                if not _has_applied(span, sampled, row):
                    # Results of later passes for it are invalid.
                    request.epoch += 1
                    self._fault = self._fault or request
                decoded += request.num_decoded - before
                if request.finish_reason is not None:
                    self._planner.finish(request)
                    self._complete.append(request)
            row += span.num_rows
        self.stats.decoded_tokens += decoded
        return decoded

    def _accept(self, rows: DecodeRows, sampled: SampledTokens) -> int:
        """Apply the results of rows that only decode: all rows of most passes."""
        decoded = 0
        # Results of other rows, and of padding, follow.
        for request, epoch, token, logprob in zip(
            rows.requests, rows.epochs, sampled.tokens, sampled.logprobs, strict=False
        ):
            request.num_inflight_passes -= 1
            request.num_inflight_tokens -= 1
            if epoch == request.epoch and request.finish_reason is None:
                request.accept(token, logprob)
                decoded += 1
                if request.finish_reason is not None:
                    self._planner.finish(request)
                    self._complete.append(request)
        return decoded

    def _stop(self) -> list[Request]:
        """Remove all requests: complete ones that were not returned yet, then the others."""
        while self._in_flight:
            self._unreported += self._collect()
        complete, self._complete = self._complete, []
        self._fault = None
        return [*complete, *self._planner.clear()]

    def _refuse_fault(self, decoded: int) -> None:
        """Raise for an answer with non-finite logits, until the engine is interrupted."""
        request, model = self._fault, self._hf_model.model
        if request is None:
            return
        self._unreported = decoded
        prompt, sample = request.trajectory.key
        position = len(request.logprobs) + sum(len(s.tokens) for s in request.kept_segments)
        raise ModelError(
            f"{self.name}: {type(model).__name__} gives logits that are not finite for token "
            f"{position} (counted from 0) of the answer to prompt {prompt}, sample {sample}: "
            f"{why_not_finite(model)}"
        )

    def _take_complete(self) -> list[Trajectory]:
        complete, self._complete = self._complete, []
        return [request.result(self.version) for request in complete]


def _has_applied(span: RowSpan, sampled: SampledTokens, row: int) -> bool:
    """Pass the results of a span's rows to its request; false at non-finite logits."""
    request = span.request
    for index in range(row, row + span.num_rows):
        token, logprob, gap = sampled.tokens[index], sampled.logprobs[index], sampled.gaps[index]
        # One non-finite logit makes every log-probability of the row NaN.
        if impossible_logprob((logprob,)) is not None:
            return False
        if not request.num_unverified:
            request.accept(token, logprob)
        elif request.next_is_given:
            request.confirm_given()
        elif gap <= request.tolerance:
            request.confirm(sampled.expected_logprobs[index], gap=gap)
        else:
            request.diverge(token, logprob)
            break
        if request.finish_reason is not None:
            break
    return True


def _runner(
    hf_model: HFModel,
    size: CacheSize,
    *,
    slots: int,
    max_rows: int,
    is_compiled: bool,
) -> ModelRunner:
    if hf_model.device.type == "cuda":
        from sortedrl.engines.native.cuda_runner import CudaRunner

        return CudaRunner(
            hf_model, size=size, slots=slots, max_rows=max_rows, is_compiled=is_compiled
        )
    return CpuRunner(hf_model, size=size, slots=slots)
