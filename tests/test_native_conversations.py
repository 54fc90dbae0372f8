"""Conversations in the real engine and trainer: exact to the bit, in every mode."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from native_worlds import (
    ARCHITECTURES,
    CONTEXT,
    finish,
    fresh,
    fresh_all,
    lagging,
    random_texts,
    shared_model,
    tiny_model,
    trained_a_little,
)
from sortedrl.config.schedule import Schedule
from sortedrl.core.buffer import Buffer
from sortedrl.core.clock import VirtualClock
from sortedrl.core.controller import Controller
from sortedrl.core.loop import Loop
from sortedrl.core.meter import measure
from sortedrl.core.randomness import mix
from sortedrl.core.recorder import Journal
from sortedrl.engines.conformance import logprob_gap
from sortedrl.engines.native import NativeEngine, Sampling
from sortedrl.engines.native.kv_cache import EMPTY_PREFIX, BlockPool, Prefix
from sortedrl.training.batch import TokenSequence
from sortedrl.training.forward import PackedModel
from sortedrl.types import Prompt, Segment, Weights
from worlds import CountingScorer

each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)
STOPS = frozenset(range(12))
MAX_TOKENS = 40
PROMPTS = (9, 3, 17, 6, 20, 4, 11, 2, 8, 13, 1, 5)


class Echo:
    """Environments that answer at once, by a checksum of everything that was said.

    A reply may hold stop tokens, also as its last one: templates do.
    """

    def __init__(self, limit=None):
        self.limit = limit
        self._answered = {}

    def submit(self, trajectory):
        said = mix(*trajectory.response, len(trajectory.prompt.tokens))
        if trajectory.num_turns > 1 + said % 4:
            replied = replace(trajectory, finish_reason="stop")
        else:
            replied = replace(trajectory, given=[mix(said, k) % 128 for k in range(1 + said % 9)])
        self._answered[trajectory.key] = replied

    def cancel(self, trajectory):
        self._answered.pop(trajectory.key, None)

    def collect(self, *, wait):
        answered, self._answered = self._answered, {}
        return list(answered.values())


class ListedPrompts:
    """Prompts out of a list."""

    def __init__(self, texts):
        self._left = [Prompt(id=n, tokens=tuple(text)) for n, text in enumerate(texts)]

    @property
    def is_exhausted(self):
        return not self._left

    def take(self, count):
        taken, self._left = self._left[:count], self._left[count:]
        return taken


class FrozenTrainer:
    """Counts versions: a learning rate of 0."""

    version = 0

    def update(self, batch):
        self.version += 1

    def weights(self):
        return Weights(self.version)


class LearningTrainer(FrozenTrainer):
    """Changes the weights a little with every update."""

    def __init__(self, model):
        self._model = model

    def update(self, batch):
        self.version += 1
        trained_a_little(self._model, learning_rate=1e-3, seed=self.version)

    def weights(self):
        return Weights(self.version)


def engine_of(model, **changes):
    options = {"slots": 4, "max_tokens": MAX_TOKENS, "stop_tokens": STOPS}
    return NativeEngine(model, **(options | changes))


def converse(engine, trajectories, *, tolerance=None):
    """Whole conversations, in order."""
    crew, open_turns, done = Echo(), list(trajectories), {}
    while open_turns:
        engine.submit(open_turns, tolerance=tolerance)
        turns = finish(engine, [t.key for t in open_turns]).values()
        for turn in turns:
            if turn.finish_reason == "length":
                done[turn.key] = turn
            else:
                crew.submit(replace(turn, finish_reason=None))
        replies = crew.collect(wait=True)
        done |= {t.key: t for t in replies if t.finish_reason}
        open_turns = [t for t in replies if not t.finish_reason]
    return [done[t.key] for t in trajectories]


def said(trajectory):
    return trajectory.response, trajectory.loss_mask, trajectory.finish_reason


def run_of(schedule, *, model=None, trainer=None, environments=None):
    """What a run trains on, by key; every token is accounted for."""
    events = []
    loop = Loop(
        prompts=ListedPrompts(random_texts(PROMPTS)),
        buffer=Buffer(unit_size=schedule.unit_size),
        controller=Controller(schedule),
        engine=engine_of(shared_model() if model is None else model),
        scorer=CountingScorer(),
        trainer=FrozenTrainer() if trainer is None else trainer,
        journal=Journal(events.append, clock=VirtualClock()),
        seed=5,
        environments=Echo() if environments is None else environments,
    )
    batches = list(loop.run())
    trained = [t for batch in batches for t in batch.trajectories]
    assert len({t.key for t in trained}) == len(trained) == 12 * schedule.samples_per_prompt
    ledger = measure(events).run.ledger
    assert ledger.decoded == ledger.trained + ledger.discarded == loop.journal.engine_decoded
    return batches, {t.key: t for t in trained}


def sorted_schedule(mode, **changes):
    options = {"group_prompts": 6, "samples_per_prompt": 2, "update_batch": 3, "lookahead": 1}
    if mode == "redraw":
        options["lookahead"] = 0
    return Schedule(strategy="sorted", mode=mode, **(options | changes))


@cache
def synchronous():
    schedule = Schedule(
        strategy="sync", group_prompts=6, samples_per_prompt=2, update_batch=12, mode="on_policy"
    )
    return run_of(schedule)[1]


@each_architecture
@pytest.mark.parametrize("lag", [0, 2])
def test_log_probabilities_over_a_conversation_equal_a_plain_forward_pass(architecture, lag):
    model = shared_model(architecture)
    engine = engine_of(model)
    engine = lagging(engine, lag=lag) if lag else engine
    conversations = converse(engine, fresh_all(PROMPTS))
    assert sum(t.num_turns > 2 for t in conversations) >= 3
    for conversation in conversations:
        assert logprob_gap(conversation, {0: model}, temperature=1.0) < 1e-4
        assert len(conversation.logprobs) == sum(conversation.loss_mask)
        assert not conversation.given
        for segment in conversation.segments[:-1]:
            assert segment.tokens[-1] in STOPS


@each_architecture
def test_the_trainer_reads_all_of_a_conversation_and_scores_what_was_written(architecture):
    model = shared_model(architecture)
    conversations = converse(engine_of(model), fresh_all(PROMPTS))
    packed = PackedModel(model)
    found = packed.logprobs([TokenSequence.of(t) for t in conversations]).logprobs_T
    sampled = torch.tensor([value for t in conversations for value in t.logprobs])
    assert torch.allclose(found, sampled, atol=1e-4)
    everything = [TokenSequence(t.prompt.tokens, t.response) for t in conversations]
    written = torch.tensor([bit for t in conversations for bit in t.loss_mask]).bool()
    assert torch.allclose(packed.logprobs(everything).logprobs_T[written], found, atol=1e-5)


@pytest.mark.parametrize("mode", ["partial", "coupled", "redraw"])
@pytest.mark.parametrize("limit", [None, 5])
def test_with_frozen_weights_every_mode_trains_on_the_same_conversations(mode, limit):
    _, trained = run_of(sorted_schedule(mode), environments=Echo(limit))
    expected = synchronous()
    assert any(t.interruptions for t in trained.values())
    for key, conversation in trained.items():
        assert said(conversation) == said(expected[key])
        assert conversation.logprobs == pytest.approx(expected[key].logprobs, abs=1e-5)


def test_while_weights_change_coupled_mode_trains_on_conversations_of_the_present_weights():
    model = tiny_model()
    batches, _ = run_of(sorted_schedule("coupled"), model=model, trainer=LearningTrainer(model))
    ages = {b.version - s.version for b in batches for t in b.trajectories for s in t.segments}
    assert ages == {0}


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("learning_rate", [3e-4, 3e-3, 3e-2])
def test_a_verified_conversation_is_the_one_that_new_weights_would_have_had(learning_rate, lag):
    old, new = shared_model(), trained_a_little(tiny_model(), learning_rate=learning_rate)
    before = converse(engine_of(old), fresh_all(PROMPTS, samples=2))
    expected = converse(engine_of(new, version=1), fresh_all(PROMPTS, samples=2))
    again = [replace(t, finish_reason=None) for t in before]
    engine = engine_of(new, version=1)
    engine = lagging(engine, lag=lag) if lag else engine
    verified = converse(engine, again, tolerance=0.0)
    assert [said(t) for t in verified] == [said(t) for t in expected]
    for one, other in zip(verified, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert {s.version for s in one.segments} == {1}
        assert one.num_turns == other.num_turns
    changed = sum(said(a) != said(b) for a, b in zip(before, expected, strict=True))
    assert changed > 0


class Slow(Echo):
    """Answers one conversation at a time, the one that waited longest."""

    def collect(self, *, wait):
        if not self._answered:
            return []
        key = next(iter(self._answered))
        return [self._answered.pop(key)]


def held(monkeypatch, kind):
    """The same run with a cache that is kept while there is room, that is small, and with none."""
    size, options = 8, {}
    if kind == "small":
        token_bytes = engine_of(shared_model()).cache.token_bytes
        options["cache_bytes"] = 200 * token_bytes
    with monkeypatch.context() as patch:
        engine = engine_of(shared_model(), block_tokens=size, **options)
        if kind == "none":
            empty = Prefix((), EMPTY_PREFIX)
            patch.setattr(BlockPool, "match_prefix", lambda *args, **limit: empty)
        events = []
        loop = Loop(
            prompts=ListedPrompts(random_texts(PROMPTS)),
            buffer=Buffer(unit_size=1),
            controller=Controller(Schedule(strategy="sync", group_prompts=12, update_batch=12)),
            engine=engine,
            scorer=CountingScorer(),
            trainer=FrozenTrainer(),
            journal=Journal(events.append, clock=VirtualClock()),
            seed=5,
            environments=Slow(),
        )
        trained = [t for batch in loop.run() for t in batch.trajectories]
    return {t.key: t for t in trained}, engine


def test_the_cache_of_conversations_outside_saves_prefill_and_changes_nothing(monkeypatch):
    none, without = held(monkeypatch, "none")
    for kind in ("ample", "small"):
        kept, engine = held(monkeypatch, kind)
        assert kept.keys() == none.keys()
        for key, conversation in kept.items():
            assert said(conversation) == said(none[key])
            assert conversation.logprobs == pytest.approx(none[key].logprobs, abs=1e-5)
        saved = 1 - engine.stats.prefilled_tokens / without.stats.prefilled_tokens
        # Full blocks are found again; of a small cache the oldest ones were given away.
        assert saved > (0.5 if kind == "ample" else 0.1)


def test_the_cache_of_the_conversation_longest_outside_is_given_away_first():
    pool = BlockPool(7, block_tokens=2)
    pool.keeps_cached = True
    first, second = pool.allocate(2, near=1), pool.allocate(2, near=3)
    for blocks, tokens in ((first, (1, 2, 3, 4)), (second, (5, 6, 7, 8))):
        parent = pool.cache_block(blocks[0], parent=EMPTY_PREFIX, tokens=tokens[:2])
        pool.cache_block(blocks[1], parent=parent, tokens=tokens[2:])
        pool.release(blocks)
    assert pool.allocate(2, near=second[0]) == [5, 6]
    assert set(pool.allocate(2, near=second[0])) == set(first)
    assert len(pool.match_prefix((5, 6, 7, 8), limit=4).blocks) == 2
    assert not pool.match_prefix((1, 2, 3, 4), limit=4).blocks


def spoken(*segments, given=()):
    return replace(fresh([5, 6, 7]), segments=segments, given=given)


def verify(trajectory, *, tolerance=0.0):
    """One turn of greedy decoding that begins with verification."""
    engine = engine_of(shared_model(), version=1, sampling=Sampling(temperature=0), max_tokens=9)
    engine.submit([trajectory], tolerance=tolerance)
    return finish(engine, [trajectory.key])[trajectory.key]


@cache
def greedy(*tokens):
    """What the model writes after these tokens."""
    logits = shared_model()(torch.tensor([tokens])).logits[0, -1]
    return int(logits.argmax())


def right_turn(tokens, count):
    turn = []
    for _ in range(count):
        turn.append(greedy(*tokens, *turn))
    return tuple(turn)


def test_a_mismatch_at_the_first_token_of_a_turn_keeps_the_reply_before_it():
    first = right_turn((5, 6, 7), 2)
    given = (20, 21, 22)
    right = greedy(5, 6, 7, *first, *given)
    wrong = (right + 1) % 128
    trajectory = spoken(
        Segment(first, (-0.1,) * 2, 0), Segment((wrong, 9), (-0.1,) * 2, 0, given), given=(30,)
    )
    verified = verify(trajectory)
    assert verified.segments[0].tokens == first
    assert verified.segments[1].given == given
    assert verified.segments[1].tokens[0] == right
    assert len(verified.segments) == 2
    assert not verified.given


def test_a_mismatch_in_a_turn_drops_later_turns_and_replies():
    first = right_turn((5, 6, 7), 2)
    wrong = (greedy(5, 6, 7, first[0]) + 1) % 128
    trajectory = spoken(
        Segment((first[0], wrong), (-0.1,) * 2, 0),
        Segment((40, 41), (-0.1,) * 2, 0, (20, 21)),
        given=(30, 31),
    )
    verified = verify(trajectory)
    assert verified.tokens[:2] == list(first)
    assert verified.num_given == 0
    assert len(verified.segments) == 1


def test_a_turn_that_stands_keeps_its_unanswered_reply():
    first = right_turn((5, 6, 7), 2)
    verified = verify(spoken(Segment(first, (-0.1,) * 2, 0), given=(20, 1)))
    assert verified.segments[0].tokens == first
    assert verified.segments[1].given == (20, 1)
    assert verified.segments[1].tokens[0] == greedy(5, 6, 7, *first, 20, 1)
    assert {s.version for s in verified.segments} == {1}


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("tolerance", [None, 0.0])
def test_a_conversation_interrupted_before_its_next_token_keeps_the_reply(version, tolerance):
    first = right_turn((5, 6, 7), 2)
    trajectory = spoken(Segment(first, (-0.1,) * 2, version), given=(20, 21))
    engine = engine_of(shared_model(), version=1)
    engine.submit([trajectory], tolerance=tolerance)
    (stopped,) = engine.interrupt()
    assert said(stopped) == said(trajectory)
    assert stopped.given == (20, 21)
    assert stopped.num_turns == 2


def test_weights_loaded_in_the_middle_of_a_turn_keep_the_reply_once():
    engine = engine_of(shared_model(), stop_tokens=(), max_tokens=12)
    trajectory = spoken(Segment((40, 41), (-0.1,) * 2, 0), given=(20, 21))
    engine.submit([trajectory], tolerance=None)
    engine.step()
    engine.step()
    engine.load_weights(Weights(1))
    done = finish(engine, [trajectory.key])[trajectory.key]
    assert [s.given for s in done.segments if s.given] == [(20, 21)]
    assert done.num_tokens == 12
    assert {s.version for s in done.segments} == {0, 1}


def test_a_reply_that_fills_the_context_ends_the_conversation():
    engine = engine_of(shared_model(), max_tokens=CONTEXT)
    trajectory = spoken(Segment((40, 41), (-0.1,) * 2, 0), given=tuple([20] * CONTEXT))
    engine.submit([trajectory], tolerance=None)
    done = finish(engine, [trajectory.key])[trajectory.key]
    assert (done.finish_reason, done.tokens, done.given) == ("length", [40, 41], ())
    almost = replace(trajectory, given=tuple([20] * (CONTEXT - 5 - 3)))
    engine = engine_of(shared_model(), max_tokens=CONTEXT, stop_tokens=())
    engine.submit([almost], tolerance=None)
    done = finish(engine, [trajectory.key])[trajectory.key]
    assert (done.finish_reason, done.num_tokens) == ("length", 5)


def test_the_token_limit_counts_what_the_policy_writes():
    engine = engine_of(shared_model(), max_tokens=10, stop_tokens=())
    trajectory = spoken(Segment((40, 41), (-0.1,) * 2, 0), given=tuple([20] * 50))
    engine.submit([trajectory], tolerance=None)
    done = finish(engine, [trajectory.key])[trajectory.key]
    assert (done.finish_reason, done.num_tokens, done.num_given) == ("length", 10, 50)


def test_the_next_turn_finds_its_conversation_in_the_cache():
    engine = engine_of(shared_model(), block_tokens=4)
    (turn,) = [*finish_one(engine, fresh(range(20, 60)))]
    engine.reset_stats()
    engine.submit([replace(turn, finish_reason=None, given=(20, 21))], tolerance=None)
    finish(engine, [turn.key])
    assert engine.stats.prefilled_tokens < 12


def finish_one(engine, trajectory):
    engine.submit([trajectory], tolerance=None)
    return finish(engine, [trajectory.key]).values()


def test_scores_are_those_of_written_tokens():
    conversations = converse(engine_of(shared_model()), fresh_all(PROMPTS))
    for conversation, scores in zip(
        conversations, engine_of(shared_model()).score(conversations), strict=True
    ):
        assert scores.logprobs == pytest.approx(conversation.logprobs, abs=1e-4)
