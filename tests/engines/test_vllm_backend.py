"""vLLM itself behind the seam, on the CPU: in a process of our own, and as a server."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from native_worlds import tiny_model
from sortedrl.engines.sampling import Sampling
from sortedrl.engines.servers import Server
from sortedrl.engines.streaming.backend import EventLoop, GenerationRequest, ServerRequirements
from sortedrl.engines.streaming.weight_files import weight_buckets
from sortedrl.engines.vllm import vllm_process
from sortedrl.engines.vllm.vllm_process import VllmProcess
from sortedrl.engines.vllm.vllm_server import VllmServer
from sortedrl.errors import EngineError, EngineLost
from sortedrl.types import Weights

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM, in a venv of its own"),
    pytest.mark.filterwarnings("default"),
]

SLOTS, CONTEXT = 4, 256
START_SECONDS = 1200
GREEDY = Sampling(temperature=0)
PROMPT = [5, 9, 2]


def model(*, seed=0):
    # Its attention on the CPU wants heads of at least 32.
    heads = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    return tiny_model(seed=seed, **heads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm-model")
    model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loop():
    loop = EventLoop("vLLM tests")
    yield loop
    loop.close()


def test_weights_reach_both_shards_of_an_engine_in_small_buckets(folder, loop, monkeypatch):
    monkeypatch.setattr(vllm_process, "_BUCKET_BYTES", 40_000)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    # Without it vLLM wants a NUMA node for each shard.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"0|{1 % os.cpu_count()}")
    before = children()
    backend = loop.call(
        VllmProcess.start(
            model=str(folder),
            slots=SLOTS,
            context=CONTEXT,
            dtype="float32",
            tensor_parallel=2,
            options={"enforce_eager": True},
        )
    )
    try:
        shards = [pid for pid in children() - before if "Worker" in name_of(pid)]
        asks = [make_request([7, n], sampling=GREEDY) for n in range(2)]
        assert all(is_true_to(model(), a) for a in loop.call(all_written(backend, asks)))
        new = model(seed=5)
        weights = Weights(1, dict(new.state_dict()))
        sizes = [len(bucket) for bucket in weight_buckets(weights, bucket_bytes=40_000)]
        loop.call(backend.load_weights(weights))
        asks = [make_request([7, n], sampling=GREEDY) for n in range(2)]
        answers = loop.call(all_written(backend, asks))
        assert not list(backend._folder.iterdir()), "a bucket is gone when it was read"
    finally:
        loop.call(backend.close())
    assert len(shards) == 2
    assert len(sizes) > 5
    assert all(is_true_to(new, answer) for answer in answers)
    assert [a.tokens for a in answers] == [greedy(new, [7, n], 20) for n in range(2)]
    assert children() <= before, "no process is left behind"


@pytest.fixture(scope="module", params=["process", "server"])
def engine(request, folder, loop, tmp_path_factory):
    """A backend that writes with `engine.model`, and the process that must not die."""
    start = process if request.param == "process" else server
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        environment.setenv("HF_HUB_OFFLINE", "1")
        yield from start(folder, loop, tmp_path_factory.mktemp("hand-over"))


def process(folder, loop, _):
    before = children()
    backend = loop.call(
        VllmProcess.start(
            model=str(folder),
            slots=SLOTS,
            context=CONTEXT,
            dtype="float32",
            is_seeded=True,
            options={"enforce_eager": True},
        )
    )
    victim = next(pid for pid in children() - before if "EngineCore" in name_of(pid))
    yield SimpleNamespace(backend=backend, model=model(), victim=victim, kind="process")
    weights = backend._folder
    loop.call(backend.close())
    assert not weights.exists()
    assert children() <= before, "no process is left behind"


def server(folder, loop, hand_over):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "--model": folder,
        "--port": port,
        "--dtype": "float32",
        "--max-num-seqs": SLOTS,
        "--max-model-len": CONTEXT,
        "--scheduling-policy": "priority",
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--skip-tokenizer-init", "--enforce-eager"]
    started = subprocess.Popen(
        command + [str(part) for option in options.items() for part in option],
        env=os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "WARNING"},
        start_new_session=True,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        loop.call(answering(url, started))
        backend = loop.call(opened(url, hand_over))
        yield SimpleNamespace(
            backend=backend, model=model(), victim=started.pid, kind="server", url=url
        )
        loop.call(backend.close())
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def opened(url, hand_over, **changes):
    wanted = {"vocabulary": 128, "context": CONTEXT, "temperature": 0.7} | changes
    return VllmServer.connect(url, ServerRequirements(**wanted), weights_folder=hand_over)


async def answering(url, started):
    until = time.monotonic() + START_SECONDS
    client = Server(url)
    while time.monotonic() < until and started.poll() is None:
        with suppress(EngineError):
            await client.get("/version")
            return await client.close()
        await asyncio.sleep(0.5)
    pytest.fail("the server did not start")


def children():
    """All processes below this one, but for the one that Python keeps for its own cleaning up."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            pid, rest = stat.read_text().split(" (", 1)
            state, parent = rest.rsplit(") ", 1)[1].split()[:2]
            if state != "Z" and "resource_tracker" not in name_of(pid):
                parents[int(pid)] = int(parent)
    below = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return below - {os.getpid()}


def name_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()


_ids = iter(range(10**6))


def make_request(tokens=PROMPT, **changes):
    usual = {
        "id": f"answer-{next(_ids):08d}",
        "tokens": list(tokens),
        "max_tokens": 20,
        "stop_tokens": frozenset(),
        "sampling": Sampling(temperature=0.7),
        "priority": 0,
    }
    return GenerationRequest(**(usual | changes))


async def written(backend, request, *, begun=None):
    """The whole stream: tokens, log-probabilities, how it ended and what was reused.

    `begun` is told of the first token.
    """
    answer = SimpleNamespace(request=request, tokens=[], logprobs=[], end=None, reused=None)
    async for delta in backend.stream(request):
        assert answer.end is None, "nothing comes after the end"
        assert len(delta.tokens) == len(delta.logprobs)
        answer.tokens += delta.tokens
        if begun is not None and answer.tokens:
            begun.set()
        answer.logprobs += delta.logprobs
        answer.end = delta.end
        answer.reused = delta.num_cached_tokens if answer.reused is None else answer.reused
    return answer


async def all_written(backend, asks):
    return await asyncio.gather(*(written(backend, request) for request in asks))


@torch.no_grad()
def expected_logprobs(model, answer):
    sampling = answer.request.sampling
    text = torch.tensor([*answer.request.tokens, *answer.tokens])
    logits_TV = model(text[None]).logits[0, len(answer.request.tokens) - 1 : -1].float()
    logits_TV = logits_TV / (sampling.temperature or 1)
    if sampling.top_k is not None:
        least_T1 = logits_TV.topk(sampling.top_k).values[:, -1:]
        logits_TV = logits_TV.masked_fill(logits_TV < least_T1, -torch.inf)
    chosen_T1 = torch.tensor(answer.tokens, dtype=torch.long)[:, None]
    return logits_TV.log_softmax(-1).gather(-1, chosen_T1)[:, 0].tolist()


@torch.no_grad()
def greedy(model, tokens, count):
    text = list(tokens)
    for _ in range(count):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(tokens) :]


