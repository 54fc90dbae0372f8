"""The engine contract: one law is one function of an engine under test.

To test your own engine, with pytest or without:

    def opening():
        return MyEngine(reference_model(), slots=SLOTS, max_tokens=limit_of, stop_tokens=STOPS,
                        sampling=Sampling(temperature=TEMPERATURE))

    @pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
    def test_my_engine_keeps_the_law(law):
        check(law, EngineUnderTest(opening=opening))

A law fails with an `AssertionError`. The engine is compared with plain forward passes of a tiny
model. `RolloutDriver` and `logprob_gap` are also used by the self-test of installed engines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from sortedrl.engines.generation import RolloutEngine
from sortedrl.engines.sampling import Sampling
from sortedrl.errors import EngineError, EngineLost, RequestError
from sortedrl.models.attention_interface import plain_logprobs
from sortedrl.types import FinishReason, Key, Prompt, Trajectory, Weights

SLOTS, CONTEXT, VOCABULARY = 4, 256, 128
STOPS = (3, 50, 99)
TEMPERATURE = 0.7
USUAL_LIMIT = 12
LONGEST = 24
GREEDY = Sampling(temperature=0, stop_tokens=frozenset(), max_tokens=USUAL_LIMIT)
ENDLESS = Sampling(temperature=TEMPERATURE, stop_tokens=frozenset(), max_tokens=USUAL_LIMIT)
_SPREAD = 0.2
_EXIT_SECONDS = 20.0
_TRIES = 20


class NonConforming(EngineError):
    """The engine violates the contract."""


def expect(claim: bool, otherwise: str) -> None:
    """Raise `NonConforming` unless a claim holds."""
    if not claim:
        raise NonConforming(otherwise)


class RolloutDriver:
    """Drives an engine and tracks open answers and token counts."""

    def __init__(self, engine: RolloutEngine) -> None:
        """Start with an idle engine."""
        self.seconds = 0.0
        """Time spent in the engine."""
        self.decoded_tokens = 0
        """Tokens reported by its steps."""
        self._engine = engine
        self._open: set[Key] = set()

    def submit(self, trajectories: Sequence[Trajectory], sampling: Sampling | None = None) -> None:
        """Submit these trajectories; their cached tokens are trusted."""
        self._open |= {trajectory.key for trajectory in trajectories}
        self._engine.submit(trajectories, tolerance=None, sampling=sampling)

    def until(self, tokens: int) -> list[Trajectory]:
        """Step until this many tokens were decoded; returns the answers completed meanwhile."""
        goal = self.decoded_tokens + tokens
        finished: list[Trajectory] = []
        while self.decoded_tokens < goal and self._open:
            finished += self.step()
        return finished

    def to_end(self) -> list[Trajectory]:
        """Step until all answers are complete."""
        finished: list[Trajectory] = []
        while self._open:
            finished += self.step()
        left = self._engine.interrupt()
        expect(not left, f"it returned {len(left)} answers after all were complete")
        return finished

    def interrupt(self) -> list[Trajectory]:
        """Stop; returns the unfinished answers."""
        began = time.monotonic()
        stopped = list(self._engine.interrupt())
        self.seconds += time.monotonic() - began
        self._close(stopped)
        expect(not self._open, f"{len(self._open)} answers did not come back from an interruption")
        return stopped

    def step(self) -> Sequence[Trajectory]:
        """One step; returns the answers that it completed."""
        began = time.monotonic()
        step = self._engine.step()
        self.seconds += time.monotonic() - began
        expect(
            bool(step.finished or step.decoded_tokens or not self._open),
            f"it lost {len(self._open)} answers: they are incomplete, but it stopped decoding",
        )
        self.decoded_tokens += step.decoded_tokens
        self._close(step.finished)
        return step.finished

    def _close(self, trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            expect(
                trajectory.key in self._open,
                f"answer {trajectory.key} came back twice, or was never submitted",
            )
            self._open.remove(trajectory.key)


def logprob_gap(
    trajectory: Trajectory, models: Mapping[int, PreTrainedModel], *, temperature: float
) -> float:
    """The largest log-probability difference to a plain forward pass, in nats.

    Each segment is compared with the model of its version; versions without a model are skipped.
    """
    gap, tokens = 0.0, list(trajectory.prompt.tokens)
    for segment in trajectory.segments:
        tokens += segment.given
        after = len(tokens)
        tokens += segment.tokens
        model = models.get(segment.version)
        if model is not None and segment.tokens:
            plain_T = plain_logprobs(model, tokens, after=after, temperature=temperature)
            gap = max(gap, (plain_T - torch.tensor(segment.logprobs)).abs().max().item())
    return gap


def reference_model(seed: int = 0) -> PreTrainedModel:
    """A new tiny model with distinct logits, in a shape that every engine supports."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model: PreTrainedModel = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 1.0 if parameter.dim() == 1 else 0.0
            parameter.normal_(0, _SPREAD, generator=generator).add_(mean)
    return model


