"""The native engine on tiny models, in fp32 on the CPU, where everything is exact to the bit."""

import math
import subprocess
import sys
import weakref
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaModel,
    MambaConfig,
    NemotronConfig,
    PreTrainedTokenizerFast,
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
    plain_logits,
    plain_logprobs,
    random_texts,
    roll_out,
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
from sortedrl.engines.native import NativeEngine, Sampling
from sortedrl.engines.native.cpu_runner import attention_padding
from sortedrl.engines.native.sampler import gumbel, row_keys, stream
from sortedrl.errors import ConfigError, EngineError, ModelError, RequestError
from sortedrl.types import Prompt, Step, Weights
from worlds import CountingScorer, schedules

each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)
GREEDY = Sampling(temperature=0)
LENGTHS = (1, 5, 40, 33, 12, 12, 70, 8)
STOPS = frozenset({3, 50, 99})


def limit_of(trajectory):
    """A limit of its own for every answer: 4 to 27 tokens."""
    return 4 + mix(trajectory.seed) % 24


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


@each_architecture
def test_greedy_answers_are_those_of_transformers(architecture):
    model = shared_model(architecture)
    work = fresh_all(LENGTHS)
    written = roll_out(NativeEngine(model, slots=3, max_tokens=24, sampling=GREEDY), work)
    for trajectory in written:
        prompt = torch.tensor([trajectory.prompt.tokens])
        reference = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=24,
            do_sample=False,
            pad_token_id=0,
        )
        assert trajectory.tokens == reference[0, prompt.shape[1] :].tolist()
    assert len({token for t in written for token in t.tokens}) > 10


@each_architecture
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), GREEDY, Sampling(temperature=0.7), Sampling(temperature=1.5, top_k=9, min_p=0.1)],
    ids=["plain", "greedy", "cooler", "hotter and filtered"],
)
def test_log_probabilities_are_those_of_a_plain_forward_pass(architecture, sampling):
    model = shared_model(architecture)
    engine = NativeEngine(model, slots=3, max_tokens=24, sampling=sampling, chunk_tokens=16)
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
    longest = max(LENGTHS) + 28
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
@settings(max_examples=3)
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


@each_architecture
@pytest.mark.parametrize("lag", [0, 1])
def test_a_full_cache_preempts_and_changes_no_answer(architecture, lag):
    work, alone = world_of(architecture)
    way = Way(slots=8, chunk_tokens=64, block_tokens=4, spare_blocks=2, lag=lag, seed=0)
    engine = engine_for(architecture, way)
    assert list(map(answer, roll_out(engine, work))) == alone
    assert engine._planner.num_preemptions > 0


@pytest.mark.parametrize(
    ("heads", "threads"),
    [
        ((4, 4, 8), 1),
        ((6, 1, 20), 1),
        ((3, 3, 16), 1),
        ((8, 2, 16), 1),
        ((6, 2, 8), 2),
        ((3, 1, 128), 1),
        ((1, 1, 256), 1),
    ],
    ids=str,
)
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
    ways = (
        {"slots": 1},
        {"slots": 4, "chunk_tokens": 60},
        {"slots": 4, "chunk_tokens": 99, "block_tokens": 7},
        {"slots": 2, "chunk_tokens": 2000},
    )
    torch.set_num_threads(threads)
    try:
        engines = [NativeEngine(model, max_tokens=20 // threads**2, **way) for way in ways]
        found = [list(map(answer, roll_out(engine, work))) for engine in engines]
    finally:
        torch.set_num_threads(1)
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_16_bits_answers_have_the_same_bits_in_every_batch(dtype):
    """Products of 16-bit weights are the ones that a processor sums by the number of rows."""
    model = tiny_model(hidden_size=576, intermediate_size=1536, num_hidden_layers=1).to(dtype)
    work = fresh_all((5, 12, 30, 46, 90, 20, 9, 70))
    ways = ({"slots": 1}, {"slots": 3, "chunk_tokens": 24}, {"slots": 8, "chunk_tokens": 200})
    engines = [NativeEngine(model, max_tokens=6, **way) for way in ways]
    found = [list(map(answer, roll_out(engine, work))) for engine in engines]
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("dim", [8, 64, 96, 256])
def test_attention_gives_a_row_the_same_bits_at_all_shapes_that_are_padded_to(dim):
    padding = attention_padding(dim, torch.float32)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 1040, dim, generator=generator) for _ in range(3))
    random = Random(dim)

    def row(place, *, after, keys):
        """The answer to one query among those after it, over so many keys or some more."""
        count = after + -after % padding.query_multiple
        length = padding.padded_keys(keys)
        mask = torch.where(torch.arange(length) < place + 1, 0.0, -math.inf)
        queries = q[:, :, place : place + 1].expand(-1, -1, count, -1).contiguous()
        out = torch.nn.functional.scaled_dot_product_attention(
            queries, k[:, :, :length], v[:, :, :length], attn_mask=mask.repeat(count, 1)
        )
        return out[:, :, random.randrange(after)]

    for place in (3, 100, 191, 200, 250, 300, 400, 500, 511, 600, 800, 1000):
        alone = row(place, after=1, keys=place + 1)
        for after in (2, 4, 7, 33, 100, 200, 800):
            keys = random.randint(place + 1, 1040)
            found = row(place, after=after, keys=padding.padded_keys(place + 1))
            assert found.equal(alone), (place, after)
            if keys // 512 == place // 512:
                assert row(place, after=after, keys=keys).equal(alone), (place, after, keys)


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
    """What a whole run trains on, and its events; every token must be accounted for."""
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
    ledger = measure(events).run.ledger
    assert ledger.decoded == ledger.trained + ledger.discarded == loop.journal.engine_decoded
    return {t.key: (t.tokens, t.logprobs) for t in trained}, events


