"""The checks of the self-test: what a run relies on, tried on a few answers.

    8 answers in 4 slots -> interruption -> new weights -> the same answers to their end -> greedy

Nothing is lost or counted twice, cached tokens stay, every token has the version that wrote it and
the log-probability that a plain forward pass of that version gives it.

The tiny model, before and after its update, has weights larger than the usual initial ones, at
which all tokens are about equally likely: an engine with the wrong weights, or one that reports
log-probabilities of the wrong temperature, would hardly show.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import PreTrainedModel

from sortedrl.engines.generation import RolloutEngine, fresh_trajectories
from sortedrl.engines.sampling import Sampling
from sortedrl.errors import EngineError
from sortedrl.models.attention import plain_logprobs
from sortedrl.models.loading import without_bars
from sortedrl.models.tiny import tiny_model, tiny_settings, tiny_tokenizer
from sortedrl.types import Key, Trajectory, Weights

Submit = Callable[[Sequence[Trajectory]], None]


class SelfTestFailed(EngineError):
    """The engine does not do what a run relies on."""


def expect(claim: bool, otherwise: str) -> None:
    """Fail the self-test unless a claim holds."""
    if not claim:
        raise SelfTestFailed(otherwise)


class Rollout:
    """Keeps the books that the engine should keep too."""

    def __init__(self, engine: RolloutEngine) -> None:
        """Nothing is asked for yet."""
        self.seconds = 0.0
        """Spent in the engine."""
        self.told_tokens = 0
        """Tokens it says it has written."""
        self._engine = engine
        self._open: set[Key] = set()

    def submit(self, trajectories: Sequence[Trajectory], *, by: Submit) -> None:
        """Ask for these answers, in a way of the caller's."""
        self._open |= {trajectory.key for trajectory in trajectories}
        by(trajectories)

    def until(self, tokens: int) -> list[Trajectory]:
        """Step until it has told of so many tokens; gives the answers completed on the way."""
        goal = self.told_tokens + tokens
        finished: list[Trajectory] = []
        while self.told_tokens < goal and self._open:
            finished += self._step()
        return finished

    def to_end(self) -> list[Trajectory]:
        """Step until all answers are complete."""
        finished: list[Trajectory] = []
        while self._open:
            finished += self._step()
        left = self._engine.interrupt()
        expect(not left, f"it gave back {len(left)} answers after all were complete")
        return finished

    def interrupt(self) -> list[Trajectory]:
        """Stop; gives the unfinished answers."""
        began = time.monotonic()
        stopped = list(self._engine.interrupt())
        self.seconds += time.monotonic() - began
        self._came_back(stopped)
        expect(not self._open, f"{len(self._open)} answers did not come back from an interruption")
        return stopped

    def _step(self) -> Sequence[Trajectory]:
        began = time.monotonic()
        step = self._engine.step()
        self.seconds += time.monotonic() - began
        expect(
            bool(step.finished or step.decoded_tokens),
            f"it lost {len(self._open)} answers: they are not complete, but it writes nothing more",
        )
        self.told_tokens += step.decoded_tokens
        self._came_back(step.finished)
        return step.finished

    def _came_back(self, trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            expect(
                trajectory.key in self._open,
                f"answer {trajectory.key} came back twice, or was never asked for",
            )
            self._open.remove(trajectory.key)


# Heads of 32 numbers: vLLM's attention on a CPU has no smaller ones.
SPEC = "tiny:hidden=64,heads=2,layers=2"
_OPINION = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The model under two versions of its weights."""

    before: PreTrainedModel
    after: PreTrainedModel

    @property
    def vocabulary(self) -> int:
        """Token ids lie below."""
        vocabulary: int = self.before.config.vocab_size
        return vocabulary


def made_pair(*, device: torch.device, dtype: torch.dtype) -> Pair:
    """The two models, where and in the precision that engines have by default."""
    return Pair(
        before=_made(0, device=device, dtype=dtype), after=_made(1, device=device, dtype=dtype)
    )


def write_model(model: PreTrainedModel, folder: Path) -> None:
    """Write a model and its tokenizer as a folder that every engine reads."""
    with without_bars():
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)


def _made(seed: int, *, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    model = tiny_model(tiny_settings(SPEC))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 1.0 if parameter.dim() == 1 else 0.0
            parameter.normal_(mean, _OPINION, generator=generator)
    torch.nn.Module.to(model, device, dtype)
    return model


SLOTS = 4
MAX_TOKENS = 64
CONTEXT = 128
# Neither 1 nor 0: log-probabilities before temperature would pass otherwise.
SAMPLING = Sampling(temperature=0.8)
_PROMPTS = 8
_PROMPT_TOKENS = (3, 20)
_TOKENS_BEFORE_INTERRUPTION = 16
_INTERRUPTIONS = 5
_GREEDY_PROMPTS = 4
_GREEDY_TOKENS = 16
_MOST_NATS = {torch.float32: 0.01, torch.bfloat16: 0.25}
"""Kernels differ by less; other weights or another temperature differ by far more."""

Stage = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was seen on the way."""

    tokens_per_second: float
    largest_gap: float | None


def check(engine: RolloutEngine, models: Pair, *, stage: Stage) -> Figures:
    """Try an engine that has the model as it is before the update."""
    stage("writing answers")
    first, new = engine.version, engine.version + 1
    rollout = Rollout(engine)

    def hand_over() -> None:
        stage("taking new weights")
        engine.load_weights(Weights(new, models.after.state_dict()))
        expect(engine.version == new, f"it must have version {new}, it says {engine.version}")

    answers = _written(
        engine, rollout, vocabulary=models.vocabulary, between=hand_over, versions=(first, new)
    )
    stage("writing the likeliest answers")
    greedy = _written_greedily(engine, models)
    stage("comparing with a plain forward pass")
    most = _MOST_NATS[models.before.dtype]
    gap = _gap(answers, models.before, version=first)
    expect(
        gap <= most,
        f"its log-probabilities are {gap:.2g} nats off a plain forward pass at temperature "
        f"{SAMPLING.temperature:g} (at most {most:g})",
    )
    gap_after = _gap(answers, models.after, version=new)
    expect(
        gap_after <= most,
        f"after new weights its log-probabilities are {gap_after:.2g} nats off a plain forward "
        f"pass with them (at most {most:g}): it writes with other weights, or from an old cache",
    )
    gap_greedy = _check_greedy(greedy, models.after, most=most)
    return Figures(
        tokens_per_second=rollout.told_tokens / rollout.seconds,
        largest_gap=max(gap, gap_after, gap_greedy),
    )


def check_as_it_is(engine: RolloutEngine, *, vocabulary: int, stage: Stage) -> Figures:
    """Try an engine whose weights must stay, and are not known here."""
    stage("writing answers")
    rollout = Rollout(engine)
    versions = (engine.version, engine.version)
    _written(engine, rollout, vocabulary=vocabulary, between=lambda: None, versions=versions)
    return Figures(tokens_per_second=rollout.told_tokens / rollout.seconds, largest_gap=None)


def _written(
    engine: RolloutEngine,
    rollout: Rollout,
    *,
    vocabulary: int,
    between: Callable[[], None],
    versions: tuple[int, int],
) -> list[Trajectory]:
    """Complete answers that were interrupted, checked in all that needs no model."""
    answers: list[Trajectory] = []
    for attempt in range(_INTERRUPTIONS):
        finished, stopped = _interrupted(engine, rollout, vocabulary=vocabulary, attempt=attempt)
        # A fast engine may be through with all of them before it is told to stop.
        is_in_the_middle = any(0 < t.num_tokens < MAX_TOKENS for t in stopped)
        if is_in_the_middle:
            between()
        rollout.submit(stopped, by=lambda left: engine.submit(left, tolerance=None))
        resumed = {trajectory.key: trajectory for trajectory in rollout.to_end()}
        for before in stopped:
            now = versions[1] if is_in_the_middle else versions[0]
            _check_resumed(before, resumed[before.key], versions=(versions[0], now))
        answers += [*finished, *resumed.values()]
        if is_in_the_middle:
            break
    else:
        raise SelfTestFailed(
            f"it was interrupted {_INTERRUPTIONS} times while it wrote, but gave back no answer "
            "that was begun and not complete"
        )
    for answer in answers:
        _check_complete(answer, vocabulary=vocabulary)
    written = sum(answer.num_tokens for answer in answers)
    expect(
        written == rollout.told_tokens,
        f"it told of {rollout.told_tokens} tokens, but its answers have {written}",
    )
    return answers


def _interrupted(
    engine: RolloutEngine, rollout: Rollout, *, vocabulary: int, attempt: int
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Answers that were complete when the engine was stopped, and those that were not."""
    prompts = _prompts(_PROMPTS, vocabulary)
    asked = fresh_trajectories(prompts, samples_per_prompt=1, seed=attempt)
    rollout.submit(asked, by=lambda fresh: engine.submit(fresh, tolerance=None))
    finished = rollout.until(_TOKENS_BEFORE_INTERRUPTION >> attempt)
    return finished, rollout.interrupt()


def _written_greedily(engine: RolloutEngine, models: Pair) -> list[Trajectory]:
    greedy = Rollout(engine)
    prompts = _prompts(_GREEDY_PROMPTS, models.vocabulary)
    greedy.submit(
        fresh_trajectories(prompts, samples_per_prompt=1, seed=1),
        by=lambda trajectories: engine.submit_with(
            trajectories,
            tolerance=None,
            sampling=Sampling(temperature=0),
            max_tokens=_GREEDY_TOKENS,
        ),
    )
    return greedy.to_end()


def _check_resumed(before: Trajectory, after: Trajectory, *, versions: tuple[int, int]) -> None:
    kept = before.num_tokens
    expect(
        after.tokens[:kept] == before.tokens and after.logprobs[:kept] == before.logprobs,
        f"answer {before.key} had {kept} tokens when it was interrupted, and others when resumed",
    )
    stamped = [segment.version for segment in after.segments for _ in segment.tokens]
    old, new = versions
    expect(
        stamped == [old] * kept + [new] * (after.num_tokens - kept),
        f"answer {before.key} has tokens that are stamped with a version that did not write them",
    )


def _check_complete(answer: Trajectory, *, vocabulary: int) -> None:
    expect(
        answer.num_tokens == MAX_TOKENS and answer.finish_reason == "length",
        f"answer {answer.key} must end at {MAX_TOKENS} tokens, it ended at {answer.num_tokens} "
        f"({answer.finish_reason})",
    )
    expect(
        all(0 <= token < vocabulary for token in answer.tokens),
        f"answer {answer.key} has tokens outside of the vocabulary of {vocabulary}",
    )
    worst = max(answer.logprobs)
    expect(
        worst <= 1e-3 and all(math.isfinite(logprob) for logprob in answer.logprobs),
        f"answer {answer.key} has log-probabilities that are none, up to {worst:.2g}",
    )


def _gap(answers: Sequence[Trajectory], model: PreTrainedModel, *, version: int) -> float:
    """The largest difference to what the model says of the tokens of a version."""
    gaps = [0.0]
    for answer in answers:
        plain = _plain(answer, model, temperature=SAMPLING.temperature)
        stamped = [segment.version for segment in answer.segments for _ in segment.tokens]
        gaps += [
            abs(told - known)
            for told, known, stamp in zip(answer.logprobs, plain, stamped, strict=True)
            if stamp == version
        ]
    return max(gaps)


def _check_greedy(answers: Sequence[Trajectory], model: PreTrainedModel, *, most: float) -> float:
    """Each token must be the model's best one; gives the largest gap of log-probabilities."""
    gaps = [0.0]
    for answer in answers:
        best = _best(answer, model)
        for place, (plain, likeliest) in enumerate(
            zip(_plain(answer, model, temperature=1.0), best, strict=True)
        ):
            # Two tokens that are all but equal may be taken for each other.
            expect(
                likeliest - plain <= most,
                f"without chance it must write what the model with the new weights finds likeliest,"
                f" but token {place} of answer {answer.key} is {likeliest - plain:.2g} nats worse",
            )
            gaps.append(abs(answer.logprobs[place] - plain))
    expect(
        max(gaps) <= most,
        f"without chance its log-probabilities are {max(gaps):.2g} nats off those of temperature 1 "
        f"(at most {most:g})",
    )
    return max(gaps)


def _plain(answer: Trajectory, model: PreTrainedModel, *, temperature: float) -> list[float]:
    text = [*answer.prompt.tokens, *answer.tokens]
    known: list[float] = plain_logprobs(
        model, text, after=len(answer.prompt.tokens), temperature=temperature
    ).tolist()
    return known


def _best(answer: Trajectory, model: PreTrainedModel) -> list[float]:
    """The log-probability of the likeliest token at each place of an answer."""
    text = torch.tensor([[*answer.prompt.tokens, *answer.tokens]], device=model.device)
    with torch.no_grad():
        logits_TV = model(input_ids=text).logits[0].float().cpu()
    after = len(answer.prompt.tokens)
    best: list[float] = logits_TV[after - 1 : -1].log_softmax(-1).max(-1).values.tolist()
    return best


def _prompts(count: int, vocabulary: int) -> list[list[int]]:
    random = Random(count)
    return [
        [random.randrange(vocabulary) for _ in range(random.randint(*_PROMPT_TOKENS))]
        for _ in range(count)
    ]