def limit_of(trajectory: Trajectory) -> int:
    """The token limit of an engine under test: a field of the prompt."""
    limit = trajectory.prompt.fields.get("limit", USUAL_LIMIT)
    assert isinstance(limit, int)
    return limit


@dataclass(slots=True, kw_only=True, eq=False)
class EngineUnderTest:
    """An engine made by `opening` with `reference_model(0)`, `limit_of`, `STOPS`, `TEMPERATURE`.

    The model must be the engine's own: weights are loaded into it.
    """

    opening: Callable[[], Any]
    precision: float = 1e-4
    """Allowed log-probability difference to a plain forward pass."""
    slots: int = SLOTS
    is_ordered: bool = True
    """Whether work reaches it in the order of submission: not over HTTP, nor in a pool."""
    is_fresh: bool = True
    """Whether a new engine has the weights of version 0; a server keeps its last ones."""
    is_simulated: bool = False
    """Whether it is simulated: tokens are numbers, and all answers have one limit."""
    _engine: Any = None
    _models: dict[int, PreTrainedModel] = field(default_factory=dict)
    _next_prompt: int = 0
    _before: tuple[set[threading.Thread], set[int]] = (set(), set())

    @property
    def engine(self) -> Any:  # noqa: ANN401  a `RolloutEngine`, or a simulated one
        """The engine, idle; a new one if the last was closed."""
        if self._engine is None:
            self._before = (_threads(), _child_processes())
            self._engine = self.opening()
            self._models = {0: reference_model(0)}
            if not self.is_fresh:
                self._engine.load_weights(Weights(0, _tensors(reference_model(0))))
        return self._engine

    @property
    def model(self) -> PreTrainedModel:
        """The model with the engine's current weights."""
        return self._models[self.engine.version]

    @property
    def long_limit(self) -> int:
        """Tokens of an answer to be interrupted; longer for a server, whose tokens arrive late."""
        return 120 if self.is_ordered else CONTEXT - 16

    def load_other_weights(self) -> None:
        """Load the weights of another model into the engine."""
        version = self.engine.version + 1
        new = reference_model(version % 3)
        self.engine.load_weights(Weights(version, _tensors(new)))
        assert self.engine.version == version
        self._models[version] = new

    def fresh(self, tokens: Sequence[int], *, limit: int = USUAL_LIMIT) -> Trajectory:
        """An empty trajectory with its own prompt."""
        self._next_prompt += 1
        number = self._next_prompt
        prompt = Prompt(id=number, tokens=tuple(tokens), fields={"limit": limit})
        return Trajectory(prompt=prompt, sample_index=0, group=0, seed=number)

    def finish(self, keys: Sequence[Key]) -> tuple[list[Trajectory], list[Key]]:
        """Step until these are complete; returns them, and their keys in completion order."""
        done: dict[Key, Trajectory] = {}
        while len(done) < len(keys):
            step = self.engine.step()
            assert step.finished or step.decoded_tokens, "an engine with work makes progress"
            for trajectory in step.finished:
                assert trajectory.key in keys
                assert trajectory.key not in done
                done[trajectory.key] = trajectory
        assert not self.engine.interrupt()
        return [done[key] for key in keys], list(done)

    def generate(
        self, trajectories: Sequence[Trajectory], sampling: Sampling | None = None
    ) -> list[Trajectory]:
        """The complete answers, in order."""
        self.engine.submit(trajectories, tolerance=None, sampling=sampling)
        return self.finish([t.key for t in trajectories])[0]

    def check_logprobs(self, trajectory: Trajectory, *, temperature: float = TEMPERATURE) -> None:
        """Check that every token has the log-probability under its weights."""
        if not self.is_simulated:
            gap = logprob_gap(trajectory, self._models, temperature=temperature)
            assert gap <= self.precision, (trajectory, gap)

    def close(self) -> None:
        """Close the engine; no thread or process may remain."""
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        engine.close()
        engine.close()
        threads, children = self._before
        _soon(lambda: _threads() <= threads, "threads are left")
        _soon(lambda: _child_processes() <= children, "processes are left")


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    return dict(model.state_dict())