@cache
def baseline(architecture="llama", samples=2):
    sync = Schedule(
        strategy="sync", group_prompts=6, samples_per_prompt=samples, update_batch=6 * samples
    )
    return trained_answers(sync, architecture=architecture)[0]


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
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
    assert measure(events).run.ledger.discarded == 0


@settings(max_examples=4)
@given(schedules(modes=("partial", "coupled")), st.sampled_from((3, 2, 5, 12)))
def test_frozen_weights_give_every_schedule_the_same_answers(schedule, slots):
    answers, _ = trained_answers(schedule, slots=slots)
    assert answers == baseline(samples=schedule.samples_per_prompt)


RATE = 0.002


@cache
def changed_world(architecture):
    """Answers of old weights, complete and cut short, and an engine with weights one step on."""
    model = tiny_model(architecture)
    engine = NativeEngine(model, slots=16, max_tokens=limit_of, stop_tokens=STOPS)
    work = fresh_all(LENGTHS, samples=2)
    complete, cut = roll_out(engine, work), after_steps(engine, work, 15)
    trained_a_little(model, learning_rate=RATE)
    engine.load_weights(Weights(1))
    return model, engine, work, complete, cut


def kept_by(before, after):
    """Cached tokens that were not decoded again."""
    return after.num_tokens - (after.decoded_tokens - before.decoded_tokens)


def kept_by_hand(model, trajectory, *, tolerance):
    """Cached tokens up to the first that falls short of the best by more than the tolerance."""
    logits_TV = plain_logits(model, trajectory).double()
    streams = torch.full((trajectory.num_tokens,), stream(trajectory.seed, trajectory.attempt))
    keys = row_keys(streams, torch.arange(trajectory.num_tokens))
    perturbed_TV = logits_TV + gumbel(keys, torch.arange(VOCABULARY)).double()
    cached = torch.tensor(trajectory.tokens)[:, None]
    gaps_T = perturbed_TV.amax(-1) - perturbed_TV.gather(-1, cached)[:, 0]
    falls = (gaps_T > tolerance + 1e-5).nonzero()
    return int(falls[0]) if len(falls) else trajectory.num_tokens


@each_architecture
def test_verified_work_is_what_the_new_weights_write_from_the_start(architecture):
    model, engine, work, complete, cut = changed_world(architecture)
    anew = roll_out(engine, work)
    for cached in (complete, cut):
        verified = roll_out(engine, cached, tolerance=0.0)
        assert list(map(answer, verified)) == list(map(answer, anew))
        shares = [kept_by(b, a) / b.num_tokens for b, a in zip(cached, verified, strict=True)]
        assert max(shares) == 1.0
        assert any(0 < share < 1 for share in shares)
        for trajectory in verified:
            assert [segment.version for segment in trajectory.segments] == [1]
            plain = plain_logprobs(model, trajectory)
            assert trajectory.logprobs == pytest.approx(plain, abs=1e-5)


@each_architecture
def test_infinite_tolerance_is_trust(architecture):
    _, engine, _, complete, cut = changed_world(architecture)
    for cached in (complete, cut):
        trusted = roll_out(engine, cached, tolerance=None)
        assert roll_out(engine, cached, tolerance=math.inf) == trusted
        for before, after in zip(cached, trusted, strict=True):
            assert after.tokens[: before.num_tokens] == before.tokens
            assert after.logprobs[: before.num_tokens] == before.logprobs
            versions = [0, 1] if after.num_tokens > before.num_tokens else [0]
            assert [segment.version for segment in after.segments] == versions