def is_true_to(model, answer):
    return answer.logprobs == pytest.approx(expected_logprobs(model, answer), abs=1e-4)


def test_every_token_comes_with_its_logprob_at_the_temperature(engine, loop):
    samplings = [
        Sampling(temperature=0.7),
        Sampling(temperature=1.0),
        Sampling(temperature=1.3, top_k=5),
        GREEDY,
    ]
    asks = [make_request([*PROMPT, n], sampling=s) for n in range(2) for s in samplings]
    answers = loop.call(all_written(engine.backend, asks))
    assert [len(answer.tokens) for answer in answers] == [20] * 8
    assert {answer.end for answer in answers} == {"length"}
    assert all(is_true_to(engine.model, answer) for answer in answers)
    assert answers[3].tokens == greedy(engine.model, asks[3].tokens, 20)


def test_a_stop_token_ends_the_answer_and_belongs_to_it(engine, loop):
    full = greedy(engine.model, PROMPT, 20)
    stop = next(token for token in full if full.index(token) >= 4)
    (answer,) = loop.call(
        all_written(engine.backend, [make_request(sampling=GREEDY, stop_tokens=frozenset({stop}))])
    )
    assert answer.tokens == full[: full.index(stop) + 1]
    assert answer.end == "stop"


def test_an_answer_that_is_broken_off_gives_each_token_once_and_can_be_written_on(engine, loop):
    async def broken_off():
        begun = asyncio.Event()
        asks = [make_request([7, n], sampling=GREEDY, max_tokens=200) for n in range(SLOTS + 1)]
        streams = [
            asyncio.ensure_future(written(engine.backend, request, begun=begun)) for request in asks
        ]
        await begun.wait()
        await engine.backend.abort([request.id for request in asks])
        return await asyncio.gather(*streams)

    # A server may lag behind its engine, which is then done before it hears that it should stop.
    for _ in range(20):
        answers = loop.call(broken_off())
        for answer in answers:
            assert is_true_to(engine.model, answer)
            assert answer.end == "abort" or len(answer.tokens) == answer.request.max_tokens
        cut = [answer for answer in answers if 0 < len(answer.tokens) < 200]
        if cut:
            break
    else:
        pytest.fail("none was ever broken off in the middle")
    part, prompt = cut[0].tokens, list(cut[0].request.tokens)
    rest = make_request([*prompt, *part], sampling=GREEDY, max_tokens=12)
    (answer,) = loop.call(all_written(engine.backend, [rest]))
    assert part + answer.tokens == greedy(engine.model, prompt, len(part) + 12)


