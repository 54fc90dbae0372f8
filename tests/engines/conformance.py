"""What every engine must do, whichever it is: one law is one function of a world.

A world is an engine with a small model, and the same model on its own to compare with.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

import psutil
import pytest
import torch

from native_worlds import tiny_model
from sortedrl.engines.sampling import Sampling
from sortedrl.errors import EngineLost, RequestError
from sortedrl.models.attention import plain_logprobs
from sortedrl.types import Prompt, Trajectory, Weights

SLOTS, CONTEXT, VOCABULARY = 4, 256, 128
STOPS = (3, 50, 99)
TEMPERATURE = 0.7
USUAL_LIMIT = 12
LONGEST = 24
GREEDY = Sampling(temperature=0, stop_tokens=frozenset())
ENDLESS = Sampling(temperature=TEMPERATURE, stop_tokens=frozenset())
_GONE_SECONDS = 20.0


@cache
def model(seed=0):
    """A model with opinions, in a shape that every engine takes."""
    heads = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    return tiny_model(seed=seed, max_position_embeddings=CONTEXT, **heads)


def limit_of(trajectory):
    """The limit that engines of a world are made with: it stands in the prompt."""
    return trajectory.prompt.fields.get("limit", USUAL_LIMIT)


@dataclass(slots=True, kw_only=True, eq=False)
class World:
    """An engine made by `opening` with `model(0)`, `limit_of`, `STOPS` and `TEMPERATURE`."""

    opening: Callable
    precision: float = 1e-4
    """How far a log-probability may be from that of a plain forward pass."""
    slots: int = SLOTS
    is_ordered: bool = True
    """Whether work reaches it in the order of its submission: not over HTTP, nor as a pool."""
    is_fresh: bool = True
    """Whether a new engine begins with the weights of version 0; a server has its last ones."""
    is_simulated: bool = False
    """Whether there is no model behind it: tokens are numbers, and one limit holds for all."""
    _engine: object = None
    _models: dict = field(default_factory=dict)
    _next_prompt: int = 0
    _before: tuple = ()

    @property
    def engine(self):
        """The engine, idle; a new one if the last was closed."""
        if self._engine is None:
            self._before = (_threads(), _children())
            self._engine = self.opening()
            self._models = {0: model(0)}
            if not self.is_fresh:
                self._engine.load_weights(Weights(0, dict(model(0).state_dict())))
        return self._engine

    @property
    def present(self):
        """The model that the engine has now."""
        return self._models[self.engine.version]

    def hand_over(self):
        """Give the engine the weights of another model."""
        version = self.engine.version + 1
        new = model(version % 3)
        self.engine.load_weights(Weights(version, dict(new.state_dict())))
        assert self.engine.version == version
        self._models[version] = new

    def fresh(self, tokens, *, limit=USUAL_LIMIT):
        """An answer to be written, to a prompt of its own."""
        self._next_prompt += 1
        number = self._next_prompt
        prompt = Prompt(id=number, tokens=tuple(tokens), fields={"limit": limit})
        return Trajectory(prompt=prompt, sample_index=0, group=0, seed=number)

    def finish(self, keys):
        """Step until these are complete: the answers in order, and the order in which they came."""
        done = {}
        while len(done) < len(keys):
            step = self.engine.step()
            assert step.finished or step.decoded_tokens, "an engine with work moves"
            for trajectory in step.finished:
                assert trajectory.key in keys
                assert trajectory.key not in done
                done[trajectory.key] = trajectory
        assert not self.engine.interrupt()
        return [done[key] for key in keys], list(done)

    def written(self, trajectories, *, sampling=None, max_tokens=USUAL_LIMIT):
        """The complete answers, in order."""
        submit(self.engine, trajectories, tolerance=None, sampling=sampling, max_tokens=max_tokens)
        return self.finish([t.key for t in trajectories])[0]

    def assert_true(self, trajectory, *, temperature=TEMPERATURE):
        """Every token has the log-probability that its weights give it on their own."""
        tokens = list(trajectory.prompt.tokens)
        for segment in () if self.is_simulated else trajectory.segments:
            after = len(tokens)
            tokens += segment.tokens
            plain = plain_logprobs(
                self._models[segment.version], tokens, after=after, temperature=temperature
            )
            assert list(segment.logprobs) == pytest.approx(plain.tolist(), abs=self.precision)

    def close(self):
        """Close the engine; nothing of it may be left."""
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        engine.close()
        engine.close()
        threads, children = self._before
        _soon(lambda: _threads() <= threads, "threads are left")
        _soon(lambda: _children() <= children, "processes are left")


def _threads():
    """All threads but those that a process has once for all.

    One watches progress bars, and one hands files to child processes.
    """
    return {
        thread
        for thread in threading.enumerate()
        if type(thread).__name__ != "TMonitor" and "(_serve)" not in thread.name
    }


def _children():
    """All processes below this one but Python's own, which ends with this one."""
    below = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            is_gone = process.status() == psutil.STATUS_ZOMBIE
            if not is_gone and "resource_tracker" not in " ".join(process.cmdline()):
                below.add(process)
    return below