@each_architecture
def test_the_kept_prefix_grows_with_the_tolerance_as_its_definition_says(architecture):
    model, engine, _, _, cut = changed_world(architecture)
    last = [0] * len(cut)
    for tolerance in (0.0, 0.01, 0.1, 0.5, 2.0, 1e9):
        verified = roll_out(engine, cut, tolerance=tolerance)
        kept = [kept_by(before, after) for before, after in zip(cut, verified, strict=True)]
        assert all(now >= then for now, then in zip(kept, last, strict=True))
        assert kept == [kept_by_hand(model, t, tolerance=tolerance) for t in cut]
        last = kept
    assert last == [trajectory.num_tokens for trajectory in cut]


def test_complete_answers_that_stand_are_confirmed_without_decoding_and_others_go_on():
    _, engine, work, complete, _ = changed_world("llama")
    anew = roll_out(engine, work)
    same = [old for old, new in zip(complete, anew, strict=True) if old.tokens == new.tokens]
    other = [old for old, new in zip(complete, anew, strict=True) if old.tokens != new.tokens]
    assert same
    assert other
    engine.reset_stats()
    confirmed = roll_out(engine, same, tolerance=0.0)
    assert [t.tokens for t in confirmed] == [t.tokens for t in same]
    assert [t.finish_reason for t in confirmed] == [t.finish_reason for t in same]
    assert engine.stats.decoded_tokens == 0
    gone_on = roll_out(engine, other, tolerance=0.0)
    assert all(a.decoded_tokens > b.decoded_tokens for a, b in zip(gone_on, other, strict=True))


@pytest.mark.parametrize("tolerance", [None, 0.0])
def test_weights_may_change_while_work_is_running(tolerance):
    """What runs goes on as if it had been interrupted, its weights changed, and submitted again."""
    results = []
    for is_interrupted in (False, True):
        model = tiny_model()
        engine = NativeEngine(model, slots=5, max_tokens=limit_of)
        work = fresh_all(LENGTHS)
        engine.submit(work, tolerance=tolerance)
        done = [t for _ in range(9) for t in engine.step().finished]
        trained_a_little(model, learning_rate=RATE)
        stopped = engine.interrupt() if is_interrupted else []
        engine.load_weights(Weights(1))
        engine.submit(stopped, tolerance=tolerance)
        missing = {t.key for t in work} - {t.key for t in done}
        results.append(by_key([*done, *finish(engine, missing).values()]))
    assert results[0] == results[1]
    versions = {tuple(s.version for s in t.segments) for t in results[0]}
    assert versions == ({(0,), (1,), (0, 1)} if tolerance is None else {(0,), (1,)})


def test_siblings_share_the_work_on_their_prompt():
    (prompt,) = random_texts((100,))
    for slots in (8, 3):
        engine = NativeEngine(shared_model(), slots=slots, max_tokens=6, chunk_tokens=32)
        roll_out(engine, [fresh(prompt, sample=n) for n in range(8)])
        assert engine.stats.prefilled_tokens == 100 + 7 * (100 - 96)


def test_steps_count_what_was_prefilled_and_decoded():
    engine = NativeEngine(shared_model(), slots=3, max_tokens=limit_of, chunk_tokens=8)
    work = fresh_all((40, 9, 23))
    engine.submit(work, tolerance=None)
    steps = []
    while sum(len(step.finished) for step in steps) < len(work):
        steps.append(engine.step())
    assert sum(step.prefilled_tokens for step in steps) == engine.stats.prefilled_tokens
    assert engine.stats.prefilled_tokens == 40 + 9 + 23
    assert engine.stats.decoded_tokens == sum(limit_of(t) for t in work)
    assert engine.step() == Step(finished=(), decoded_tokens=0, prefilled_tokens=0)


def test_interrupt_gives_back_everything_once_with_the_tokens_of_the_last_step():
    work = fresh_all((2, 7, 5, 4, 3))
    reference = roll_out(NativeEngine(shared_model(), slots=5, max_tokens=20), work)
    engine = NativeEngine(shared_model(), slots=3, max_tokens=20)
    engine.submit(work, tolerance=None)
    for _ in range(6):
        assert engine.step().decoded_tokens == 3
    stopped = engine.interrupt()
    assert [t.key for t in stopped] == [t.key for t in work]
    assert [t.num_tokens for t in stopped] == [6, 6, 6, 0, 0]
    assert all(t.finish_reason is None for t in stopped)
    for part, whole in zip(stopped, reference, strict=True):
        assert part.tokens == whole.tokens[: part.num_tokens]
        assert part.logprobs == whole.logprobs[: part.num_tokens]
    assert engine.interrupt() == []
    assert not engine.step().finished


