"""SGLang itself behind the seam, on the CPU: in processes of our own, and as a server.

The last test of each form kills it. Its kernels are a stand-in: see sgl_kernel_stub.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from native_worlds import tiny_model
from sortedrl.engines.sampling import Sampling
from sortedrl.engines.servers import Server
from sortedrl.engines.sglang.sglang_process import SglangProcess
from sortedrl.engines.sglang.sglang_server import SglangServer
from sortedrl.engines.streaming.backend import EventLoop, GenerationRequest, ServerRequirements
from sortedrl.errors import EngineError, EngineLost
from sortedrl.types import Weights

pytestmark = [
    pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang, in a venv of its own"),
    pytest.mark.filterwarnings("default"),
]

SLOTS, CONTEXT, VOCABULARY = 4, 256, 128
START_SECONDS = 1200
GREEDY = Sampling(temperature=0)
PROMPT = [5, 9, 2]
STUB = Path(__file__).parent / "sgl_kernel_stub"


def model(*, seed=0):
    """A model whose own stop token is the third that it writes after `PROMPT`."""
    return tiny_model(seed=seed, eos_token_id=greedy_tokens(tiny_model(), PROMPT, 3)[-1])


def greedy_tokens(model, prompt, count):
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(model(torch.tensor([tokens])).logits[0, -1].argmax().item())
    return tokens[len(prompt) :]


NEVER_WRITTEN = next(
    token for token in range(VOCABULARY) if token not in greedy_tokens(tiny_model(), PROMPT, 20)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sglang-model")
    model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loop():
    loop = EventLoop("SGLang tests")
    yield loop
    loop.close()


@pytest.fixture(scope="module", params=["process", "server"])
def engine(request, folder, loop, tmp_path_factory):
    """A backend that writes with `engine.model`, and how to kill it."""
    start = process if request.param == "process" else server
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(STUB), prepend=os.pathsep)
        environment.syspath_prepend(STUB)
        environment.setenv("HF_HUB_OFFLINE", "1")
        yield from start(folder, loop, tmp_path_factory.mktemp("hand-over"))


def process(folder, loop, _):
    bystander = subprocess.Popen(["sleep", "600"])
    before = worldwide()
    backend = loop.call(opened_process(folder))
    assert worldwide() == before
    victim = backend._processes[0].pid
    yield SimpleNamespace(backend=backend, model=model(), victim=victim)
    loop.call(backend.close())
    assert not multiprocessing.active_children(), "no process is left behind"
    assert bystander.poll() is None, "processes that are not SGLang's go on"
    bystander.kill()
    bystander.wait()


def opened_process(folder, **options):
    return SglangProcess.start(
        model=str(folder),
        slots=SLOTS,
        context=CONTEXT,
        dtype="float32",
        seed=0,
        memory_share=0.1,
        device="cpu",
        options=options,
    )


def worldwide():
    """What SGLang would like to change in its process."""
    return (
        multiprocessing.get_start_method(allow_none=True),
        asyncio.get_event_loop_policy(),
        logging.getLogger().handlers,
        dict(os.environ),
    )


def server(folder, loop, hand_over):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "--model-path": folder,
        "--port": port,
        "--dtype": "float32",
        "--max-running-requests": SLOTS,
        "--context-length": CONTEXT + 6,
        "--max-total-tokens": SLOTS * (CONTEXT + 6),
        "--device": "cpu",
        "--attention-backend": "torch_native",
        "--sampling-backend": "pytorch",
        "--grammar-backend": "none",
        "--log-level": "error",
    }
    flags = ["--skip-tokenizer-init", "--incremental-streaming-output", "--sleep-on-idle"]
    flags += ["--enable-priority-scheduling", "--disable-priority-preemption"]
    flags += ["--disable-overlap-schedule", "--disable-cuda-graph"]
    flags += ["--skip-server-warmup", *(str(part) for option in options.items() for part in option)]
    started = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", *flags],
        env=os.environ
        | {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"},
        start_new_session=True,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        loop.call(answering(url, started))
        backend = loop.call(opened_server(url, hand_over))
        yield SimpleNamespace(backend=backend, model=model(), victim=started.pid, url=url)
        loop.call(backend.close())
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def opened_server(url, hand_over, **changes):
    wanted = {"vocabulary": VOCABULARY, "context": CONTEXT, "temperature": 0.7} | changes
    return SglangServer.connect(url, ServerRequirements(**wanted), weights_folder=hand_over)


async def answering(url, started):
    until = time.monotonic() + START_SECONDS
    client = Server(url)
    while time.monotonic() < until and started.poll() is None:
        with suppress(EngineError):
            await client.get("/server_info")
            return await client.close()
        await asyncio.sleep(0.5)
    pytest.fail("the server did not start")


def make_request(tokens, *, max_tokens=12, stop_tokens=(), sampling=None, priority=0):
    make_request.count += 1
    return GenerationRequest(
        id=f"request-{make_request.count:06d}",
        tokens=tokens,
        max_tokens=max_tokens,
        stop_tokens=frozenset(stop_tokens),
        sampling=sampling or Sampling(temperature=0.7),
        priority=priority,
    )


make_request.count = 0


async def pieces_of(backend, asked, *, seen=None):
    deltas = []
    async for delta in backend.stream(asked):
        deltas.append(delta)
        if seen is not None:
            seen.append(asked.id)
    return SimpleNamespace(
        tokens=[token for delta in deltas for token in delta.tokens],
        logprobs=[logprob for delta in deltas for logprob in delta.logprobs],
        ends=[delta.end for delta in deltas],
        end=deltas[-1].end,
        num_cached_tokens=deltas[0].num_cached_tokens,
    )


async def all_of(backend, asks, **how):
    return await asyncio.gather(*(pieces_of(backend, asked, **how) for asked in asks))


def logprobs_of(model, asked, tokens):
    """The whole distributions from a plain forward pass, at the temperature."""
    with torch.inference_mode():
        logits_TV = model(torch.tensor([[*asked.tokens, *tokens]])).logits[0].float()
    temperature = asked.sampling.temperature or 1.0
    return (logits_TV[len(asked.tokens) - 1 : -1] / temperature).log_softmax(-1)


def assert_written_by(model, asked, answer):
    assert len(answer.tokens) == len(answer.logprobs)
    assert not any(answer.ends[:-1]), "only the last delta says how it ended"
    if answer.tokens:
        plain_TV = logprobs_of(model, asked, answer.tokens)
        plain_T = plain_TV[range(len(answer.tokens)), answer.tokens]
        assert (plain_T - torch.tensor(answer.logprobs)).abs().max() < 1e-4


def test_every_token_comes_once_with_the_log_probability_of_a_plain_forward_pass(engine, loop):
    samplings = [Sampling(temperature=temperature) for temperature in (0.7, 1.0, 1.6)] + [GREEDY]
    asks = [
        make_request([number, 9, 2, 40 + number][: 1 + number], max_tokens=20, sampling=sampling)
        for number, sampling in enumerate(samplings * 2)
    ]
    for asked, answer in zip(asks, loop.call(all_of(engine.backend, asks)), strict=True):
        assert (answer.end, len(answer.tokens)) == ("length", 20)
        assert_written_by(engine.model, asked, answer)


def test_the_log_probability_is_that_among_the_tokens_a_filter_leaves(engine, loop):
    asked = make_request([1, 2], sampling=Sampling(temperature=0.8, top_k=4))
    answer = loop.call(pieces_of(engine.backend, asked))
    best = logprobs_of(engine.model, asked, answer.tokens).topk(4)
    left_T4 = best.values.log_softmax(-1)
    for token, logprob, tokens, left in zip(
        answer.tokens, answer.logprobs, best.indices.tolist(), left_T4.tolist(), strict=True
    ):
        assert logprob == pytest.approx(left[tokens.index(token)], abs=1e-4)


def test_a_filter_without_known_log_probabilities_is_refused(engine, loop):
    with pytest.raises(EngineError, match="top_k too"):
        loop.call(pieces_of(engine.backend, make_request([1], sampling=Sampling(top_p=0.9))))


def test_a_stop_token_ends_the_answer_and_belongs_to_it(engine, loop):
    stops = range(20, 40)
    asks = [make_request([number], max_tokens=200, stop_tokens=stops) for number in range(4)]
    for asked, answer in zip(asks, loop.call(all_of(engine.backend, asks)), strict=True):
        assert answer.end == "stop"
        assert [token in stops for token in answer.tokens] == [False] * (len(answer.tokens) - 1) + [
            True
        ]
        assert_written_by(engine.model, asked, answer)


@pytest.mark.parametrize("stop_tokens", [(), (NEVER_WRITTEN,)])
def test_the_models_own_stop_token_ends_nothing(engine, loop, stop_tokens):
    asked = make_request(PROMPT, stop_tokens=stop_tokens, sampling=GREEDY)
    answer = loop.call(pieces_of(engine.backend, asked))
    assert answer.tokens[2] == engine.model.config.eos_token_id
    assert (answer.end, len(answer.tokens)) == ("length", asked.max_tokens)
    assert_written_by(engine.model, asked, answer)


@pytest.mark.parametrize("stop_tokens", [(), (NEVER_WRITTEN,)])
def test_the_models_own_stop_token_may_be_the_last(engine, loop, stop_tokens):
    asked = make_request(PROMPT, stop_tokens=stop_tokens, sampling=GREEDY, max_tokens=3)
    answer = loop.call(pieces_of(engine.backend, asked))
    assert (answer.end, len(answer.tokens)) == ("length", 3)


@pytest.mark.parametrize("prompt_tokens", [200, CONTEXT - 1])
def test_the_context_can_be_filled_to_its_last_token(engine, loop, prompt_tokens):
    asked = make_request([7] * prompt_tokens, max_tokens=CONTEXT - prompt_tokens)
    answer = loop.call(pieces_of(engine.backend, asked))
    assert (answer.end, len(answer.tokens)) == ("length", CONTEXT - prompt_tokens)
    assert_written_by(engine.model, asked, answer)


def test_broken_off_answers_come_back_with_all_that_was_written(engine, loop):
    asks = [make_request([number, 3], max_tokens=240) for number in range(SLOTS + 2)]

    async def broken_off():
        seen = []
        reading = asyncio.create_task(all_of(engine.backend, asks, seen=seen))
        while len(set(seen)) < SLOTS or len(seen) < 8 * SLOTS:
            await asyncio.sleep(0.01)
        while not reading.done():
            await engine.backend.abort([asked.id for asked in asks])
            await asyncio.wait([reading], timeout=1)
        return await reading

    answers = loop.call(broken_off())
    assert [answer.end for answer in answers] == ["abort"] * len(asks)
    assert sum(bool(answer.tokens) for answer in answers) >= SLOTS
    assert all(len(answer.tokens) < 240 for answer in answers)
    for asked, answer in zip(asks, answers, strict=True):
        assert_written_by(engine.model, asked, answer)


def test_one_answer_is_broken_off_and_the_others_go_on(engine, loop):
    asks = [make_request([number, 4], max_tokens=60) for number in range(3)]

    async def one_broken_off():
        seen = []
        reading = asyncio.create_task(all_of(engine.backend, asks, seen=seen))
        while seen.count(asks[1].id) < 3:
            await asyncio.sleep(0.01)
        await engine.backend.abort([asks[1].id])
        return await reading

    answers = loop.call(one_broken_off())
    assert [answer.end for answer in answers] == ["length", "abort", "length"]


def test_an_answer_broken_off_before_it_is_begun_is_empty(engine, loop):
    asked = make_request([1, 2, 3])
    loop.call(engine.backend.abort([asked.id]))
    answer = loop.call(pieces_of(engine.backend, asked))
    assert (answer.tokens, answer.end) == ([], "abort")


def test_a_waiting_answer_of_lower_priority_goes_first(engine, loop):
    lengths = [30, *[120] * (SLOTS - 1)]
    fillers = [make_request([number], max_tokens=length) for number, length in enumerate(lengths)]
    later, sooner = make_request([50], priority=9), make_request([51], priority=2)

    async def order():
        seen = []
        reading = asyncio.create_task(all_of(engine.backend, fillers, seen=seen))
        while len(set(seen)) < SLOTS:
            await asyncio.sleep(0.01)
        await all_of(engine.backend, [later, sooner], seen=seen)
        await reading
        return seen

    seen = loop.call(order())
    assert seen.index(sooner.id) < seen.index(later.id)


def test_new_weights_write_from_the_next_answer_on_and_old_prefixes_are_forgotten(engine, loop):
    prompt = list(range(60, 100))

    def greedy():
        asked = make_request(prompt, sampling=GREEDY, max_tokens=16)
        return asked, loop.call(pieces_of(engine.backend, asked))

    greedy()
    asked, cached = greedy()
    assert cached.num_cached_tokens > len(prompt) // 2
    assert_written_by(engine.model, asked, cached)
    for version, new in enumerate([model(seed=1), engine.model], start=1):
        places = {name: tensor.data_ptr() for name, tensor in new.named_parameters()}
        loop.call(engine.backend.load_weights(Weights(version, dict(new.named_parameters()))))
        assert places == {name: tensor.data_ptr() for name, tensor in new.named_parameters()}
        asked, answer = greedy()
        assert answer.num_cached_tokens == 0
        assert_written_by(new, asked, answer)
        plain_TV = logprobs_of(new, asked, answer.tokens)
        assert answer.tokens == plain_TV.argmax(-1).tolist()


def test_the_tokens_of_an_answer_are_scored(engine, loop):
    tokens = [*PROMPT, *greedy_tokens(engine.model, PROMPT, 10), 77, 3]
    scores = loop.call(engine.backend.score(tokens, start=len(PROMPT)))
    with torch.no_grad():
        logprobs = engine.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = [logprobs[n - 1, tokens[n]].item() for n in range(len(PROMPT), len(tokens))]
    assert scores == pytest.approx(expected, abs=1e-4)


def test_it_says_that_seeds_have_no_effect_on_a_cpu(engine, loop):
    assert "deterministic" in engine.backend.limits.no_seeds


def test_an_option_that_sglang_does_not_have_is_refused(engine, folder, loop):
    for option, words in {"page_sise": "did you mean 'page_size'", "dtype": "leave it out"}.items():
        with pytest.raises(EngineError, match=words):
            loop.call(opened_process(folder, **{option: 1}))


@pytest.mark.parametrize("engine", ["server"], indirect=True)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"context": CONTEXT + 1}, "room for 257 tokens.* has room for 256"),
        ({"vocabulary": VOCABULARY + 1}, "vocabulary is smaller"),
        ({"vocabulary": VOCABULARY - 1}, "vocabulary is larger"),
    ],
)
def test_a_server_that_does_not_fit_is_refused(engine, loop, tmp_path, change, words):
    with pytest.raises(EngineError, match=words) as refusal:
        loop.call(opened_server(engine.url, tmp_path, **change))
    assert "--incremental-streaming-output" in str(refusal.value), "it says how to start it"


@pytest.mark.parametrize("engine", ["process"], indirect=True)
def test_the_signal_of_a_failing_child_does_not_end_this_process(engine, loop):
    os.kill(os.getpid(), signal.SIGQUIT)
    asked = make_request([1])
    assert_written_by(engine.model, asked, loop.call(pieces_of(engine.backend, asked)))


def test_killed_in_the_middle_it_is_lost_on_every_stream(engine, loop):
    asks = [make_request([number], max_tokens=250) for number in range(SLOTS + 1)]

    async def killed():
        seen = []
        reading = [
            asyncio.create_task(pieces_of(engine.backend, asked, seen=seen)) for asked in asks
        ]
        while len(seen) < 10:
            await asyncio.sleep(0.01)
        os.kill(engine.victim, signal.SIGKILL)
        return await asyncio.gather(*reading, return_exceptions=True)

    assert [type(end) for end in loop.call(killed(), seconds=60)] == [EngineLost] * len(asks)
    with pytest.raises(EngineLost):
        loop.call(engine.backend.load_weights(Weights(3, dict(engine.model.named_parameters()))))
    with pytest.raises(EngineLost):
        loop.call(pieces_of(engine.backend, make_request([1])))