def _soon(is_so, complaint):
    until = time.monotonic() + _GONE_SECONDS
    while not is_so():
        assert time.monotonic() < until, (complaint, _threads(), _children())
        time.sleep(0.05)


@torch.no_grad()
def greedy(own, tokens, count):
    """What a model on its own writes after these tokens if it always takes the likeliest."""
    text = list(tokens)
    for _ in range(count):
        text.append(int(own(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(tokens) :]


def random_prompt(random, length):
    return [random.randrange(VOCABULARY) for _ in range(length)]


# --- the laws -------------------------------------------------------------------------------------


class Caller:
    """Does what a run does with an engine, at random, and keeps books of its own."""

    def __init__(self, world, seed):
        self.world = world
        self.random = Random(seed)
        self.waiting = []
        self.running = {}
        self.done = []
        self.decoded = 0

    def submit(self):
        random = self.random
        new = [
            self.world.fresh(
                random_prompt(random, random.choice((1, 5, 20, 60))),
                limit=random.randint(1, LONGEST),
            )
            for _ in range(random.randint(1, 3))
        ]
        batch, self.waiting = [*self.waiting, *new], []
        self.world.engine.submit(batch, tolerance=None)
        self.running |= {t.key: t for t in batch}

    def step(self):
        for _ in range(self.random.randint(1, 4)):
            step = self.world.engine.step()
            assert step.finished or step.decoded_tokens or not self.running
            self.decoded += step.decoded_tokens
            for trajectory in step.finished:
                self.come_back(trajectory)
                assert trajectory.finish_reason is not None
                if not self.world.is_simulated:
                    reason = ended(trajectory, STOPS, limit_of(trajectory))
                    assert trajectory.finish_reason == reason
                self.done.append(trajectory)

    def interrupt(self):
        stopped = list(self.world.engine.interrupt())
        assert sorted(t.key for t in stopped) == sorted(self.running)
        for trajectory in stopped:
            self.come_back(trajectory)
            assert trajectory.finish_reason is None
        self.waiting += stopped

    def hand_over_idle(self):
        self.interrupt()
        self.world.hand_over()

    def hand_over(self):
        if self.world.is_simulated:
            self.interrupt()
        self.world.hand_over()

    def come_back(self, trajectory):
        """It has all that it had, and more of the present weights."""
        before = self.running.pop(trajectory.key)
        assert trajectory.tokens[: before.num_tokens] == before.tokens
        assert trajectory.logprobs[: before.num_tokens] == before.logprobs
        versions = [s.version for s in trajectory.segments]
        assert versions == sorted(set(versions))
        limit = LONGEST if self.world.is_simulated else limit_of(trajectory)
        assert trajectory.decoded_tokens == trajectory.num_tokens <= limit


def ended(trajectory, stops, limit):
    """Why an answer is complete, by its tokens; `None` if it is not."""
    assert not set(trajectory.tokens[:-1]) & set(stops), "it goes on behind its end"
    if trajectory.tokens[-1] in stops:
        return "stop"
    return "length" if trajectory.num_tokens == limit else None


def nothing_is_lost_or_doubled_whatever_happens(world):
    caller = Caller(world, seed=7)
    acts = ("submit", "step", "step", "step", "interrupt", "hand_over_idle", "hand_over")
    likely = (6, 4, 4, 4, 3, 1, 1)
    for act in caller.random.choices(acts, likely, k=60):
        getattr(caller, act)()
    caller.interrupt()
    caller.submit()
    while caller.running:
        caller.step()
    assert not world.engine.interrupt()
    assert {t.finish_reason for t in caller.done} == {"stop", "length"}
    assert len(caller.done) > 20
    assert len({t.key for t in caller.done}) == len(caller.done)
    assert caller.decoded == sum(t.num_tokens for t in caller.done)
    # A server may complete answers this short before it hears that it should stop.
    if world.is_fresh:
        assert sum(len(t.segments) > 1 for t in caller.done) > 2, "some were written by two models"
    for trajectory in caller.done:
        world.assert_true(trajectory)


def log_probabilities_are_those_of_a_plain_forward_pass(world):
    random = Random(1)
    work = [world.fresh(random_prompt(random, n), limit=30) for n in (1, 2, 40, 33, 12, 150)]
    for trajectory in world.written(work):
        world.assert_true(trajectory)
    for temperature in (1.0, 1.5):
        sampling = Sampling(temperature=temperature)
        for trajectory in world.written(work, sampling=sampling, max_tokens=20):
            world.assert_true(trajectory, temperature=temperature)


def a_stop_token_ends_an_answer_and_belongs_to_it(world):
    prompt = random_prompt(Random(2), 6)
    full = greedy(world.present, prompt, 20)
    stop = next(token for token in full if full.index(token) >= 4)
    place = full.index(stop) + 1
    stopping = replace(GREEDY, stop_tokens=frozenset({stop}))
    for limit, tokens, reason in [
        (20, full[:place], "stop"),
        (place, full[:place], "stop"),
        (place - 1, full[: place - 1], "length"),
    ]:
        (answer,) = world.written([world.fresh(prompt)], sampling=stopping, max_tokens=limit)
        assert (answer.tokens, answer.finish_reason) == (tokens, reason)
    (answer,) = world.written([world.fresh(prompt)], sampling=GREEDY, max_tokens=20)
    assert (answer.tokens, answer.finish_reason) == (full, "length")


def a_limit_holds_however_often_an_answer_is_resumed(world):
    engine = world.engine
    work = [world.fresh([n, n + 1], limit=limit) for n, limit in enumerate((1, 9, 17, 30, 40))]
    limits = {t.key: limit_of(t) for t in work}
    done = {}
    for _ in range(8):
        engine.submit(work, tolerance=None)
        done |= {t.key: t for t in engine.step().finished}
        work = list(engine.interrupt())
    engine.submit(work, tolerance=None)
    done |= {t.key: t for t in world.finish([t.key for t in work])[0]}
    assert done.keys() == limits.keys()
    for trajectory in done.values():
        assert trajectory.finish_reason == ended(trajectory, STOPS, limits[trajectory.key])
        world.assert_true(trajectory)
    engine.submit(list(done.values()), tolerance=None)
    missing = dict(done)
    while missing:
        step = engine.step()
        assert step.decoded_tokens == 0, "what comes complete is complete at once"
        for trajectory in step.finished:
            assert trajectory == missing.pop(trajectory.key)


def the_context_is_a_limit_too(world):
    prompt = random_prompt(Random(3), CONTEXT - 5)
    (answer,) = world.written([world.fresh(prompt)], sampling=ENDLESS, max_tokens=50)
    assert (answer.num_tokens, answer.finish_reason) == (5, "length")
    world.assert_true(answer)


def new_weights_write_from_then_on(world):
    prompt = random_prompt(Random(4), 7)
    engine = world.engine
    for _ in range(2):
        before = greedy(world.present, prompt, 12)
        (answer,) = world.written([world.fresh(prompt)], sampling=GREEDY)
        assert answer.tokens == before
        world.hand_over()
        after = greedy(world.present, prompt, 12)
        assert after != before, "else nothing can be seen"
        (answer,) = world.written([world.fresh(prompt)], sampling=GREEDY)
        assert answer.tokens == after
        assert {s.version for s in answer.segments} == {engine.version}


def tokens_keep_the_version_that_wrote_them(world):
    engine, limit = world.engine, 90
    for _ in range(5):
        old = engine.version
        work = [world.fresh([n, 7]) for n in range(world.slots)]
        engine.submit_with(work, tolerance=None, sampling=ENDLESS, max_tokens=limit)
        done = list(engine.step().finished)
        stopped = {t.key: t for t in (*engine.interrupt(), *done)}
        world.hand_over()
        answers = world.written(list(stopped.values()), sampling=ENDLESS, max_tokens=limit)
        for answer in answers:
            before = stopped[answer.key].num_tokens
            assert answer.tokens[:before] == stopped[answer.key].tokens
            parts = [(old, before), (old + 1, limit - before)]
            found = [(segment.version, len(segment.tokens)) for segment in answer.segments]
            assert found == [part for part in parts if part[1]]
            world.assert_true(answer)
        if any(len(answer.segments) == 2 for answer in answers):
            return
    pytest.fail("no answer was ever met in the middle")


def a_prefix_that_old_weights_have_read_is_forgotten(world):
    # Longer than any engine's block, so that it is cached as soon as anything is.
    prompt = random_prompt(Random(5), 200)
    for _ in range(3):
        for _ in range(2):
            (answer,) = world.written([world.fresh(prompt)])
            world.assert_true(answer)
        world.hand_over()


def no_more_answers_are_written_at_once_than_there_are_slots(world):
    engine = world.engine
    assert engine.slots == world.slots
    long = [world.fresh([n, 9]) for n in range(world.slots)]
    short = [world.fresh([n, 10]) for n in range(3)]
    engine.submit_with(long, tolerance=None, sampling=ENDLESS, max_tokens=120)
    decoded, done = 0, []
    while decoded < 4 * world.slots:
        step = engine.step()
        decoded, done = decoded + step.decoded_tokens, [*done, *(t.key for t in step.finished)]
    engine.submit_with(short, tolerance=None, sampling=ENDLESS, max_tokens=1)
    _, order = world.finish([t.key for t in (*long, *short) if t.key not in done])
    first = (done + order)[0]
    assert first in {t.key for t in long}, "a short one found a slot that is not there"


def work_is_completed_in_the_order_of_its_submission(world):
    if not world.is_ordered:
        pytest.skip("it cannot be told apart from here in which order work reached it")
    engine = world.engine
    first = [world.fresh([n, 11]) for n in range(world.slots)]
    then = [world.fresh([n, 12]) for n in range(3 * world.slots)]
    engine.submit_with(first, tolerance=None, sampling=ENDLESS, max_tokens=60)
    done = {t.key for t in engine.step().finished}
    engine.submit_with(then, tolerance=None, sampling=ENDLESS, max_tokens=6)
    _, order = world.finish([t.key for t in (*first, *then) if t.key not in done])
    places = [order.index(t.key) for t in then]
    for earlier in range(len(then)):
        for later in range(earlier + world.slots, len(then)):
            assert places[earlier] < places[later], places


def other_sampling_holds_for_its_work_only(world):
    prompts = [random_prompt(Random(n), 5) for n in range(3)]
    for _ in range(2):
        for answer in world.written([world.fresh(p, limit=9) for p in prompts]):
            assert answer.finish_reason == ended(answer, STOPS, 9)
            world.assert_true(answer)
        guests = world.written([world.fresh(p) for p in prompts], sampling=GREEDY, max_tokens=5)
        for prompt, answer in zip(prompts, guests, strict=True):
            assert answer.tokens == greedy(world.present, prompt, 5)
            world.assert_true(answer, temperature=1)
    many = world.written([world.fresh(prompts[0]) for _ in range(8)], sampling=ENDLESS)
    assert len({tuple(answer.tokens) for answer in many}) > 1, "it draws, as before"


def what_cannot_be_written_is_refused_and_nothing_is_taken_on(world):
    engine = world.engine
    good = world.fresh([1, 2])
    usual = {"tolerance": None, "sampling": None, "max_tokens": None}
    for bad, changes in [
        (world.fresh([]), {}),
        (world.fresh([1, VOCABULARY]), {}),
        (world.fresh([-1]), {}),
        (world.fresh([1] * CONTEXT), {}),
        (world.fresh([1], limit=0), {}),
        (world.fresh([1]), {"tolerance": -0.5}),
        (world.fresh([1]), {"sampling": Sampling(stop_strings=("x",)), "max_tokens": 5}),
        (world.fresh([1]), {"sampling": GREEDY, "max_tokens": 0}),
    ]:
        terms = usual | changes
        with pytest.raises(RequestError) as checked:
            engine.check([good, bad], **terms)
        with pytest.raises(RequestError) as submitted:
            submit(engine, [good, bad], **terms)
        assert str(checked.value) == str(submitted.value)
    engine.check([good], **usual)
    assert not engine.step().finished
    assert not engine.interrupt()


def submit(engine, trajectories, *, tolerance, sampling, max_tokens):
    if sampling is None:
        engine.submit(trajectories, tolerance=tolerance)
    else:
        engine.submit_with(
            trajectories, tolerance=tolerance, sampling=sampling, max_tokens=max_tokens
        )


def closing_leaves_nothing_behind(world):
    engine = world.engine
    engine.submit([world.fresh([n, 13], limit=200) for n in range(3)], tolerance=None)
    engine.step()
    world.close()


LAWS = (
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

each_law = pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)


def holds(law, world):
    """Try a law on an idle engine."""
    with suppress(EngineLost):
        world.engine.interrupt()
    law(world)