def test_tokens_of_one_version_are_one_segment_however_often_they_were_interrupted():
    engine = NativeEngine(shared_model(), slots=2, max_tokens=20)
    stopped = fresh_all((4, 6))
    for version in (0, 0, 3, 3, 7):
        engine.load_weights(Weights(version))
        stopped = after_steps(engine, stopped, 4)
    for trajectory in stopped:
        shape = [(segment.version, len(segment.tokens)) for segment in trajectory.segments]
        assert shape == [(0, 8), (3, 8), (7, 4)]
        assert all(len(s.tokens) == len(s.logprobs) for s in trajectory.segments)


@dataclass(frozen=True)
class Letters:
    """A tokenizer of one letter per token, with `!` for what is special."""

    special: int = VOCABULARY - 1

    def __call__(self, text):
        return {"input_ids": [ord(letter) - 97 for letter in text]}

    def decode(self, token_ids, skip_special_tokens=False):
        kept = [t for t in token_ids if not (skip_special_tokens and t == self.special)]
        return "".join("!" if t == self.special else chr(97 + t % 26) for t in kept)


def cut_after(text, stops):
    """A text up to the first stop that appears in it."""
    for end in range(1, len(text) + 1):
        if any(text[:end].endswith(stop) for stop in stops):
            return text[:end]
    return text


def test_an_answer_ends_with_the_first_stop_token_it_writes():
    work = fresh_all(LENGTHS, samples=3)
    free = roll_out(NativeEngine(shared_model(), slots=8, max_tokens=60), work)
    stops = {11, 12, 13, 14}
    engine = NativeEngine(shared_model(), slots=8, max_tokens=60, stop_tokens=stops)
    for cut, whole in zip(roll_out(engine, work), free, strict=True):
        end = next((n for n, t in enumerate(whole.tokens, 1) if t in stops), 60)
        assert cut.tokens == whole.tokens[:end]
        assert cut.finish_reason == ("stop" if cut.tokens[-1] in stops else "length")


def test_stop_tokens_are_those_of_the_request_or_the_engine_or_the_model():
    model = tiny_model()
    model.generation_config.eos_token_id = [1, 2]
    prompts = random_texts((5,) * 40)
    of_model = NativeEngine(model, slots=40, max_tokens=60).generate(prompts, progress=False)
    engine = NativeEngine(model, slots=40, max_tokens=60, stop_tokens=[7])
    of_engine = engine.generate(prompts, progress=False)
    other = Sampling(stop_tokens=frozenset({9}))
    of_request = engine.generate(prompts, sampling=other, progress=False)
    for written, stops in ((of_model, {1, 2}), (of_engine, {7}), (of_request, {9})):
        assert {t.tokens[-1] for t in written if t.finish_reason == "stop"} == stops
        assert not any(token in stops for t in written for token in t.tokens[:-1])


@pytest.mark.parametrize("stops", [("e",), ("ab", "ca"), ("zz", "bcd", "q")], ids=str)
def test_an_answer_ends_as_soon_as_a_stop_string_appears(stops):
    prompts = random_texts((5,) * 40)
    engine = NativeEngine(shared_model(), slots=40, max_tokens=60, tokenizer=Letters())
    free = engine.generate(prompts, progress=False)
    written = engine.generate(prompts, sampling=Sampling(stop_strings=stops), progress=False)
    for cut, whole in zip(written, free, strict=True):
        expected = cut_after(Letters().decode(whole.tokens), stops)
        assert Letters().decode(cut.tokens) == expected
        assert cut.finish_reason == ("stop" if expected.endswith(stops) else "length")
    assert {t.finish_reason for t in written} == {"stop", "length"}


def test_an_answer_cached_with_its_stop_string_is_complete_at_once():
    sampling = Sampling(stop_strings=("e",))
    engine = NativeEngine(
        shared_model(), slots=2, max_tokens=60, tokenizer=Letters(), sampling=sampling
    )
    (done,) = roll_out(engine, [fresh([5, 6])])
    assert done.finish_reason == "stop"
    engine.reset_stats()
    assert roll_out(engine, [replace(done, finish_reason=None)]) == [done]
    assert engine.stats.steps == 0


