"""The client of a vLLM server, against a stand-in that answers as servers that do not fit do."""

import asyncio
import json
import math
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from sortedrl.engines.installed import VLLM
from sortedrl.engines.sampling import Sampling
from sortedrl.engines.streaming.backend import GenerationRequest, ServerRequirements
from sortedrl.engines.vllm.vllm_server import VllmServer
from sortedrl.errors import EngineError, EngineLost

TEMPERATURE = 0.5
RIGHT_COMMAND = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --scheduling-policy priority "
    "--logprobs-mode processed_logprobs --generation-config vllm --skip-tokenizer-init "
    "--worker-extension-cls sortedrl.engines.vllm.worker_extension.WeightReceiver "
    "--max-model-len 64 --max-num-seqs SLOTS"
)


def event(*tokens, end=None):
    logprobs = {"token_logprobs": [-0.5] * len(tokens)}
    return {"choices": [{"token_ids": tokens, "logprobs": logprobs, "finish_reason": end}]}


class StandIn:
    """What a good server says; a test changes it."""

    def __init__(self):
        self.version = {"version": "0.32.0"}
        self.context = 64
        self.policy = "priority"
        self.is_in_development = True
        self.vocabulary = 128
        self.has_token_ids = True
        self.has_logprobs = True
        self.is_processed = True
        self.events = [event(1), event(2, 3, end="length")]
        self.is_cut = False

    def answer(self, path, body):
        if path == "/version":
            return 200, self.version
        if path == "/v1/models":
            return 200, {"data": [{"id": "m", "max_model_len": self.context}]}
        if path.startswith("/server_info") and self.is_in_development:
            config = {
                "scheduler_config": {"policy": self.policy, "max_num_seqs": 8},
                "parallel_config": {"data_parallel_size": 2},
            }
            return 200, {"vllm_config": config}
        if path == "/v1/completions" and "logit_bias" in body:
            return 400, {"error": f"out-of-vocab token ids. Vocabulary size: {self.vocabulary}"}
        if path == "/v1/completions":
            return 200, {"choices": [self.choice(body["temperature"])]}
        return 404, {"detail": "Not Found"}

    def choice(self, temperature):
        scale = 1 / temperature if self.is_processed else 1
        best = -math.log1p(math.exp(-2 * scale))
        tops = [{"token_id:4": best, "token_id:9": best - 2 * scale}]
        return {
            "token_ids": [4] if self.has_token_ids else None,
            "logprobs": {"top_logprobs": tops} if self.has_logprobs else None,
        }


@contextmanager
def serving(stand_in):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.say(*stand_in.answer(self.path, None))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body.get("stream"):
                return self.stream()
            return self.say(*stand_in.answer(self.path, body))

        def say(self, status, answer):
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def stream(self):
            lines = [f"data: {json.dumps(event)}\n\n" for event in stand_in.events]
            content = "".join([*lines, "data: [DONE]\n\n"]).encode()
            self.send_response(200)
            missing = 10 if stand_in.is_cut else 0
            self.send_header("Content-Length", str(len(content) + missing))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def opened(url, folder, **changes):
    wanted = {"vocabulary": 128, "context": 64, "temperature": TEMPERATURE} | changes
    return await VllmServer.connect(url, ServerRequirements(**wanted), weights_folder=folder)


async def limits(url, folder, **changes):
    backend = await opened(url, folder, **changes)
    await backend.close()
    return backend.limits


async def deltas(url, folder):
    backend = await opened(url, folder)
    request = GenerationRequest(
        id="a",
        tokens=[1],
        max_tokens=3,
        stop_tokens=frozenset(),
        sampling=Sampling(temperature=TEMPERATURE),
        priority=0,
    )
    try:
        return [delta async for delta in backend.stream(request)]
    finally:
        await backend.close()


def test_a_server_that_fits_says_how_much_it_can_do(tmp_path):
    with serving(StandIn()) as url:
        found = asyncio.run(limits(url, tmp_path))
    assert (found.slots, found.context, found.vocabulary) == (16, 64, 128)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "hello"}, "is not a vLLM server"),
        ({"version": {"version": "0.9.1"}}, "must be >=0.26,<0.33.* has 0.9.1"),
        ({"context": 32}, "context of 32 tokens, but prompts and answers need 64"),
        ({"is_in_development": False}, "cannot load new weights"),
        ({"policy": "fcfs"}, "scheduling policy fcfs"),
        ({"vocabulary": 256}, "256 tokens, but the model that is trained has 128"),
        ({"has_token_ids": False}, "does not return token ids"),
        ({"has_logprobs": False}, "does not return log-probabilities"),
        ({"is_processed": False}, "log-probabilities before temperature"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_with_the_command_that_helps(tmp_path, change, words):
    stand_in = StandIn()
    for name, value in change.items():
        setattr(stand_in, name, value)
    with serving(stand_in) as url, pytest.raises(EngineError, match=words) as refusal:
        asyncio.run(limits(url, tmp_path))
    assert url in str(refusal.value)
    assert RIGHT_COMMAND in str(refusal.value) or "pip install" in str(refusal.value)


def test_logprobs_before_temperature_serve_at_temperature_1(tmp_path):
    stand_in = StandIn()
    stand_in.is_processed = False
    with serving(stand_in) as url:
        assert asyncio.run(limits(url, tmp_path, temperature=1.0)).slots == 16


def test_other_slots_than_the_server_has_are_refused(tmp_path):
    with serving(StandIn()) as url, pytest.raises(EngineError, match="has 16 slots, not 4"):
        asyncio.run(limits(url, tmp_path, slots=4))


def test_a_server_out_of_reach_is_refused_with_the_command_that_helps(tmp_path):
    with serving(StandIn()) as url:
        pass
    with pytest.raises(EngineError, match=f"{url} does not respond.*vllm serve"):
        asyncio.run(limits(url, tmp_path))


def test_a_stream_gives_each_token_with_its_logprob(tmp_path):
    with serving(StandIn()) as url:
        answer = asyncio.run(deltas(url, tmp_path))
    assert [(list(delta.tokens), delta.end) for delta in answer] == [
        ([1], None),
        ([2, 3], "length"),
    ]
    assert [list(delta.logprobs) for delta in answer] == [[-0.5], [-0.5, -0.5]]


@pytest.mark.parametrize(
    "change",
    [
        {"events": [event(1)]},
        {"events": [event(1), {"error": {"message": "EngineCore died", "code": 500}}]},
        {"is_cut": True},
    ],
    ids=["no end", "an error within", "a cut connection"],
)
def test_a_stream_that_does_not_reach_its_end_is_an_engine_lost(tmp_path, change):
    stand_in = StandIn()
    for name, value in change.items():
        setattr(stand_in, name, value)
    with serving(stand_in) as url, pytest.raises(EngineLost):
        asyncio.run(deltas(url, tmp_path))


def test_a_missing_package_is_refused_by_the_name_of_the_extra():
    missing = replace(VLLM, packages=("no-such-package",))
    with pytest.raises(EngineError, match=r"pip install 'sortedrl\[vllm\]'"):
        missing.check_installed()


@pytest.mark.parametrize("version", ["0.25.9", "0.33.0", "nightly"])
def test_a_version_that_was_not_tried_is_refused(version):
    with pytest.raises(EngineError, match=f"here has {version}"):
        VLLM.check(version, place="here", remedy="nothing")


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.32.1rc1", "0.32.0+cpu"])
def test_the_versions_that_were_tried_are_taken(version):
    VLLM.check(version, place="here", remedy="nothing")