def test_an_answer_can_be_broken_off_before_its_stream_begins_and_after_it_ended(engine, loop):
    early, late = make_request(), make_request(max_tokens=2)
    loop.call(engine.backend.abort([early.id]))
    (broken_off,) = loop.call(all_written(engine.backend, [early]))
    assert (broken_off.tokens, broken_off.end) == ([], "abort")
    (ended,) = loop.call(all_written(engine.backend, [late]))
    loop.call(engine.backend.abort([late.id]))
    assert ended.end == "length"


def test_an_answer_broken_off_at_its_first_breath_ends(engine, loop):
    async def at_once(delay):
        hasty = [make_request([6, n], max_tokens=250) for n in range(2 * SLOTS)]
        streams = [asyncio.ensure_future(written(engine.backend, request)) for request in hasty]
        await asyncio.sleep(delay)
        await engine.backend.abort([request.id for request in hasty])
        return await asyncio.wait_for(asyncio.gather(*streams), 30)

    ends = Counter()
    for delay in (0, 0.002, 0.02):
        answers = loop.call(at_once(delay))
        ends.update(answer.end for answer in answers)
        assert all(is_true_to(engine.model, answer) for answer in answers)
    # A server may complete an answer before it hears that it should stop.
    assert ends["abort"] > 0
    assert ends.keys() <= {"abort", "length"}


def test_new_weights_write_from_then_on_and_no_prefix_of_the_old_ones_is_left(engine, loop):
    long = [n % 128 for n in range(200)]
    loop.call(all_written(engine.backend, [make_request(long)]))
    (again,) = loop.call(all_written(engine.backend, [make_request(long)]))
    for seed in (1, 2):
        new = model(seed=seed)
        loop.call(engine.backend.load_weights(Weights(seed, dict(new.state_dict()))))
        answers = loop.call(
            all_written(
                engine.backend,
                [make_request(long, sampling=GREEDY), make_request(PROMPT, sampling=GREEDY)],
            )
        )
        assert all(is_true_to(new, answer) for answer in answers)
        assert answers[1].tokens == greedy(new, PROMPT, 20)
        assert answers[0].reused == 0
        engine.model = new
    if engine.kind == "process":
        assert again.reused > 0, "a prefix is reused as long as the weights stay"