def test_every_answer_has_its_own_limit_and_none_outgrows_the_context():
    engine = NativeEngine(shared_model(), slots=4, max_tokens=limit_of)
    work = fresh_all((3, 30, 7))
    assert [t.num_tokens for t in roll_out(engine, work)] == [limit_of(t) for t in work]
    prompts = random_texts((2, 9, 4))
    written = engine.generate(prompts, max_tokens=[1, 9, 4], progress=False)
    assert [t.num_tokens for t in written] == [1, 9, 4]
    assert [t.num_tokens for t in engine.generate(prompts, max_tokens=2, progress=False)] == [2] * 3
    long = fresh_all((CONTEXT - 5, CONTEXT - 1))
    cut = roll_out(NativeEngine(shared_model(), slots=2, max_tokens=100), long)
    assert [(t.num_tokens, t.finish_reason) for t in cut] == [(5, "length"), (1, "length")]
    for trajectory in cut:
        plain = plain_logprobs(shared_model(), trajectory)
        assert trajectory.logprobs == pytest.approx(plain, abs=1e-5)


def test_generate_takes_texts_and_gives_answers_in_the_order_of_the_prompts(capsys):
    engine = NativeEngine(shared_model(), slots=2, max_tokens=5, tokenizer=Letters())
    written = engine.generate(["abc", "b", "zyx"], samples_per_prompt=2, seed=3)
    assert [t.key for t in written] == [(p, s) for p in range(3) for s in range(2)]
    assert [list(t.prompt.tokens) for t in written[::2]] == [[0, 1, 2], [1], [25, 24, 23]]
    again = engine.generate(["abc", "b", "zyx"], samples_per_prompt=2, seed=3, progress=False)
    assert again == written
    assert engine.generate(["abc"], seed=4, progress=False)[0].tokens != written[0].tokens
    assert engine.generate([], progress=False) == []
    assert engine.text(written[0]) == Letters().decode(written[0].tokens, skip_special_tokens=True)