def _threads() -> set[threading.Thread]:
    """All threads except those of progress bars and file sharing."""
    return {
        thread
        for thread in threading.enumerate()
        if type(thread).__name__ != "TMonitor" and "(_serve)" not in thread.name
    }


def _child_processes() -> set[int]:
    """All descendant processes except Python's resource tracker."""
    import psutil

    below = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            is_gone = process.status() == psutil.STATUS_ZOMBIE
            if not is_gone and "resource_tracker" not in " ".join(process.cmdline()):
                below.add(process.pid)
    return below


def _soon(is_so: Callable[[], bool], complaint: str) -> None:
    until = time.monotonic() + _EXIT_SECONDS
    while not is_so():
        assert time.monotonic() < until, (complaint, _threads(), _child_processes())
        time.sleep(0.05)


@torch.no_grad()
def greedy(model: PreTrainedModel, tokens: Sequence[int], count: int) -> list[int]:
    """The greedy continuation by the plain model."""
    text = list(tokens)
    for _ in range(count):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(tokens) :]


def random_prompt(random: Random, length: int) -> list[int]:
    """Random tokens."""
    return [random.randrange(VOCABULARY) for _ in range(length)]


class Caller:
    """Calls an engine at random as a run does, and checks the results."""

    def __init__(self, tested: EngineUnderTest, seed: int) -> None:
        """Start without work."""
        self.tested = tested
        self.random = Random(seed)
        self.waiting: list[Trajectory] = []
        self.running: dict[Key, Trajectory] = {}
        self.done: list[Trajectory] = []
        self.decoded = 0

    def act(self, times: int) -> None:
        """Act at random."""
        acts = (
            self.submit,
            self.step,
            self.interrupt,
            self.load_weights_idle,
            self.load_weights,
        )
        for act in self.random.choices(acts, (6, 12, 3, 1, 1), k=times):
            act()

    def submit(self) -> None:
        """Submit waiting work and some new work."""
        random = self.random
        new = [
            self.tested.fresh(
                random_prompt(random, random.choice((1, 5, 20, 60))),
                limit=random.randint(1, LONGEST),
            )
            for _ in range(random.randint(1, 3))
        ]
        batch, self.waiting = [*self.waiting, *new], []
        self.tested.engine.submit(batch, tolerance=None)
        self.running |= {t.key: t for t in batch}

    def step(self) -> None:
        """Step a few times."""
        for _ in range(self.random.randint(1, 4)):
            step = self.tested.engine.step()
            assert step.finished or step.decoded_tokens or not self.running
            self.decoded += step.decoded_tokens
            for trajectory in step.finished:
                self._take(trajectory)
                assert trajectory.finish_reason is not None
                if not self.tested.is_simulated:
                    reason = ended(trajectory, STOPS, limit_of(trajectory))
                    assert trajectory.finish_reason == reason
                self.done.append(trajectory)

    def interrupt(self) -> None:
        """Interrupt, and keep the returned trajectories."""
        stopped = list(self.tested.engine.interrupt())
        assert sorted(t.key for t in stopped) == sorted(self.running)
        for trajectory in stopped:
            self._take(trajectory)
            assert trajectory.finish_reason is None
        self.waiting += stopped

    def load_weights_idle(self) -> None:
        """Load weights into an idle engine."""
        self.interrupt()
        self.tested.load_other_weights()

    def load_weights(self) -> None:
        """Load weights while answers run."""
        if self.tested.is_simulated:
            self.interrupt()
        self.tested.load_other_weights()

    def _take(self, trajectory: Trajectory) -> None:
        """Check that it kept its tokens and got new ones of the current weights."""
        before = self.running.pop(trajectory.key)
        assert trajectory.tokens[: before.num_tokens] == before.tokens
        assert trajectory.logprobs[: before.num_tokens] == before.logprobs
        versions = [s.version for s in trajectory.segments]
        assert versions == sorted(set(versions))
        limit = LONGEST if self.tested.is_simulated else limit_of(trajectory)
        assert trajectory.decoded_tokens == trajectory.num_tokens <= limit


