"""One study: generate answers at version 0, update the weights, and measure what survives.

All copies of the weights follow the same master through the same updates; each is measured on its
own answers. Updates train on other answers than the cached ones, as in a run: a cached answer is
not complete yet.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coupling_study.copies import DTYPES, Copy, Rule, rules
from coupling_study.master import Master
from coupling_study.questions import prompts
from coupling_study.settings import Arithmetic, Settings
from coupling_study.survival import Survival, Survivors, mean_distance
from coupling_study.writer import Recheck, Writer
from sortedrl.core.randomness import mix
from sortedrl.models.loading import load_model
from sortedrl.types import Trajectory

CONFIRMED_TOLERANCE = 0.01
"""The tolerance at which the engine itself is compared with the gaps."""
_MASTER, _COPIES, _TRAINING, _CACHED, _ADVANTAGES = range(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """A copy at version 0."""

    seed: int
    rule: Rule
    answers: int
    mean_length: float
    unchanged: float
    """Share of the answers kept at tolerance 0 with unchanged weights."""
    nudged: float
    """The same after one weight of the first layer has moved by one ulp."""
    nudged_changed: float
    """Share of all tokens whose choice that changed, given the previous tokens."""
    mismatch: float
    """Mean distance of its log-probabilities from the master's, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A copy after some updates."""

    seed: int
    rule: Rule
    rate: float
    updates: int
    master_step: float
    """Mean distance of the master weights from version 0."""
    moved: float
    """Share of the rollout weights that changed."""
    followed: float
    """Share of the master's movement that the copy has followed."""
    changed: float
    """Share of all tokens whose choice changed, given the previous tokens."""
    drift: float
    """Mean size of the log-ratio over all tokens, kept or not."""
    mismatch: float | None
    """As in `Beginning`; only after the last update."""
    survival: tuple[Survival, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """Whether the engine keeps what the gaps predict at a tolerance."""

    rule: Rule
    answers: int
    differing: int


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that was measured."""

    beginnings: list[Beginning]
    measurements: list[Measurement]
    confirmations: list[Confirmation]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """The position of the master in the study."""

    seed: int
    rate: float
    updates: int
    master_step: float


@dataclass(frozen=True, slots=True)
class _Cached:
    """A copy of the weights, and the answers it generated."""

    copy: Copy
    writer: Writer
    answers: Sequence[Trajectory]


class Study:
    """The master, its copies, and an engine for each precision."""

    def __init__(self, settings: Settings) -> None:
        """Load the model once for each of them."""
        self._settings = settings
        self._began = time.perf_counter()
        self.device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
        model = load_model(settings.model, dtype=torch.float32, device=self.device)
        self._master = Master(model, micro_batch=settings.micro_batch)
        first_token: int | None = model.config.bos_token_id
        self._prompts = prompts(settings.model, count=settings.questions, first_token=first_token)
        self._copies = [Copy(rule, self._master.tensors) for rule in rules(settings)]
        kinds: set[Arithmetic] = {"fp32", *(copy.rule.arithmetic for copy in self._copies)}
        self._writers = {kind: self._writer(kind) for kind in kinds}
        self._reference = self._writers["fp32"]
        self.findings = Findings([], [], [])

    def run(self, seed: int) -> None:
        """Every learning rate with one seed; the findings grow."""
        self._master.begin_study(self._settings.start, seed=mix(seed, _MASTER))
        training = self._training_answers(seed)
        cached = [self._begin(seed, copy) for copy in self._copies]
        for rate in self._settings.rates:
            for point in self._trained(training, cached, seed=seed, rate=rate):
                self.findings.measurements.extend(self._measured(one, point) for one in cached)
                self._say(f"seed {seed}: rate {rate:g}, measured at update {point.updates}")

    def _trained(
        self,
        training: Sequence[Trajectory],
        cached: Sequence[_Cached],
        *,
        seed: int,
        rate: float,
    ) -> Iterator[_Point]:
        """Update the master and all copies; yields at every point to measure."""
        last = self._settings.updates[-1]
        self._master.begin_training(learning_rate=rate)
        for one in cached:
            one.copy.reset()
        for update in range(1, last + 1):
            # Answers are ordered by prompt: every update gets some of each.
            batch = training[update - 1 :: last][: self._settings.update_batch]
            keys = [mix(seed, _ADVANTAGES, update, place) for place in range(len(batch))]
            self._master.update(batch, [1 if key & 1 else -1 for key in keys])
            for one in cached:
                one.copy.follow(self._master.tensors)
            if update in self._settings.updates:
                step = self._master.mean_step()
                yield _Point(seed=seed, rate=rate, updates=update, master_step=step)

    def _begin(self, seed: int, copy: Copy) -> _Cached:
        """Let a copy generate its answers, and check that it would generate them again."""
        is_running = self._settings.start == "running"
        copy.settle(self._master.tensors, seed=mix(seed, _COPIES) if is_running else None)
        writer = self._writers[copy.rule.arithmetic]
        writer.load(copy.tensors, version=0)
        answers = writer.write(
            self._prompts, samples=self._settings.samples, seed=mix(seed, _CACHED)
        )
        checks = self._recheck(writer, copy.tensors, answers, updates=0)
        copy.nudge()
        nudged = Survivors(self._recheck(writer, copy.tensors, answers, updates=0))
        copy.reset()
        beginning = Beginning(
            seed=seed,
            rule=copy.rule,
            answers=len(answers),
            mean_length=sum(answer.num_tokens for answer in answers) / len(answers),
            unchanged=Survivors(checks).at(0.0).kept,
            nudged=nudged.at(0.0).kept,
            nudged_changed=nudged.changed,
            mismatch=self._mismatch(checks, answers, updates=0),
        )
        self.findings.beginnings.append(beginning)
        self._say(
            f"seed {seed}: {copy.rule}, {len(answers)} answers of {beginning.mean_length:.0f} "
            f"tokens, {beginning.unchanged:.2%} kept by the same weights"
        )
        return _Cached(copy, writer, answers)

    def _measured(self, cached: _Cached, point: _Point) -> Measurement:
        copy, settings, updates = cached.copy, self._settings, point.updates
        checks = self._recheck(cached.writer, copy.tensors, cached.answers, updates=updates)
        survivors = Survivors(checks)
        if (point.rate, updates) == (settings.typical_rate, settings.updates[0]):
            self._confirm(cached, survivors)
        mismatch = None
        if updates == settings.updates[-1]:
            mismatch = self._mismatch(checks, cached.answers, updates=updates)
        return Measurement(
            seed=point.seed,
            rule=copy.rule,
            rate=point.rate,
            updates=updates,
            master_step=point.master_step,
            moved=copy.moved_share(),
            followed=copy.followed(self._master.tensors, self._master.start),
            changed=survivors.changed,
            drift=survivors.drift,
            mismatch=mismatch,
            survival=tuple(survivors.at(tolerance) for tolerance in settings.tolerances),
        )

    def _confirm(self, cached: _Cached, survivors: Survivors) -> None:
        """Compare with the engine itself, at one tolerance."""
        kept = cached.writer.kept(cached.answers, tolerance=CONFIRMED_TOLERANCE)
        told = survivors.kept_counts(CONFIRMED_TOLERANCE)
        differing = sum(one != other for one, other in zip(kept, told, strict=True))
        self.findings.confirmations.append(
            Confirmation(rule=cached.copy.rule, answers=len(kept), differing=differing)
        )

    def _recheck(
        self,
        writer: Writer,
        tensors: Mapping[str, Tensor],
        answers: Sequence[Trajectory],
        *,
        updates: int,
    ) -> list[Recheck]:
        # Plus one: an engine only verifies tokens of another version.
        writer.load(tensors, version=updates + 1)
        return writer.recheck(answers)

    def _mismatch(
        self, checks: Sequence[Recheck], answers: Sequence[Trajectory], *, updates: int
    ) -> float:
        """How far a copy is from the master on the answers it wrote."""
        reference = self._recheck(self._reference, self._master.tensors, answers, updates=updates)
        return mean_distance(checks, reference)

    def _training_answers(self, seed: int) -> list[Trajectory]:
        self._reference.load(self._master.tensors, version=0)
        samples = -(-self._settings.training_answers // len(self._prompts))
        answers = self._reference.write(self._prompts, samples=samples, seed=mix(seed, _TRAINING))
        self._say(f"seed {seed}: {len(answers)} answers to train on")
        return answers

    def _writer(self, kind: Arithmetic) -> Writer:
        settings = self._settings
        return Writer(
            load_model(settings.model, dtype=DTYPES[kind], device=self.device),
            slots=settings.slots,
            context=max(map(len, self._prompts)) + settings.max_tokens,
            max_tokens=settings.max_tokens,
            compiled=settings.compiled,
        )

    def _say(self, text: str) -> None:
        seconds = time.perf_counter() - self._began
        print(f"{seconds:6.1f} s  {text}", file=sys.stderr, flush=True)
