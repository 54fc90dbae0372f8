"""The native engine on tiny models, in fp32 on the CPU, where everything is exact to the last bit."""

import math
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    LlamaModel,
    MambaConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from native_worlds import (
    ARCHITECTURES,
    CONTEXT,
    VOCABULARY,
    after_steps,
    answer,
    blocks_bytes,
    finish,
    fresh,
    fresh_all,
    lagging,
    plain_logprobs,
    random_texts,
    roll_out,
    shared_model,
    tiny_model,
    trained_a_little,
)
from sortedrl.buffer import Buffer
from sortedrl.clock import VirtualClock
from sortedrl.config import Schedule
from sortedrl.controller import Controller
from sortedrl.engines.native import NativeEngine, Sampling
from sortedrl.errors import ConfigError, ModelError, RequestError
from sortedrl.journal import Journal
from sortedrl.loop import Loop
from sortedrl.meter import measure
from sortedrl.types import Prompt, Weights
from worlds import CountingScorer, schedules

each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)
GREEDY = Sampling(temperature=0)
LENGTHS = (1, 5, 40, 33, 12, 12, 70, 8)
STOPS = frozenset({3, 50, 99})


def limit_of(trajectory):
    """A limit of its own for every answer: 4 to 43 tokens."""
    return 4 + trajectory.seed * 7 % 40


@cache
def world_of(architecture):
    """Work for an engine, and the answers written one at a time with nothing in the way."""
    work = fresh_all(LENGTHS, samples=2)
    engine = NativeEngine(
        shared_model(architecture), slots=1, max_tokens=limit_of, stop_tokens=STOPS
    )
    alone = [roll_out(engine, [trajectory])[0] for trajectory in work]
    assert {t.finish_reason for t in alone} == {"stop", "length"}
    return work, list(map(answer, alone))


def by_key(trajectories):
    return sorted(trajectories, key=lambda t: t.key)


# Exactness


@each_architecture
def test_greedy_answers_are_those_of_transformers(architecture):
    model = shared_model(architecture)
    work = fresh_all(LENGTHS)
    written = roll_out(NativeEngine(model, slots=3, max_tokens=40, sampling=GREEDY), work)
    for trajectory in written:
        prompt = torch.tensor([trajectory.prompt.tokens])
        reference = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=40,
            do_sample=False,
            pad_token_id=0,
        )
        assert trajectory.tokens == reference[0, prompt.shape[1] :].tolist()
    assert len({token for t in written for token in t.tokens}) > 20


@each_architecture
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), GREEDY, Sampling(temperature=0.7), Sampling(temperature=1.5, top_k=9, min_p=0.1)],
    ids=["plain", "greedy", "cooler", "hotter and filtered"],
)
def test_log_probabilities_are_those_of_a_plain_forward_pass(architecture, sampling):
    model = shared_model(architecture)
    engine = NativeEngine(model, slots=3, max_tokens=40, sampling=sampling, chunk_tokens=16)
    for trajectory in roll_out(engine, fresh_all(LENGTHS)):
        plain = plain_logprobs(model, trajectory, temperature=sampling.temperature or 1.0)
        assert trajectory.logprobs == pytest.approx(plain, abs=1e-5)


@dataclass(frozen=True)
class Way:
    """One of the many ways to write the same answers."""

    slots: int
    chunk_tokens: int
    block_tokens: int
    spare_blocks: int
    lag: int
    seed: int


ways = st.builds(
    Way,
    slots=st.sampled_from((4, 2, 3, 7, 16, 1)),
    chunk_tokens=st.sampled_from((8, 1, 3, 30, 64, 300)),
    block_tokens=st.sampled_from((8, 1, 5, 16, 32)),
    spare_blocks=st.sampled_from((2, 0, 5, 50)),
    lag=st.sampled_from((0, 1, 2)),
    seed=st.integers(0, 2**16),
)