def ended(trajectory: Trajectory, stops: Sequence[int], limit: int) -> FinishReason | None:
    """Why an answer is complete, judged by its tokens; `None` if it is not."""
    assert not set(trajectory.tokens[:-1]) & set(stops), "it continues after a stop token"
    if trajectory.tokens[-1] in stops:
        return "stop"
    return "length" if trajectory.num_tokens == limit else None


def nothing_is_lost_or_doubled_whatever_happens(tested: EngineUnderTest) -> None:
    """Under random submits, steps, interrupts and weight updates."""
    caller = Caller(tested, seed=7)
    caller.act(60)
    caller.interrupt()
    caller.submit()
    while caller.running:
        caller.step()
    assert not tested.engine.interrupt()
    assert {t.finish_reason for t in caller.done} == {"stop", "length"}
    assert len(caller.done) > 20
    assert len({t.key for t in caller.done}) == len(caller.done)
    assert caller.decoded == sum(t.num_tokens for t in caller.done)
    # A server may complete answers this short before an abort arrives.
    if tested.is_fresh:
        assert sum(len(t.segments) > 1 for t in caller.done) > 2, "some have two versions"
    for trajectory in caller.done:
        tested.check_logprobs(trajectory)


def log_probabilities_are_those_of_a_plain_forward_pass(tested: EngineUnderTest) -> None:
    """At every temperature, for prompts of all lengths."""
    random = Random(1)
    work = [tested.fresh(random_prompt(random, n), limit=30) for n in (1, 2, 40, 33, 12, 150)]
    for trajectory in tested.generate(work):
        tested.check_logprobs(trajectory)
    for temperature in (1.0, 1.5):
        sampling = Sampling(temperature=temperature, max_tokens=20)
        for trajectory in tested.generate(work, sampling):
            tested.check_logprobs(trajectory, temperature=temperature)


def a_stop_token_ends_an_answer_and_belongs_to_it(tested: EngineUnderTest) -> None:
    """Even as the last token within the limit."""
    prompt = random_prompt(Random(2), 6)
    full = greedy(tested.model, prompt, 20)
    stop = next(token for token in full if full.index(token) >= 4)
    place = full.index(stop) + 1
    for limit, tokens, reason in [
        (20, full[:place], "stop"),
        (place, full[:place], "stop"),
        (place - 1, full[: place - 1], "length"),
    ]:
        stopping = replace(GREEDY, stop_tokens=frozenset({stop}), max_tokens=limit)
        (answer,) = tested.generate([tested.fresh(prompt)], stopping)
        assert (answer.tokens, answer.finish_reason) == (tokens, reason)
    (answer,) = tested.generate([tested.fresh(prompt)], replace(GREEDY, max_tokens=20))
    assert (answer.tokens, answer.finish_reason) == (full, "length")


def a_limit_holds_however_often_an_answer_is_resumed(tested: EngineUnderTest) -> None:
    """A complete answer is complete at once when it is submitted again."""
    engine = tested.engine
    work = [tested.fresh([n, n + 1], limit=limit) for n, limit in enumerate((1, 9, 17, 30, 40))]
    limits = {t.key: limit_of(t) for t in work}
    done: dict[Key, Trajectory] = {}
    for _ in range(8):
        engine.submit(work, tolerance=None)
        done |= {t.key: t for t in engine.step().finished}
        work = list(engine.interrupt())
    engine.submit(work, tolerance=None)
    done |= {t.key: t for t in tested.finish([t.key for t in work])[0]}
    assert done.keys() == limits.keys()
    for trajectory in done.values():
        assert trajectory.finish_reason == ended(trajectory, STOPS, limits[trajectory.key])
        tested.check_logprobs(trajectory)
    engine.submit(list(done.values()), tolerance=None)
    missing = dict(done)
    while missing:
        step = engine.step()
        assert step.decoded_tokens == 0, "a complete answer needs no more tokens"
        for trajectory in step.finished:
            assert trajectory == missing.pop(trajectory.key)


def the_context_is_a_limit_too(tested: EngineUnderTest) -> None:
    """A long prompt leaves less room for its answer."""
    prompt = random_prompt(Random(3), CONTEXT - 5)
    (answer,) = tested.generate([tested.fresh(prompt)], replace(ENDLESS, max_tokens=50))
    assert (answer.num_tokens, answer.finish_reason) == (5, "length")
    tested.check_logprobs(answer)


