"""The native engine: submit, step, interrupt, over a planner and a runner.

    trajectories -> requests -> planner -> plan -> runner -> choice -> requests -> trajectories

The planner decides in plain Python, the runner computes on its device. A runner with `lag` is
given the next pass before the last one's results are read, so that its device never waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel

from sortedrl.config.checks import require
from sortedrl.engines.generation import fresh_trajectories, run_to_end
from sortedrl.engines.native.cache import BlockPool, CacheSize, cache_size
from sortedrl.engines.native.cpu import CpuRunner
from sortedrl.engines.native.driver import Driver, probe, refuse_other_numbers
from sortedrl.engines.native.planner import Piece, Plan, Planner
from sortedrl.engines.native.request import Intake, Request, Tokenizer
from sortedrl.engines.native.sampling import Outcome
from sortedrl.engines.native.weights import checked_weights, copy_weights
from sortedrl.engines.sampling import Sampling
from sortedrl.errors import EngineError, ModelError, RequestError
from sortedrl.models.attention import why_not_finite
from sortedrl.models.loading import load_model, load_tokenizer
from sortedrl.models.loading import stop_tokens as model_stop_tokens
from sortedrl.types import Step, Trajectory, Weights, impossible_logprob

_LOGITS_BYTES = 1 << 30
Limit = Callable[[Trajectory], int]
"""The tokens an answer may have at most."""


class Runner(Protocol):
    """Runs plans on a device, in order."""

    @property
    def lag(self) -> int:
        """Passes that may be under way when the next one is launched."""

    def launch(self, plan: Plan) -> object:
        """Start a pass; gives a ticket for its results."""

    def collect(self, ticket: object) -> Outcome:
        """Wait for the results of a pass: one entry per sampled row, in order."""

    def weights_changed(self) -> None:
        """Look at the weights anew."""

    def release(self) -> None:
        """Let go of the memory of the cache; nothing is under way."""

    def restore(self) -> None:
        """Take memory for the cache again; it holds nothing."""


@dataclass(slots=True)
class Stats:
    """What the engine did since it was last asked to start counting."""

    steps: int = 0
    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    slot_steps: int = 0


class NativeEngine:
    """Continuous batching on the module that is trained.

    Weights that change in place must be announced with `load_weights`: the cache depends on them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int = 32,
        max_tokens: int | Limit = 1024,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] | None = None,
        tokenizer: Tokenizer | None = None,
        cache_bytes: int | None = None,
        block_tokens: int = 32,
        chunk_tokens: int | None = None,
        is_compiled: bool = True,
        version: int = 0,
    ) -> None:
        """An empty engine; `stop_tokens` are the model's own unless given.

        `cache_bytes` is what the cache may take (by default most of the free GPU memory, or a
        quarter of the RAM), `chunk_tokens` how many rows a pass may have beyond one for each slot.
        """
        require(slots >= 1, f"slots must be at least 1, got {slots}")
        require(block_tokens >= 1, f"block_tokens must be at least 1, got {block_tokens}")
        self._driver = Driver(model)
        on_gpu = self._driver.device.type == "cuda"
        chunk = chunk_tokens
        if chunk is None:
            chunk = max(256, 2048 - slots) if on_gpu else 256
        require(chunk >= 1, f"chunk_tokens must be at least 1, got {chunk}")
        self.slots = slots
        self.version = version
        self.sampling = sampling if sampling is not None else Sampling()
        self.cache = cache_size(
            self._driver, slots=slots, cache_bytes=cache_bytes, block_tokens=block_tokens
        )
        self.stats = Stats()
        self._limit = max_tokens if callable(max_tokens) else (lambda _: max_tokens)
        self._intake = Intake(
            vocabulary=self._driver.vocabulary,
            max_context=self._driver.max_context,
            stop_tokens=frozenset(model_stop_tokens(model) if stop_tokens is None else stop_tokens),
            cache=self.cache,
            tokenizer=tokenizer,
        )
        pool = BlockPool(self.cache.num_blocks, block_tokens=block_tokens)
        most_logits = _LOGITS_BYTES // (4 * self._driver.vocabulary)
        self._planner = Planner(
            slots=slots,
            pool=pool,
            max_rows=slots + chunk,
            max_sampled=max(slots, min(slots + chunk, most_logits)),
        )
        self._runner = _runner(
            self._driver, self.cache, slots=slots, max_rows=slots + chunk, is_compiled=is_compiled
        )
        self._under_way: deque[tuple[Plan, object]] = deque()
        self._complete: list[Request] = []
        self._unreported = 0
        self._fault: Request | None = None
        self._is_released = False
        self._try_out(model)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        slots: int = 32,
        max_tokens: int | Limit = 1024,
        sampling: Sampling | None = None,
        cache_bytes: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> NativeEngine:
        """An engine with a model of its own: a hub name, a folder or a GGUF file."""
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
        """What it is, for messages."""
        return f"the native engine on {self.device}"

    @property
    def device(self) -> torch.device:
        """Where it writes."""
        return self._driver.device

    def submit(self, trajectories: Sequence[Trajectory], *, tolerance: float | None) -> None:
        """Take on work in order of priority; all of it or, if one is impossible, none."""
        self.enqueue(
            [
                self.request(trajectory, tolerance=tolerance, limit=self._limit(trajectory))
                for trajectory in trajectories
            ]
        )

    def submit_with(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling,
        max_tokens: int,
    ) -> None:
        """The same with other sampling and another limit."""
        self.enqueue(
            [
                self.request(trajectory, tolerance=tolerance, limit=max_tokens, sampling=sampling)
                for trajectory in trajectories
            ]
        )

    def check(
        self,
        trajectories: Sequence[Trajectory],
        *,
        tolerance: float | None,
        sampling: Sampling | None,
        max_tokens: int | None,
    ) -> None:
        """Raise the `RequestError` that submitting these would raise; nothing is taken on."""
        for trajectory in trajectories:
            limit = self._limit(trajectory) if max_tokens is None else max_tokens
            self.request(trajectory, tolerance=tolerance, limit=limit, sampling=sampling)

    def step(self) -> Step:
        """Work until at least one token was written or an answer is complete."""
        self._refuse_fault(self._unreported)
        finished = self._take_complete()
        decoded, self._unreported = self._unreported, 0
        prefilled = 0
        while not (decoded or finished):
            plan = self._planner.plan()
            if plan.num_rows:
                self._launch(plan)
                prefilled += plan.num_prefilled
                if len(self._under_way) <= self._runner.lag:
                    continue
            if not self._under_way:
                break
            decoded += self._absorb()
            self._refuse_fault(decoded)
            finished += self._take_complete()
        return Step(finished=tuple(finished), decoded_tokens=decoded, prefilled_tokens=prefilled)

    def interrupt(self) -> Sequence[Trajectory]:
        """Stop, and give back every unfinished trajectory with its tokens so far.

        An answer that was completed by a pass still under way comes back as unfinished too:
        submitted again, it is complete at once.
        """
        stopped = self._stop()
        return [replace(request.result(self.version), finish_reason=None) for request in stopped]

    def load_weights(self, weights: Weights) -> None:
        """Write with these weights from now on; with shared weights nothing is copied.

        What runs is stopped and taken on again: its cached tokens stand or are verified, as it
        was submitted.
        """
        if weights.tensors is not None:
            checked_weights(self._driver.model, weights.tensors)
        stopped = self._stop()
        written = [(request, request.result(self.version)) for request in stopped]
        if weights.tensors is not None:
            copy_weights(self._driver.model, weights.tensors)
        self.version = weights.version
        self._planner.pool.forget()
        self._runner.weights_changed()
        self.enqueue(
            [
                self.request(
                    replace(trajectory, finish_reason=None),
                    tolerance=request.tolerance,
                    limit=request.limit,
                    sampling=request.sampling,
                )
                for request, trajectory in written
            ]
        )

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        max_tokens: int | Sequence[int] | None = None,
        sampling: Sampling | None = None,
        samples_per_prompt: int = 1,
        seed: int = 0,
        progress: bool = True,
    ) -> list[Trajectory]:
        """Write complete answers to prompts, given as text or tokens; in order of the prompts.

        `max_tokens` may be one number for each prompt. The engine must be idle.
        """
        if self._planner.has_work or self._under_way or self._complete:
            raise RequestError("generate needs an idle engine; call interrupt() first")
        rows = [self._intake.encoded(prompt) for prompt in prompts]
        trajectories = fresh_trajectories(rows, samples_per_prompt=samples_per_prompt, seed=seed)
        if isinstance(max_tokens, Sequence) and len(max_tokens) != len(prompts):
            raise RequestError(
                f"max_tokens must be one number or one for each of the {len(prompts)} prompts, "
                f"got {len(max_tokens)}"
            )
        self.enqueue(
            [
                self.request(
                    trajectory,
                    tolerance=None,
                    limit=self._limit_of(trajectory, max_tokens),
                    sampling=sampling,
                )
                for trajectory in trajectories
            ]
        )
        return run_to_end(self, [t.key for t in trajectories], show_progress=progress)

    def text(self, trajectory: Trajectory) -> str:
        """An answer as a person reads it; needs a tokenizer."""
        return self._intake.text(trajectory.tokens)

    def request(
        self,
        trajectory: Trajectory,
        *,
        tolerance: float | None,
        limit: int,
        sampling: Sampling | None = None,
    ) -> Request:
        """A trajectory made ready to be written, or a `RequestError` that says what is wrong."""
        return self._intake.request(
            trajectory,
            tolerance=tolerance,
            limit=limit,
            sampling=self.sampling if sampling is None else sampling,
            version=self.version,
        )

    def enqueue(self, requests: Sequence[Request]) -> None:
        """Queue requests behind those that wait; what came complete needs no slot."""
        self._complete += [r for r in requests if r.finish_reason is not None]
        if self._is_released and requests:
            self._runner.restore()
            self._is_released = False
        self._planner.enqueue(r for r in requests if r.finish_reason is None)

    def release(self) -> None:
        """Let go of the memory of the cache until work comes; only while there is none."""
        if self._planner.has_work or self._under_way:
            raise EngineError(
                "the native engine must be idle to let go of its cache, and it is writing; "
                "interrupt it first"
            )
        if not self._is_released:
            self._planner.pool.forget()
            self._runner.release()
            self._is_released = True

    def close(self) -> None:
        """Nothing to let go of: the engine lives in this process, and goes with it."""

    def reset_stats(self) -> None:
        """Start to count anew."""
        self.stats = Stats()

    def _try_out(self, model: PreTrainedModel) -> None:
        """Refuse a model that computes something else in the engine than on its own."""
        trial = probe(
            vocabulary=self._driver.vocabulary,
            max_tokens=min(self.cache.tokens, self._driver.max_context),
        )
        request = self._intake.request(
            trial, tolerance=1e30, limit=trial.num_tokens, sampling=Sampling(), version=0
        )
        # Submitted with it, the tokens would stand unread; now that they are read, all of them do.
        request.tolerance = math.inf
        self.enqueue([request])
        try:
            finished = self.step().finished
        except (RuntimeError, TypeError) as error:
            raise ModelError(f"{type(model).__name__} cannot be driven: {error}") from error
        assert finished, "all of the probe stands"
        refuse_other_numbers(model, finished[0])
        self.reset_stats()

    def _launch(self, plan: Plan) -> None:
        try:
            ticket = self._runner.launch(plan)
        except BaseException:
            self._withdraw(plan)
            raise
        self._under_way.append((plan, ticket))
        self.stats.steps += 1
        self.stats.slot_steps += plan.num_running
        self.stats.prefilled_tokens += plan.num_prefilled

    def _withdraw(self, plan: Plan) -> None:
        """A pass broke off: nothing it was to write is in the cache."""
        for piece in plan.sampled:
            piece.request.in_flight -= 1
            piece.request.pending -= piece.is_speculative
        requests = self._planner.clear()
        self._planner.pool.forget()
        self._planner.enqueue(requests)

    def _absorb(self) -> int:
        """Take in the results of the oldest pass under way; gives the tokens it wrote."""
        plan, ticket = self._under_way.popleft()
        outcome = self._runner.collect(ticket)
        row = decoded = 0
        for piece in plan.sampled:
            request = piece.request
            request.in_flight -= 1
            request.pending -= piece.is_speculative
            if piece.life == request.life and request.finish_reason is None:
                before = request.decoded
                if not _has_applied(piece, outcome, row):
                    # What was computed after it does not count.
                    request.life += 1
                    self._fault = self._fault or request
                decoded += request.decoded - before
                if request.finish_reason is not None:
                    self._planner.finish(request)
                    self._complete.append(request)
            row += piece.num_rows
        self.stats.decoded_tokens += decoded
        return decoded

    def _stop(self) -> list[Request]:
        """Empty the engine: complete answers that were not handed out yet, then all others."""
        while self._under_way:
            self._unreported += self._absorb()
        complete, self._complete = self._complete, []
        self._fault = None
        return [*complete, *self._planner.clear()]

    def _refuse_fault(self, decoded: int) -> None:
        """Raise for an answer whose logits are not finite, until the engine is emptied."""
        request, model = self._fault, self._driver.model
        if request is None:
            return
        self._unreported = decoded
        prompt, sample = request.trajectory.key
        position = len(request.tokens) - request.unchecked - request.prompt_tokens
        raise ModelError(
            f"{self.name}: {type(model).__name__} gives logits that are not finite for token "
            f"{position} (counted from 0) of the answer to prompt {prompt}, sample {sample}: "
            f"{why_not_finite(model)}"
        )

    def _take_complete(self) -> list[Trajectory]:
        complete, self._complete = self._complete, []
        return [request.result(self.version) for request in complete]

    def _limit_of(self, trajectory: Trajectory, given: int | Sequence[int] | None) -> int:
        if given is None:
            return self._limit(trajectory)
        return given if isinstance(given, int) else given[trajectory.prompt.id]


def _has_applied(piece: Piece, outcome: Outcome, row: int) -> bool:
    """Hand the results of a piece's rows to its request; not those whose logits are no numbers."""
    request = piece.request
    for index in range(row, row + piece.num_rows):
        token, logprob = outcome.tokens[index], outcome.logprobs[index]
        # One number that is not finite among the logits makes every log-probability NaN.
        if impossible_logprob((logprob,)) is not None:
            return False
        if not request.unchecked:
            request.accept(token, logprob)
        elif outcome.gaps[index] <= request.tolerance:
            request.confirm(outcome.expected_logprobs[index])
        else:
            request.part(token, logprob)
            break
        if request.finish_reason is not None:
            break
    return True


def _runner(
    driver: Driver, size: CacheSize, *, slots: int, max_rows: int, is_compiled: bool
) -> Runner:
    if driver.device.type == "cuda":
        from sortedrl.engines.native.cuda import CudaRunner

        return CudaRunner(
            driver, size=size, slots=slots, max_rows=max_rows, is_compiled=is_compiled
        )
    return CpuRunner(driver, size=size, slots=slots)
