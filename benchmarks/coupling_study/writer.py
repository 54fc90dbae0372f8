"""The native engine as this study uses it: write answers, then look at all of them again.

The study reaches into the engine in one place: while it re-checks, the engine's runner is wrapped
to note by how much each cached token falls short. A re-check with a tolerance that no gap exceeds
so tells at once what every smaller tolerance would keep.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from sortedrl.engines.generation import run_to_end
from sortedrl.engines.native import NativeEngine
from sortedrl.engines.native.driver import attention_shape
from sortedrl.engines.native.engine import Runner
from sortedrl.engines.native.planner import Plan
from sortedrl.engines.native.sampling import Outcome
from sortedrl.types import Key, Trajectory, Weights

_KEEPS_ALL = 1e30
_ROOM_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Recheck:
    """One answer under other weights: for each token, how it compares."""

    gaps: Sequence[float]
    """Nats by which it falls short of the token that the weights would choose now."""
    logprobs: Sequence[float]
    """Its log-probability now."""
    old_logprobs: Sequence[float]
    """Its log-probability under the weights that wrote it."""


class Writer:
    """An engine of one precision, whose weights are exchanged as the study goes on."""

    def __init__(
        self, model: PreTrainedModel, *, slots: int, context: int, max_tokens: int, compiled: bool
    ) -> None:
        """An engine with room for every slot to hold `context` tokens."""
        layers, heads, dim = attention_shape(model.config)
        token_bytes = 2 * layers * heads * dim * model.dtype.itemsize
        self._max_tokens = max_tokens
        self._engine = NativeEngine(
            model,
            slots=slots,
            max_tokens=max_tokens,
            cache_bytes=(slots + 1) * (context + _ROOM_TOKENS) * token_bytes,
            is_compiled=compiled,
        )

    def load(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        """Write with these weights."""
        self._engine.load_weights(Weights(version=version, tensors=tensors))

    def write(
        self, prompts: Sequence[Sequence[int]], *, samples: int, seed: int
    ) -> list[Trajectory]:
        """Complete answers at temperature 1."""
        return self._engine.generate(prompts, samples_per_prompt=samples, seed=seed, progress=False)

    def recheck(self, answers: Sequence[Trajectory]) -> list[Recheck]:
        """Every token of every answer under the present weights, given those before it."""
        runner = self._engine._runner
        recorder = _Recorder(runner, answers)
        self._engine._runner = recorder
        try:
            self._engine.submit(answers, tolerance=_KEEPS_ALL)
            checked = run_to_end(self._engine, [a.key for a in answers], show_progress=False)
        finally:
            self._engine._runner = runner
        found = [
            Recheck(recorder.gaps[old.key], new.logprobs, old.logprobs)
            for old, new in zip(answers, checked, strict=True)
        ]
        for old, new, check in zip(answers, checked, found, strict=True):
            if new.tokens != old.tokens or any(map(math.isnan, check.gaps)):
                raise RuntimeError(f"answer {old.key} was not checked to its end")
        return found

    def kept(self, answers: Sequence[Trajectory], *, tolerance: float) -> list[int]:
        """How many tokens of each answer the engine really keeps at a tolerance."""
        requests = [
            self._engine.request(answer, tolerance=tolerance, limit=self._max_tokens)
            for answer in answers
        ]
        self._engine.enqueue(requests)
        while any(request.unchecked for request in requests):
            self._engine.step()
        # What was decoded stands behind what was kept, and passes under way may still add to it.
        kept = [len(request.logprobs) - request.decoded for request in requests]
        self._engine.interrupt()
        return kept


@dataclass(frozen=True, slots=True)
class _Ticket:
    """A pass, and the runner's own ticket for it."""

    plan: Plan
    inner: object


class _Recorder:
    """A runner that notes the gap of every cached token it is asked about."""

    def __init__(self, runner: Runner, answers: Sequence[Trajectory]) -> None:
        """Nothing is known yet."""
        self.gaps: dict[Key, list[float]] = {
            answer.key: [math.nan] * answer.num_tokens for answer in answers
        }
        self._runner = runner

    @property
    def lag(self) -> int:
        """As the runner has it."""
        return self._runner.lag

    def launch(self, plan: Plan) -> object:
        """Start a pass, and remember what it is about."""
        return _Ticket(plan, self._runner.launch(plan))

    def collect(self, ticket: object) -> Outcome:
        """Note the gaps of a pass."""
        assert isinstance(ticket, _Ticket), "tickets come from launch"
        outcome = self._runner.collect(ticket.inner)
        row = 0
        for piece in ticket.plan.sampled:
            gaps = self.gaps[piece.request.trajectory.key]
            # The row at a position is about the token at the next one.
            first = piece.start + 1 - piece.request.prompt_tokens
            count = max(0, min(piece.num_rows, len(gaps) - first))
            gaps[first : first + count] = outcome.gaps[row : row + count]
            row += piece.num_rows
        return outcome

    def weights_changed(self) -> None:
        """As the runner has it."""
        self._runner.weights_changed()

    def release(self) -> None:
        """As the runner has it."""
        self._runner.release()

    def restore(self) -> None:
        """As the runner has it."""
        self._runner.restore()