def new_weights_write_from_then_on(tested: EngineUnderTest) -> None:
    """Greedy answers are those of the new model."""
    prompt = random_prompt(Random(4), 7)
    engine = tested.engine
    for _ in range(2):
        before = greedy(tested.model, prompt, USUAL_LIMIT)
        (answer,) = tested.generate([tested.fresh(prompt)], GREEDY)
        assert answer.tokens == before
        tested.load_other_weights()
        after = greedy(tested.model, prompt, USUAL_LIMIT)
        assert after != before, "otherwise nothing is tested"
        (answer,) = tested.generate([tested.fresh(prompt)], GREEDY)
        assert answer.tokens == after
        assert {s.version for s in answer.segments} == {engine.version}


def tokens_keep_the_version_that_wrote_them(tested: EngineUnderTest) -> None:
    """An answer that is resumed under new weights has two segments."""
    engine, limit = tested.engine, tested.long_limit
    sampling = replace(ENDLESS, max_tokens=limit)
    for _ in range(_TRIES):
        old = engine.version
        work = [tested.fresh([n, 7]) for n in range(tested.slots)]
        engine.submit(work, tolerance=None, sampling=sampling)
        done = list(engine.step().finished)
        stopped = {t.key: t for t in (*engine.interrupt(), *done)}
        tested.load_other_weights()
        answers = tested.generate(list(stopped.values()), sampling)
        for answer in answers:
            before = stopped[answer.key].num_tokens
            assert answer.tokens[:before] == stopped[answer.key].tokens
            parts = [(old, before), (old + 1, limit - before)]
            found = [(segment.version, len(segment.tokens)) for segment in answer.segments]
            assert found == [part for part in parts if part[1]]
            tested.check_logprobs(answer)
        if any(len(answer.segments) == 2 for answer in answers):
            return
    raise AssertionError("no answer was ever interrupted in the middle")


def a_prefix_that_old_weights_have_read_is_forgotten(tested: EngineUnderTest) -> None:
    """New weights reset the prefix cache."""
    # Longer than a block of any engine, so that it is cached if anything is.
    prompt = random_prompt(Random(5), 200)
    for _ in range(3):
        for _ in range(2):
            (answer,) = tested.generate([tested.fresh(prompt)])
            tested.check_logprobs(answer)
        tested.load_other_weights()


def no_more_answers_are_written_at_once_than_there_are_slots(tested: EngineUnderTest) -> None:
    """A short answer waits until a long one has freed its slot.

    Tokens from a server may arrive late, those of a short answer even before the last ones of a
    long one. But with a slot for it, the short answer would always come first.
    """
    assert tested.engine.slots == tested.slots
    tries = 1 if tested.is_ordered else _TRIES
    found = any(_a_short_answer_waits(tested) for _ in range(tries))
    assert found, "a short answer got a slot that does not exist"


def _a_short_answer_waits(tested: EngineUnderTest) -> bool:
    """Whether a long answer is complete before all short ones that were submitted after it."""
    engine = tested.engine
    long = [tested.fresh([n, 9]) for n in range(tested.slots)]
    short = [tested.fresh([n, 10]) for n in range(3)]
    engine.submit(long, tolerance=None, sampling=replace(ENDLESS, max_tokens=tested.long_limit))
    decoded, done = 0, list[Key]()
    while decoded < 4 * tested.slots:
        step = engine.step()
        decoded, done = decoded + step.decoded_tokens, [*done, *(t.key for t in step.finished)]
    engine.submit(short, tolerance=None, sampling=replace(ENDLESS, max_tokens=1))
    _, order = tested.finish([t.key for t in (*long, *short) if t.key not in done])
    return (done + order)[0] in {t.key for t in long}


def work_is_completed_in_the_order_of_its_submission(tested: EngineUnderTest) -> None:
    """If work is known to reach the engine in order."""
    if not tested.is_ordered:
        return
    engine = tested.engine
    first = [tested.fresh([n, 11]) for n in range(tested.slots)]
    then = [tested.fresh([n, 12]) for n in range(3 * tested.slots)]
    engine.submit(first, tolerance=None, sampling=replace(ENDLESS, max_tokens=60))
    done = {t.key for t in engine.step().finished}
    engine.submit(then, tolerance=None, sampling=replace(ENDLESS, max_tokens=6))
    _, order = tested.finish([t.key for t in (*first, *then) if t.key not in done])
    places = [order.index(t.key) for t in then]
    for earlier in range(len(then)):
        for later in range(earlier + tested.slots, len(then)):
            assert places[earlier] < places[later], places