def test_the_same_seed_draws_the_same_answer_in_any_batch(engine, loop):
    """Mode redraw: an interrupted answer is drawn again from its own seed."""
    prompts = [[5, 9, n] for n in range(6)]
    hot = Sampling(temperature=1.0)

    def asked(numbers):
        return [
            make_request(prompts[n], seed=2**62 + n, sampling=hot, max_tokens=40) for n in numbers
        ]

    together = loop.call(all_written(engine.backend, asked(range(6))))
    backwards = loop.call(all_written(engine.backend, asked(reversed(range(6)))))[::-1]
    alone = [loop.call(all_written(engine.backend, asked([n])))[0] for n in (0, 3)]
    assert [a.tokens for a in backwards] == [a.tokens for a in together]
    assert [a.tokens for a in alone] == [together[0].tokens, together[3].tokens]
    others = [make_request(prompts[n], seed=9 + n, sampling=hot, max_tokens=40) for n in range(6)]
    unlike = loop.call(all_written(engine.backend, others))
    assert not {tuple(a.tokens) for a in unlike} & {tuple(a.tokens) for a in together}
    assert all(is_true_to(engine.model, answer) for answer in together)


def test_seeds_hold_for_more_prompts_than_a_step_reads(engine, loop):
    """vLLM for CPUs dies of a prompt with a seed that it reads in pieces."""
    if engine.kind == "server":
        pytest.skip("a server has the settings it was started with")
    long = [[(n * place) % 128 for place in range(200)] for n in range(2, 2 + 2 * SLOTS)]
    asks = [make_request(tokens, seed=n, max_tokens=8) for n, tokens in enumerate(long)]
    together = loop.call(all_written(engine.backend, asks))
    again = [make_request(tokens, seed=n, max_tokens=8) for n, tokens in enumerate(long)]
    alone = [loop.call(all_written(engine.backend, [request]))[0] for request in again]
    assert [a.tokens for a in together] == [a.tokens for a in alone]


def test_the_tokens_of_an_answer_are_scored(engine, loop):
    tokens = [*PROMPT, *greedy(engine.model, PROMPT, 10), 77, 3]
    scores = loop.call(engine.backend.score(tokens, start=len(PROMPT)))
    with torch.no_grad():
        logprobs = engine.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = [logprobs[n - 1, tokens[n]].item() for n in range(len(PROMPT), len(tokens))]
    assert scores == pytest.approx(expected, abs=1e-4)


def test_a_server_that_does_not_fit_is_refused_with_what_was_found(engine, loop, tmp_path):
    if engine.kind != "server":
        pytest.skip("only a server is looked at")
    for changes, words in [
        ({"vocabulary": 129}, "128 tokens, but the model that is trained has 129"),
        ({"context": 300}, "context of 256 tokens, but .* need 300; .*--max-model-len 300"),
        ({"slots": 8}, "has 4 slots, not 8.*--max-num-seqs 8"),
    ]:
        with pytest.raises(EngineError, match=words):
            loop.call(opened(engine.url, tmp_path, **changes))


def test_an_option_that_vllm_does_not_have_is_refused(loop, folder):
    def start(**options):
        loop.call(VllmProcess.start(model=str(folder), slots=1, options=options))

    with pytest.raises(EngineError, match="did you mean 'enforce_eager'"):
        start(enforce_eagr=True)
    with pytest.raises(EngineError, match=r"logprobs_mode .* leave it out"):
        start(logprobs_mode="raw_logprobs")


def test_the_cpu_build_has_no_sleep_mode_and_says_so(loop, folder):
    start = VllmProcess.start(model=str(folder), slots=1, can_sleep=True)
    with pytest.raises(EngineError, match="Sleep mode is not supported on current platform"):
        loop.call(start)


def test_streams_of_an_engine_that_was_killed_say_so(engine, loop):
    async def killed():
        streams = [
            asyncio.ensure_future(written(engine.backend, make_request([n], max_tokens=250)))
            for n in range(5 * SLOTS)
        ]
        await asyncio.sleep(0.1)
        os.kill(engine.victim, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 60)

    ends = loop.call(killed())
    lost = [end for end in ends if isinstance(end, EngineLost)]
    assert lost
    assert {end.end for end in ends if end not in lost} <= {"length"}, ends
    with pytest.raises(EngineLost):
        loop.call(engine.backend.load_weights(Weights(9, dict(model().state_dict()))))
    with pytest.raises(EngineLost):
        loop.call(all_written(engine.backend, [make_request()]))
