"""What is said to SGLang and understood of it, without SGLang; tests/engines has the real one."""

import asyncio
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.engines.installed import SGLANG
from sortedrl.engines.sampling import Sampling
from sortedrl.engines.sglang.sglang_request import HIGH_FIRST, NO_ORDER, SglangStream
from sortedrl.engines.sglang.sglang_server import SglangServer
from sortedrl.engines.streaming.backend import GenerationRequest, ServerRequirements
from sortedrl.errors import EngineError, EngineLost

VOCABULARY = 16
INFO = {
    "version": "0.5.21",
    "max_req_input_len": 64,
    "max_running_requests": 4,
    "enable_priority_scheduling": True,
    "incremental_streaming_output": True,
}


def make_request(*, max_tokens=100, stop_tokens=(), **sampling):
    return GenerationRequest(
        id="request-1",
        tokens=[1, 2],
        max_tokens=max_tokens,
        stop_tokens=frozenset(stop_tokens),
        sampling=Sampling(**sampling),
        priority=3,
    )


def chunk(tokens, *, shown, count, reason=None, shown_logprobs=None):
    """What SGLang says after `count` tokens, showing the last so many of them."""
    logprobs = [(-token / 10, token, None) for token in tokens[:count]]
    shown_logprobs = shown if shown_logprobs is None else shown_logprobs
    return {
        "output_ids": tokens[count - shown : count],
        "meta_info": {
            "finish_reason": reason,
            "completion_tokens": count,
            "cached_tokens": 1,
            "output_token_logprobs": logprobs[count - shown_logprobs :],
        },
    }


@given(data=st.data(), tokens=st.lists(st.integers(10, 99), max_size=12), is_whole=st.booleans())
def test_each_token_is_handed_on_once_however_often_it_is_said(data, tokens, is_whole):
    answer = SglangStream(make_request(), priority_sign=NO_ORDER)
    answer.next_body()
    deltas, said = [], 0
    while said < len(tokens):
        fresh = data.draw(st.integers(1, len(tokens) - said))
        said += fresh
        shown = said if is_whole else fresh
        deltas.append(answer.delta(chunk(tokens, shown=shown, count=said)))
    last = data.draw(st.sampled_from([min(1, said), said]))
    end = chunk(tokens, shown=last, count=said, reason={"type": "abort"}, shown_logprobs=said)
    deltas.append(answer.delta(end))
    assert [token for delta in deltas for token in delta.tokens] == tokens
    assert [logprob for delta in deltas for logprob in delta.logprobs] == [-t / 10 for t in tokens]
    assert [delta.end for delta in deltas] == [None] * (len(deltas) - 1) + ["abort"]
    assert sum(delta.num_cached_tokens for delta in deltas[1:]) == 0
    assert answer.is_over


def test_after_a_stop_token_that_does_not_count_the_rest_is_asked_for():
    answer = SglangStream(make_request(stop_tokens=[99]), priority_sign=HIGH_FIRST)
    first = answer.next_body()
    assert (first["priority"], first["sampling_params"]["ignore_eos"]) == (-3, False)
    delta = answer.delta(chunk([7, 8], shown=2, count=2, reason={"type": "stop", "matched": 8}))
    assert (delta.end, answer.is_over, answer.is_broken) == (None, False, False)
    rest = answer.next_body()
    assert rest["rid"] != first["rid"]
    assert rest["input_ids"] == [1, 2, 7, 8]
    assert rest["sampling_params"]["max_new_tokens"] == 98
    delta = answer.delta(chunk([99], shown=1, count=1, reason={"type": "stop", "matched": 99}))
    assert (delta.tokens, delta.end, delta.num_cached_tokens) == ([99], "stop", 0)


@pytest.mark.parametrize(
    "said",
    [
        {"error": {"message": "too long"}},
        chunk([], shown=0, count=0, reason={"type": "abort", "status_code": 400, "message": "no"}),
        chunk([7, 8], shown=2, count=2, shown_logprobs=1),
    ],
)
def test_an_answer_that_cannot_be_used_is_an_error(said):
    answer = SglangStream(make_request(), priority_sign=NO_ORDER)
    answer.next_body()
    with pytest.raises(EngineError):
        answer.delta(said)