def other_sampling_holds_for_its_work_only(tested: EngineUnderTest) -> None:
    """Sampling given at submit does not change the engine's own."""
    prompts = [random_prompt(Random(n), 5) for n in range(3)]
    short = replace(GREEDY, max_tokens=5)
    for _ in range(2):
        for answer in tested.generate([tested.fresh(p, limit=9) for p in prompts]):
            assert answer.finish_reason == ended(answer, STOPS, 9)
            tested.check_logprobs(answer)
        answers = tested.generate([tested.fresh(p) for p in prompts], short)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == greedy(tested.model, prompt, 5)
            tested.check_logprobs(answer, temperature=1)
    many = tested.generate([tested.fresh(prompts[0]) for _ in range(8)], ENDLESS)
    assert len({tuple(answer.tokens) for answer in many}) > 1, "it samples, as before"


def what_cannot_be_written_is_refused_and_nothing_is_taken_on(tested: EngineUnderTest) -> None:
    """One bad request refuses its whole batch, as predicted by the engine's limits."""
    engine = tested.engine
    good = tested.fresh([1, 2])
    cases: list[tuple[Trajectory, float | None, Sampling | None]] = [
        (tested.fresh([]), None, None),
        (tested.fresh([1, VOCABULARY]), None, None),
        (tested.fresh([-1]), None, None),
        (tested.fresh([1] * CONTEXT), None, None),
        (tested.fresh([1], limit=0), None, None),
        (tested.fresh([1]), -0.5, None),
        (tested.fresh([1]), None, Sampling(stop_strings=("x",), max_tokens=5)),
    ]
    for bad, tolerance, sampling in cases:
        batch = [good, bad]
        submit = partial(engine.submit, batch, tolerance=tolerance, sampling=sampling)
        # The engines of a pool have their own names.
        names = [limits.engine for limits in engine.request_limits]
        refusals = {_refusal(submit, names=names)}
        for limits in engine.request_limits:
            given = {"tolerance": tolerance, "sampling": sampling, "version": engine.version}
            refusals.add(_refusal(partial(limits.check, batch, **given), names=names))
        assert len(refusals) == 1, refusals
    for limits in engine.request_limits:
        limits.check([good], tolerance=None, sampling=None, version=engine.version)
    assert not engine.step().finished
    assert not engine.interrupt()


def _refusal(call: Callable[[], object], *, names: Sequence[str]) -> str:
    """The error of a call, without the name of the engine."""
    try:
        call()
    except RequestError as error:
        words = str(error)
        for name in names:
            words = words.replace(name, "the engine")
        return words
    raise AssertionError("it must be refused with a RequestError")


def closing_leaves_nothing_behind(tested: EngineUnderTest) -> None:
    """No thread or process remains, even if answers are running."""
    engine = tested.engine
    engine.submit([tested.fresh([n, 13], limit=200) for n in range(3)], tolerance=None)
    engine.step()
    tested.close()


Law = Callable[[EngineUnderTest], None]

LAWS: tuple[Law, ...] = (
    nothing_is_lost_or_doubled_whatever_happens,
    log_probabilities_are_those_of_a_plain_forward_pass,
    a_stop_token_ends_an_answer_and_belongs_to_it,
    a_limit_holds_however_often_an_answer_is_resumed,
    the_context_is_a_limit_too,
    new_weights_write_from_then_on,
    tokens_keep_the_version_that_wrote_them,
    a_prefix_that_old_weights_have_read_is_forgotten,
    no_more_answers_are_written_at_once_than_there_are_slots,
    work_is_completed_in_the_order_of_its_submission,
    other_sampling_holds_for_its_work_only,
    what_cannot_be_written_is_refused_and_nothing_is_taken_on,
    closing_leaves_nothing_behind,
)


def check(law: Law, tested: EngineUnderTest) -> None:
    """Check a law on an idle engine."""
    with suppress(EngineLost):
        tested.engine.interrupt()
    law(tested)
