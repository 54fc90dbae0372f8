"""The CUDA runner: on a GPU as it is, elsewhere with its kernels in Triton's interpreter.

Without a GPU nothing is recorded and nothing runs ahead, but the rows, the slots' state, the lag
of one pass and the kernels are the same.
"""

import math
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from random import Random

import pytest
import torch

pytest.importorskip("triton.language")

from interpreted import HAS_CUDA
from native_worlds import ARCHITECTURES, fresh_all, tiny_model, trained_a_little
from sortedrl.engines.native import NativeEngine, Sampling, cuda_runner
from sortedrl.engines.native import native_engine as engine_module
from sortedrl.engines.native.attention_kernels import TileRows
from sortedrl.errors import ConfigError
from sortedrl.types import Weights

DTYPES = (torch.bfloat16, torch.float16) if HAS_CUDA else (torch.float32,)
# The interpreter is slow: small worlds where there is no GPU.
LENGTHS = (5, 21, 33, 70, 1, 150, 40, 90) * 4 if HAS_CUDA else (3, 1, 18)
MAX_TOKENS = 60 if HAS_CUDA else 3
TOLERANCES = (None, 0.0, math.inf) if HAS_CUDA else (None, 0.0)
FAMILIES = ARCHITECTURES if HAS_CUDA else ("llama", "gemma3")
SIZES = (
    {} if HAS_CUDA else {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
)
# Those of 16 bits, of fp32, and others that should not matter.
TILES = [TileRows(spans=64), TileRows()]
if HAS_CUDA:
    TILES += [TileRows(spans=128), TileRows(decode=64, spans=64)]
cuda_only = pytest.mark.skipif(not HAS_CUDA, reason="needs a GPU")
ignores_interpreter = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")


class _NoEvent:
    def record(self):
        pass

    def synchronize(self):
        pass


@pytest.fixture(autouse=True)
def _no_gpu_needed(monkeypatch):
    if HAS_CUDA:
        return
    monkeypatch.setattr(torch.cuda, "Event", _NoEvent)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(cuda_runner, "no_split_k", nullcontext)
    monkeypatch.setattr(cuda_runner.CudaRunner, "_is_recordable", False)
    monkeypatch.setattr(
        engine_module,
        "_runner",
        lambda hf_model, size, *, slots, max_rows, is_compiled: cuda_runner.CudaRunner(
            hf_model, size=size, slots=slots, max_rows=max_rows, is_compiled=False
        ),
    )


def _model(architecture, dtype):
    sizes = dict(SIZES)
    if sizes and architecture == "gemma3":
        sizes["layer_types"] = ["sliding_attention", "full_attention"]
    model = tiny_model(architecture, head_dim=16, **sizes).to(dtype)
    return model.cuda() if HAS_CUDA else model


def _write(engine, trajectories, *, tolerance=None, interrupts=()):
    done, step = {}, 0
    engine.submit(trajectories, tolerance=tolerance)
    while len(done) < len(trajectories):
        for trajectory in engine.step().finished:
            assert trajectory.key not in done
            done[trajectory.key] = trajectory
        step += 1
        if step in interrupts:
            back = list(engine.interrupt())
            Random(step).shuffle(back)
            engine.load_weights(Weights(engine.version + 1))
            engine.submit(back, tolerance=tolerance)
    return {key: (t.tokens, t.logprobs) for key, t in done.items()}


@ignores_interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_an_answer_does_not_feel_batch_chunks_preemption_or_interruption(architecture, dtype):
    model = _model(architecture, dtype)
    trajectories = fresh_all(LENGTHS, samples=1)
    common = {"max_tokens": MAX_TOKENS, "stop_tokens": (), "block_tokens": 16}
    engine = NativeEngine(model, slots=len(LENGTHS), **common)
    together = _write(engine, trajectories)
    assert together == _write(engine, trajectories), "the engine is as it was"
    few = NativeEngine(model, slots=2, chunk_tokens=6, **common)
    assert _write(few, trajectories[-3:]) == {t.key: together[t.key] for t in trajectories[-3:]}
    tokens = 16 * (2 + -(-(max(LENGTHS) + MAX_TOKENS) // 16))
    cramped = NativeEngine(model, slots=4, cache_bytes=tokens * engine.cache.token_bytes, **common)
    assert _write(cramped, trajectories) == together
    for tolerance in TOLERANCES:
        answers = _write(engine, trajectories, tolerance=tolerance, interrupts=(1, 2, 9, 30))
        assert answers == together


@ignores_interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_the_same_holds_with_attention_tiles_of_any_height(tiles, dtype, monkeypatch):
    monkeypatch.setattr(cuda_runner, "_tile_rows", lambda _: tiles)
    model = _model("llama", dtype)
    trajectories = fresh_all(LENGTHS, samples=1)
    common = {"max_tokens": MAX_TOKENS, "stop_tokens": (), "block_tokens": 16}
    engine = NativeEngine(model, slots=len(LENGTHS), **common)
    together = _write(engine, trajectories)
    few = NativeEngine(model, slots=2, chunk_tokens=6, **common)
    assert _write(few, trajectories[-3:]) == {t.key: together[t.key] for t in trajectories[-3:]}
    assert _write(engine, trajectories, tolerance=0.0, interrupts=(1, 2, 9, 30)) == together


@ignores_interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_log_probabilities_are_those_of_a_plain_pass(tiles, dtype, monkeypatch):
    monkeypatch.setattr(cuda_runner, "_tile_rows", lambda _: tiles)
    model = _model("qwen3", dtype)
    engine = NativeEngine(model, slots=4, max_tokens=MAX_TOKENS, stop_tokens=())
    slack = {torch.float32: 1e-5, torch.float16: 0.02, torch.bfloat16: 0.2}[dtype]
    for trajectory in engine.generate([[3, 5, 7], [9] * 11], progress=False):
        text = [*trajectory.prompt.tokens, *trajectory.tokens]
        ids = torch.tensor([text], device=model.device)
        with torch.no_grad():
            plain = model(ids).logits[0, :-1].float().log_softmax(-1)
        plain = plain.gather(-1, ids[0, 1:, None])[-len(trajectory.tokens) :, 0]
        assert torch.allclose(plain.cpu(), torch.tensor(trajectory.logprobs), atol=slack)


@ignores_interpreter
def test_filters_and_greedy_requests_share_a_pass_with_plain_ones():
    model = _model("llama", DTYPES[0])
    engine = NativeEngine(model, slots=5, max_tokens=MAX_TOKENS, stop_tokens=())
    plain = engine.generate([[3, 5, 7]], progress=False, seed=1)[0]
    kinds = (
        Sampling(),
        Sampling(temperature=0.0),
        Sampling(top_k=1),
        Sampling(top_p=1e-6),
        Sampling(min_p=0.999),
    )
    trajectories = fresh_all((3,) * len(kinds))
    for t, sampling in zip([plain_again(plain), *trajectories[1:]], kinds, strict=True):
        engine.submit([t], tolerance=None, sampling=sampling)
    done = {}
    while len(done) < len(kinds):
        done |= {t.prompt.id: t for t in engine.step().finished}
    assert done[0].tokens == plain.tokens
    for index, trajectory in enumerate(trajectories[1:], start=1):
        greedy = engine.generate(
            [trajectory.prompt.tokens], sampling=Sampling(temperature=0.0), progress=False
        )
        assert done[index].tokens == greedy[0].tokens


def plain_again(trajectory):
    return replace(trajectory, segments=(), finish_reason=None, decoded_tokens=0)


@ignores_interpreter
def test_stop_tokens_end_an_answer_although_the_device_runs_ahead():
    model = _model("llama", DTYPES[0])
    engine = NativeEngine(model, slots=3, max_tokens=MAX_TOKENS, stop_tokens=())
    trajectories = fresh_all((4, 7, 2, 6))
    whole = _write(engine, trajectories)
    stop = whole[(1, 0)][0][1]
    engine = NativeEngine(model, slots=3, max_tokens=MAX_TOKENS, stop_tokens=(stop,))
    for key, (tokens, logprobs) in _write(engine, trajectories).items():
        end = whole[key][0].index(stop) + 1 if stop in whole[key][0] else MAX_TOKENS
        assert (tokens, logprobs) == (whole[key][0][:end], whole[key][1][:end])


@ignores_interpreter
def test_a_fresh_answer_starts_in_the_pass_that_verifies_another():
    model = _model("llama", DTYPES[0])
    engine = NativeEngine(model, slots=2, max_tokens=MAX_TOKENS, stop_tokens=())
    trajectories = fresh_all((4, 6))
    engine.submit(trajectories, tolerance=None)
    whole = {}
    while len(whole) < 2:
        whole |= {t.key: t for t in engine.step().finished}
    complete = replace(whole[(0, 0)], finish_reason=None)
    engine.load_weights(Weights(1))
    again = _write(engine, [complete, trajectories[1]], tolerance=0.0)
    assert again == {key: (t.tokens, t.logprobs) for key, t in whole.items()}


@ignores_interpreter
def test_an_engine_of_few_slots_may_pad_its_passes_to_more_rows_than_it_has():
    model = _model("llama", DTYPES[0])
    found = []
    for fewest in (1, 16):
        engine = NativeEngine(
            model, slots=2, chunk_tokens=6, max_tokens=2, stop_tokens=(), block_tokens=16
        )
        engine._runner._fewest = fewest
        found.append(engine.generate([[3, 5, 7]], progress=False))
    (one,), (other,) = found
    assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)


def _moved(model):
    """Every weight in another tensor, as after `model.to`."""
    for weight in model.parameters():
        weight.data = 1.1 * weight.data
    return model


@ignores_interpreter
@pytest.mark.parametrize("change", [_moved, partial(trained_a_little, learning_rate=1e-2)])
def test_packed_weights_follow_the_model(change):
    def answer(engine):
        (found,) = engine.generate([[3, 5, 7]], progress=False)
        return found.tokens, found.logprobs

    common = {"slots": 2, "max_tokens": 3, "stop_tokens": ()}
    model = _model("llama", DTYPES[0])
    engine = NativeEngine(model, **common)
    before = answer(engine)
    changed = change(model)
    engine.load_weights(Weights(1))
    assert answer(engine) == answer(NativeEngine(deepcopy(changed), **common)) != before


@cuda_only
def test_a_cache_that_does_not_fit_says_what_would():
    with pytest.raises(ConfigError, match=r"does not fit.*would fit and hold"):
        NativeEngine(_model("llama", torch.bfloat16), slots=10**9, max_tokens=4, cache_bytes=10**15)