def test_a_missing_package_is_named_with_its_extra():
    if SGLANG.installed is not None:
        pytest.skip("SGLang is installed")
    with pytest.raises(EngineError, match=r"pip install 'sortedrl\[sglang\]'"):
        SGLANG.check_installed()


class Fake(BaseHTTPRequestHandler):
    """A server that says what an SGLang server would say, with changes."""

    def do_GET(self):
        if self.server.info is None:
            self.send_error(404)
        else:
            self.say(self.server.info)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body.get("stream"):
            self.say(b"data: " + json.dumps(chunk([7], shown=1, count=1)).encode() + b"\n\n")
            return
        if body.get("token_ids_logprob", [0])[0] >= VOCABULARY:
            self.send_error(400)
            return
        temperature = body["sampling_params"]["temperature"] if self.server.is_tempered else 1
        about = {
            "output_token_logprobs": [(-1.0, 3, None)],
            "output_top_logprobs": [[(-k / temperature, k, None) for k in range(1, 9)]],
        }
        self.say({"output_ids": [3], "meta_info": about if self.server.has_logprobs else {}})

    def say(self, words):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(words if isinstance(words, bytes) else json.dumps(words).encode())

    def log_message(self, *_):
        pass


@contextmanager
def fake_server(info, *, is_tempered=True, has_logprobs=True):
    with ThreadingHTTPServer(("127.0.0.1", 0), Fake) as fake:
        fake.info, fake.is_tempered, fake.has_logprobs = info, is_tempered, has_logprobs
        thread = threading.Thread(target=fake.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{fake.server_port}"
        finally:
            fake.shutdown()
            thread.join()


async def opened(url, folder, *, slots=None, temperature=0.5):
    required = ServerRequirements(
        vocabulary=VOCABULARY, context=64, temperature=temperature, slots=slots
    )
    return await SglangServer.connect(url, required, weights_folder=folder)


async def limits_of(url, folder, **how):
    backend = await opened(url, folder, **how)
    await backend.close()
    return backend.limits


@pytest.mark.parametrize(
    ("info", "world", "words"),
    [
        (None, {}, "must answer /server_info, but it does not"),
        ({"status": "ok"}, {}, "another format"),
        (INFO | {"version": "0.4.0"}, {}, "0.4.0"),
        (INFO | {"max_req_input_len": 63}, {}, "room for 63"),
        (INFO | {"incremental_streaming_output": False}, {}, "repeats the whole answer"),
        (INFO | {"max_running_requests": None}, {}, "number of slots"),
        (INFO, {"is_tempered": False}, "SGLANG_RETURN_ORIGINAL_LOGPROB"),
        (INFO, {"has_logprobs": False}, "must return log-probabilities"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_with_the_command_that_starts_it_right(
    tmp_path, info, world, words
):
    with fake_server(info, **world) as url, pytest.raises(EngineError, match=words) as refusal:
        asyncio.run(limits_of(url, tmp_path))
    assert "python -m sglang.launch_server" in str(refusal.value)


def test_a_server_out_of_reach_is_refused_with_the_command_that_starts_it(tmp_path):
    with pytest.raises(EngineError, match=r"must be running.*sglang.launch_server"):
        asyncio.run(limits_of("http://127.0.0.1:1", tmp_path))


def test_the_server_says_its_slots_and_the_caller_where_it_does_not(tmp_path):
    with fake_server(INFO) as url:
        assert asyncio.run(limits_of(url, tmp_path, slots=9)).slots == 4
    with fake_server(INFO | {"max_running_requests": None}) as url:
        assert asyncio.run(limits_of(url, tmp_path, slots=9)).slots == 9


def test_raw_log_probabilities_are_those_at_temperature_one(tmp_path):
    with fake_server(INFO, is_tempered=False) as url:
        assert asyncio.run(limits_of(url, tmp_path, temperature=1.0)).context == 64


def test_a_stream_that_stops_without_an_end_is_a_lost_engine(tmp_path):
    async def read(url):
        backend = await opened(url, tmp_path)
        try:
            return [delta async for delta in backend.stream(make_request())]
        finally:
            await backend.close()

    with fake_server(INFO) as url, pytest.raises(EngineLost, match="without a finish reason"):
        asyncio.run(read(url))