def test_an_engine_is_loaded_from_a_folder(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    words = {f"w{n}": n for n in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(tmp_path)
    engine = NativeEngine.from_pretrained(tmp_path, slots=2, max_tokens=6, device="cpu")
    (written,) = engine.generate(["w4 w9 w100"], progress=False)
    own = NativeEngine(model, slots=2, max_tokens=6)
    (expected,) = own.generate([[4, 9, 100]], progress=False)
    assert answer(written) == answer(expected)
    assert engine.text(written).split() == [f"w{n}" for n in written.tokens if n]


@each_architecture
def test_the_module_is_left_as_it_was(architecture):
    model = tiny_model(architecture)
    texts = torch.tensor(random_texts((12, 12)))

    def state():
        model.zero_grad()
        output = model(texts, labels=texts)
        output.loss.backward()
        tensors = [output.logits.detach(), *(p.grad.clone() for p in model.parameters())]
        flags = [module.training for module in model.modules()]
        return tensors, flags, model.config._attn_implementation, model.state_dict().keys()

    model.train()
    model.model.layers[1].eval()
    before = state()
    engine = NativeEngine(model, slots=3, max_tokens=12)
    roll_out(engine, fresh_all((3, 14)))
    engine.submit(fresh_all((5,)), tolerance=None)
    engine.step()
    tensors, *rest = state()
    assert all(torch.equal(a, b) for a, b in zip(tensors, before[0], strict=True))
    assert rest == list(before[1:])
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_forward_of_the_modules_own_is_put_back():
    """Libraries that hook into a module put a `forward` onto the instance."""
    model = tiny_model()
    layer = model.model.layers[0].mlp.up_proj
    plain = layer.forward
    layer.forward = lambda x: plain(x)
    ours = layer.forward
    NativeEngine(model, slots=1, max_tokens=3).generate([[1, 2]], progress=False)
    assert layer.__dict__["forward"] is ours


def test_an_error_in_the_middle_of_a_pass_leaves_the_module_and_the_engine_usable():
    """Ctrl-C, say: what the pass did not write must not be taken for written."""
    model = tiny_model().train()
    work = fresh_all((20, 9, 30))
    settings = {"slots": 2, "max_tokens": 8, "block_tokens": 4}
    expected = roll_out(NativeEngine(model, **settings), work)
    engine = NativeEngine(model, **settings)

    def fail(*_):
        raise KeyboardInterrupt

    before = model.config._attn_implementation
    for steps in (0, 3):
        engine.submit(work, tolerance=None)
        for _ in range(steps):
            engine.step()
        handle = model.model.layers[1].register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        handle.remove()
        assert model.config._attn_implementation == before
        assert model.training
        assert not any("forward" in module.__dict__ for module in model.modules())
        stopped = engine.interrupt()
        assert by_key(stopped) == stopped
        assert list(map(answer, roll_out(engine, stopped))) == list(map(answer, expected))


def test_dropout_of_a_model_in_training_does_not_touch_its_answers():
    model = tiny_model(attention_dropout=0.5)
    calm = NativeEngine(model, slots=2, max_tokens=9).generate([[1, 2], [3]], progress=False)
    model.train()
    assert (
        NativeEngine(model, slots=2, max_tokens=9).generate([[1, 2], [3]], progress=False) == calm
    )


BAD = {
    "empty prompt": (fresh([]), 5, "empty prompt; give it at least one token"),
    "token too large": (fresh([1, VOCABULARY]), 5, r"must lie in 0\.\.127, got 128"),
    "negative token": (fresh([-1]), 5, "got -1"),
    "prompt too long": (fresh([1] * CONTEXT), 5, "has 256 tokens, the model's context has 256"),
    "no room": (fresh([1]), 0, "max_tokens must be at least 1, got 0"),
    "less than no room": (fresh([1]), -3, "max_tokens must be at least 1, got -3"),
    "too big for the cache": (fresh([1] * 50), 100, "need 150 token slots .*, which has 128"),
}


@pytest.mark.parametrize(("bad", "limit", "message"), BAD.values(), ids=BAD)
def test_one_bad_request_leaves_nothing_queued_and_disturbs_nobody(bad, limit, message):
    model = shared_model()
    bad = replace(bad, prompt=replace(bad.prompt, id=99))
    engine = NativeEngine(
        model,
        slots=2,
        max_tokens=lambda t: limit if t.key == bad.key else 12,
        cache_bytes=blocks_bytes(model, 8, block_tokens=16),
        block_tokens=16,
    )
    work = fresh_all((5, 9, 3))
    undisturbed = roll_out(engine, work)
    engine.submit(work, tolerance=None)
    engine.step()
    with pytest.raises(RequestError, match=message):
        engine.submit([fresh([1], prompt=98), bad], tolerance=None)
    done = finish(engine, [t.key for t in work])
    assert by_key(done.values()) == by_key(undisturbed)
    with pytest.raises((RequestError, ConfigError), match=message):
        engine.generate([bad.prompt.tokens], max_tokens=limit, progress=False)
    assert not engine.interrupt()


def test_a_request_that_just_fits_the_cache_is_written_and_verified():
    """Complete answers have no token to come, so they need no place for one."""
    model = shared_model()
    for block_tokens in (4, 16):
        cache_bytes = blocks_bytes(model, 32 // block_tokens, block_tokens=block_tokens)
        settings = {"slots": 2, "block_tokens": block_tokens, "cache_bytes": cache_bytes}
        engine = NativeEngine(model, max_tokens=29, **settings)
        written = roll_out(engine, [fresh([1, 2, 3])])
        engine.load_weights(Weights(1))
        engine.submit(written, tolerance=0.0)
        (again,) = engine.step().finished
        assert answer(again) == answer(written[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slots": 0}, "slots must be at least 1, got 0"),
        ({"block_tokens": 0}, "block_tokens must be at least 1, got 0"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1, got 0"),
        ({"cache_bytes": 20_000}, r"at least 2 blocks of 32 tokens .* raise cache_bytes"),
    ],
)
def test_an_engine_that_cannot_work_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        NativeEngine(shared_model(), **settings)


def test_the_smallest_cache_is_big_enough_for_something():
    model = shared_model()
    for block_tokens in (2, 8, 32):
        engine = NativeEngine(
            model,
            slots=3,
            max_tokens=1,
            block_tokens=block_tokens,
            cache_bytes=blocks_bytes(model, 1, block_tokens=block_tokens),
        )
        assert [t.num_tokens for t in engine.generate([[4], [5]], progress=False)] == [1, 1]


def test_what_needs_an_idle_engine_or_a_tokenizer_says_so():
    engine = NativeEngine(shared_model(), slots=1, max_tokens=5)
    engine.submit(fresh_all((3,)), tolerance=None)
    with pytest.raises(RequestError, match=r"idle engine; call interrupt\(\) first"):
        engine.generate([[1]], progress=False)
    (stopped,) = engine.interrupt()
    with pytest.raises(RequestError, match="no tokenizer; give it one, or prompts as tokens"):
        engine.generate(["text"], progress=False)
    with pytest.raises(RequestError, match=r"must be a list, got a string; use generate"):
        engine.generate("text", progress=False)
    with pytest.raises(RequestError, match=r"text or token ids, got .*apply_chat_template"):
        engine.generate([[{"role": "user", "content": "hi"}]], progress=False)
    with pytest.raises(RequestError, match="no tokenizer"):
        engine.text(stopped)
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        engine.generate([[1]], sampling=Sampling(stop_strings=("a",)), progress=False)
    with pytest.raises(RequestError, match="one for each of the 2 prompts, got 3"):
        engine.generate([[1], [2]], max_tokens=[1, 2, 3], progress=False)


SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def causal(config):
    return AutoModelForCausalLM.from_config(config)


def fill_with_nan(module):
    for parameter in module.parameters(recurse=False):
        parameter.data.fill_(math.nan)


UNSUITED = {
    "encoder and decoder": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
        "T5ForConditionalGeneration has an encoder",
    ),
    "no logits": (lambda: LlamaModel(LlamaConfig(**SIZES)), "LlamaModel has no output layer"),
    "no attention": (
        lambda: causal(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1)),
        "MambaForCausalLM cannot be replaced",
    ),
    "double precision": (lambda: tiny_model().double(), "must be in float32, float16 or bfloat16"),
    "capped scores": (lambda: causal(Gemma2Config(**SIZES)), "capped scores"),
    "sinks": (lambda: causal(GptOssConfig(**SIZES, num_local_experts=2)), "sinks"),
    "both directions": (lambda: BertLMHeadModel(BertConfig(**SIZES)), "gives other results"),
    "chunked layers": (
        lambda: causal(Llama4TextConfig(**SIZES, num_local_experts=2, intermediate_size_mlp=16)),
        "layers of kind chunked_attention",
    ),
    "no numbers": (lambda: tiny_model().apply(fill_with_nan), "logits that are not finite .* NaN"),
    "attention out of reach": (lambda: causal(NemotronConfig(**SIZES)), "NemotronForCausalLM"),
    "positions by batch": (
        lambda: causal(
            LlamaConfig(
                **SIZES,
                rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            )
        ),
        "uses rope_type 'dynamic'",
    ),
}


@pytest.mark.parametrize(("make", "message"), UNSUITED.values(), ids=UNSUITED)
def test_a_model_the_engine_cannot_drive_is_refused_at_the_start(make, message):
    model, generator = make().eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    with pytest.raises(ModelError, match=message):
        NativeEngine(model, slots=2, max_tokens=5)


def test_a_model_that_is_very_sure_is_driven():
    """Its unlikely tokens lie so far behind that their weight is 0 in fp32."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(50)
    engine = NativeEngine(model, slots=2, max_tokens=20)
    for trajectory in engine.generate([[5, 3], [9]], progress=False):
        plain = plain_logprobs(model, trajectory)
        assert trajectory.logprobs == pytest.approx(plain, abs=1e-3)


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_the_step_by_name_and_no_token_of_them_stays(
    lag, poison, temperature
):
    """The model is broken for one token only, so the probe at the start does not meet it."""
    model = tiny_model()
    work = fresh_all((4, 5, 6, 7))
    settings = {"slots": 3, "max_tokens": 12, "sampling": Sampling(temperature=temperature)}
    expected = roll_out(NativeEngine(model, **settings), work)
    read = [{*answer.prompt.tokens, *answer.tokens[:-1]} for answer in expected]
    bad, token = next(
        (index, token)
        for index, answer in enumerate(expected)
        for token in answer.tokens[2:-1]
        if all((token in read[other]) == (other == index) for other in range(4))
        and token not in answer.prompt.tokens
    )
    engine = lagging(NativeEngine(model, **settings), lag=lag)
    embedding = model.get_input_embeddings().weight
    kept = embedding[token].clone()
    with torch.no_grad():
        embedding[token] = poison
    engine.load_weights(Weights(0))
    engine.submit(work, tolerance=None)
    place = expected[bad].tokens.index(token) + 1
    words = f"for token {place} .* prompt {bad}, sample 0: its weights model.embed_tokens.weight"
    finished = []

    def step_on():
        while True:
            finished.extend(engine.step().finished)

    for _ in range(2):
        with pytest.raises(ModelError, match=words):
            step_on()
    stopped = engine.interrupt()
    (broken,) = [answer for answer in stopped if answer.key[0] == bad]
    assert broken.tokens == expected[bad].tokens[:place]
    assert all(math.isfinite(logprob) for answer in stopped for logprob in answer.logprobs)
    with torch.no_grad():
        embedding[token] = kept
    engine.load_weights(Weights(0))
    again = by_key([*finished, *roll_out(engine, stopped)])
    assert [one.tokens for one in again] == [one.tokens for one in expected]


def test_a_model_that_overflows_says_so():
    model = tiny_model()
    engine = NativeEngine(model, slots=1, max_tokens=8)
    with torch.no_grad():
        model.lm_head.weight.fill_(3e38)
    engine.load_weights(Weights(1))
    with pytest.raises(ModelError, match="its weights are finite, so it overflows"):
        engine.generate([[1, 2]], progress=False)


def test_a_model_with_other_names_for_its_sizes_is_refused_or_driven_rightly():
    sizes = {"vocab_size": 64, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = causal(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()
    try:
        engine = NativeEngine(model, slots=2, max_tokens=20)
    except ModelError:
        return
    for trajectory in engine.generate([[5, 3], [9]], progress=False):
        plain = plain_logprobs(model, trajectory)
        assert trajectory.logprobs == pytest.approx(plain, abs=1e-5)


def test_without_torch_the_extra_is_named():
    program = "import sys; sys.modules['torch'] = None; import sortedrl.engines.native"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "the native engine needs torch; pip install 'sortedrl[native]'" in done.stderr


@pytest.mark.parametrize("tolerance", [-0.1, math.nan])
def test_a_tolerance_below_zero_is_refused(tolerance):
    engine = NativeEngine(shared_model(), slots=1)
    with pytest.raises(RequestError, match="tolerance must be 0 or more nats"):
        engine.submit([fresh([1, 2])], tolerance=tolerance)


@pytest.mark.parametrize("lag", [0, 1])
def test_scores_are_the_log_probabilities_of_the_present_weights(lag):
    model = tiny_model()
    sampling = Sampling(temperature=0.8)
    engine = NativeEngine(model, slots=3, max_tokens=14, sampling=sampling)
    engine = lagging(engine, lag=lag)
    written = roll_out(engine, fresh_all((4, 40, 6, 3, 9)))
    assert [scores.logprobs for scores in engine.score(written)] == [t.logprobs for t in written]
    assert all(set(scores.gaps) == {0.0} for scores in engine.score(written))
    trained_a_little(model, learning_rate=1e-2)
    engine.load_weights(Weights(1))
    decoded = engine.stats.decoded_tokens
    scored = engine.score(written)
    for trajectory, scores in zip(written, scored, strict=True):
        plain = plain_logprobs(model, trajectory, temperature=0.8)
        assert scores.logprobs == pytest.approx(plain, abs=1e-5)
        assert all(gap >= 0 for gap in scores.gaps)
    assert engine.stats.decoded_tokens == decoded, "nothing is generated"
    first = [next((n for n, gap in enumerate(s.gaps) if gap > 0), len(s.gaps)) for s in scored]
    verified = roll_out(engine, [replace(t, finish_reason=None) for t in written], tolerance=0.0)
    kept = [
        new.num_tokens - (new.decoded_tokens - old.decoded_tokens)
        for old, new in zip(written, verified, strict=True)
    ]
    assert kept == first, "a tolerance of 0 keeps what has no gap"


def test_scoring_takes_answers_of_any_length_and_needs_an_idle_engine():
    engine = NativeEngine(shared_model(), slots=2, max_tokens=5)
    written = engine.generate([[1, 2], [3]], max_tokens=[30, 1], progress=False)
    scores = engine.score([*written, fresh([4], prompt=7)])
    assert [len(one.logprobs) for one in scores] == [30, 1, 0]
    assert not engine.interrupt()
    engine.submit([fresh([1, 2])], tolerance=None)
    with pytest.raises(RequestError, match="score needs an idle engine"):
        engine.score(written)


def test_closing_frees_the_cache_and_ends_all_work():
    engine = NativeEngine(tiny_model(), slots=2, max_tokens=9)
    engine.submit(fresh_all((3, 5, 4)), tolerance=None)
    engine.step()
    runner, tensors = weakref.ref(engine._runner), engine._runner._cache.tensors
    engine.close()
    engine.close()
    engine.sleep()
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    assert runner() is None
    assert not engine._hf_model.replaced
    assert not engine.interrupt()
    assert not engine.step().finished
    for call in (
        lambda: engine.submit(fresh_all((3,)), tolerance=None),
        lambda: engine.load_weights(Weights(1)),
        lambda: engine.generate([[1]], progress=False),
    ):
        with pytest.raises(EngineError, match="is closed; make a new one"):
            call()