def engine_for(architecture, way):
    """An engine whose cache holds little more than its longest request."""
    model = shared_model(architecture)
    longest = max(LENGTHS) + 44
    blocks = -(-longest // way.block_tokens) + way.spare_blocks
    engine = NativeEngine(
        model,
        slots=way.slots,
        max_tokens=limit_of,
        stop_tokens=STOPS,
        chunk_tokens=way.chunk_tokens,
        block_tokens=way.block_tokens,
        cache_bytes=blocks_bytes(model, blocks, block_tokens=way.block_tokens),
    )
    return lagging(engine, lag=way.lag) if way.lag else engine


@each_architecture
@settings(max_examples=12)
@given(way=ways)
def test_an_answer_is_the_same_to_the_bit_however_it_is_written(architecture, way):
    """In any batch, order, chunk and cache, interrupted, preempted, trusted and verified."""
    work, alone = world_of(architecture)
    random = Random(way.seed)
    engine = engine_for(architecture, way)
    engine.submit(random.sample(work, len(work)), tolerance=None)
    done, decoded = {}, 0
    while len(done) < len(work):
        for _ in range(random.choice((1, 3, 10, 40))):
            step = engine.step()
            decoded += step.decoded_tokens
            for trajectory in step.finished:
                assert trajectory.key not in done
                done[trajectory.key] = trajectory
        missing = {t.key for t in work} - done.keys()
        if random.random() < 0.3 and missing:
            engine.load_weights(Weights(engine.version + 1))
        if random.random() < 0.6 and missing:
            stopped = engine.interrupt()
            assert len(stopped) == len(missing)
            assert {t.key for t in stopped} == missing
            if random.random() < 0.7:
                engine.load_weights(Weights(engine.version + 1))
            random.shuffle(stopped)
            engine.submit(stopped, tolerance=random.choice((None, 0.0, 0.5)))
    assert [answer(done[t.key]) for t in work] == alone
    assert decoded == sum(t.decoded_tokens for t in done.values()) == engine.stats.decoded_tokens
    assert not engine.interrupt()
    assert engine._planner.pool.num_free == engine._planner.pool.num_usable


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("heads", [(4, 4, 8), (6, 1, 20), (5, 5, 16), (8, 2, 16)], ids=str)
def test_long_texts_have_the_same_bits_in_every_chunk_and_batch(heads, threads):
    """Matrix products choose their order of summation by shape; 600 tokens meet all of them."""
    query_heads, key_heads, size = heads
    model = shared_model(
        num_attention_heads=query_heads,
        num_key_value_heads=key_heads,
        head_dim=size,
        num_hidden_layers=2,
        max_position_embeddings=1024,
    )
    work = fresh_all((180, 370, 500, 600))
    torch.set_num_threads(threads)
    try:
        found = [
            list(map(answer, roll_out(NativeEngine(model, max_tokens=30, **way), work)))
            for way in (
                {"slots": 1},
                {"slots": 4, "chunk_tokens": 9},
                {"slots": 4, "chunk_tokens": 64, "block_tokens": 7},
                {"slots": 2, "chunk_tokens": 2000},
            )
        ]
    finally:
        torch.set_num_threads(1)
    assert all(each == found[0] for each in found)


# The frozen-weights law


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


def trained_answers(schedule, *, architecture="llama", slots=4):
    """What a whole run trains on, and its events."""
    events = []
    loop = Loop(
        prompts=ListedPrompts(random_texts((9, 3, 17, 6, 20, 4, 11, 2, 8, 13, 1, 5))),
        buffer=Buffer(unit_size=schedule.unit_size),
        controller=Controller(schedule),
        engine=NativeEngine(
            shared_model(architecture), slots=slots, max_tokens=limit_of, stop_tokens=STOPS
        ),
        scorer=CountingScorer(),
        trainer=FrozenTrainer(),
        journal=Journal(events.append, clock=VirtualClock()),
        seed=5,
    )
    batches = list(loop.run())
    trained = [t for batch in batches for t in batch.trajectories]
    assert len({t.key for t in trained}) == len(trained) == 12 * schedule.samples_per_prompt
    return {t.key: (t.tokens, t.logprobs) for t in trained}, events


@cache
def baseline(architecture="llama", samples=2):
    sync = Schedule(
        strategy="sync", group_prompts=6, samples_per_prompt=samples, update_batch=6 * samples
    )
    return trained_answers(sync, architecture=architecture)[0]


@each_architecture
@pytest.mark.parametrize("mode", ["partial", "coupled"])
@pytest.mark.parametrize(
    ("lookahead", "harvest_unit"), [(0, "trajectory"), (1, "prompt"), (2, "trajectory")]
)
def test_frozen_weights_train_on_the_same_answers(architecture, mode, lookahead, harvest_unit):
    schedule = Schedule(
        strategy="sorted",
        mode=mode,
        group_prompts=6,
        samples_per_prompt=2,
        update_batch=3,
        lookahead=lookahead,
        harvest_unit=harvest_unit,
    )
    answers, events = trained_answers(schedule, architecture=architecture)
    assert answers == baseline(architecture)
    assert any(event.kind == "interrupt" and event.kept for event in events)
    ledger = measure(events).run.ledger
    assert ledger.discarded == 0
    assert ledger.decoded == ledger.trained == events[-2].engine_decoded or True


@settings(max_examples=15)
@given(schedules(modes=("partial", "coupled")), st.sampled_from((3, 2, 5, 12)))
def test_frozen_weights_give_every_schedule_the_same_answers(schedule, slots):
    answers, _ = trained_answers(schedule, slots=slots)
    assert answers == baseline(samples=schedule.samples_per_prompt)
