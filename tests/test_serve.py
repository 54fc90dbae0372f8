"""The endpoint for agent programs: one server for all tests, with a real engine behind it."""

import http.client
import json
import os
import random
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from sortedrl.cli import main
from sortedrl.core.clock import WallClock
from sortedrl.core.events import Finish, Order, Reply, Start, read_events
from sortedrl.core.meter import measure
from sortedrl.engines.generation import run_to_end
from sortedrl.engines.native import NativeEngine, Sampling
from sortedrl.errors import ConfigError
from sortedrl.models.loading import load_model, load_tokenizer, stop_tokens
from sortedrl.runs.endpoint import Endpoint, WeightReader
from sortedrl.runs.serve import ServeSettings, listening, serve
from sortedrl.runs.turns import HttpError, Turn, TurnLog, TurnScheduler
from sortedrl.types import Prompt, Trajectory, Weights

MODEL = "tiny:hidden=32,layers=2,heads=2,context=256"
SLOTS, MOST, QUEUE = 3, 200, 4
PATIENCE_SECONDS = 60
GENERATE, COMPLETE, LOAD = (
    "/inference/v1/generate",
    "/v1/completions",
    "/update_weights_from_disk",
)
JSON = {"Content-Type": "application/json"}


class Paced:
    """An engine that a test can stop between two steps."""

    def __init__(self, engine):
        self._engine = engine
        self._allowed = threading.Condition()
        self._left = None

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def allow(self, steps):
        """Let it make so many further steps; `None` for any number."""
        with self._allowed:
            self._left = steps
            self._allowed.notify_all()

    def step(self):
        with self._allowed:
            self._allowed.wait_for(lambda: self._left is None or self._left > 0)
            self._left = None if self._left is None else self._left - 1
            self._allowed.notify_all()
        return self._engine.step()

    def rest(self):
        """Wait until the steps that were allowed are made."""
        with self._allowed:
            assert self._allowed.wait_for(lambda: self._left == 0, timeout=PATIENCE_SECONDS)


class World:
    """A server, its engine, and a second engine to compare with."""

    def __init__(self, folder):
        torch.set_num_threads(1)
        self.tokenizer = load_tokenizer(MODEL)
        model = load_model(MODEL, dtype=None, device="cpu")
        self.folder = folder
        self.events = []
        self.engine = Paced(
            NativeEngine(
                model,
                slots=SLOTS,
                max_tokens=MOST,
                tokenizer=self.tokenizer,
                keeps_prefixes=True,
            )
        )
        log = TurnLog(self.events.append, clock=WallClock(), slots=SLOTS, seed=7, version=0)
        self.scheduler = TurnScheduler(self.engine, queue=QUEUE, seed=7, log=log)
        self.endpoint = Endpoint(
            self.scheduler,
            name=MODEL,
            limits=self.engine.request_limits[0],
            max_tokens=MOST,
            stop_tokens=stop_tokens(model),
            tokenizer=self.tokenizer,
            weights=WeightReader(folder, model),
        )
        self._plain = NativeEngine(
            load_model(MODEL, dtype=None, device="cpu"), slots=1, tokenizer=self.tokenizer
        )
        self.weights = [self._weights(0.0, 0), self._weights(0.3, 1)]

    def _weights(self, noise, seed):
        model = load_model(MODEL, dtype=None, device="cpu")
        generator = torch.Generator().manual_seed(seed)
        path = self.folder / f"weights-{seed}"
        path.mkdir()
        tensors = {
            name: parameter.detach() + noise * torch.randn(parameter.shape, generator=generator)
            for name, parameter in model.named_parameters()
        }
        save_file(tensors, path / "model.safetensors")
        return tensors

    def written(self, tokens, *, seed, weights=0, begun=(), **options):
        """What an engine of one slot writes, with nothing beside it; no token ends it by itself."""
        self._plain.load_weights(Weights(self._plain.version + 1, self.weights[weights]))
        trajectory = Trajectory(
            prompt=Prompt(id=0, tokens=tokens), sample_index=0, group=0, seed=seed, segments=begun
        )
        sampling = Sampling(**{"stop_tokens": frozenset(), **options})
        self._plain.submit([trajectory], tolerance=None, sampling=sampling)
        return run_to_end(self._plain, [(0, 0)], show_progress=False)[0]

    def use(self, weights):
        """Serve these weights; nothing runs."""
        status, answer, _ = self.post(LOAD, {"model_path": f"weights-{weights}"})
        assert status == 200, answer

    def post(self, path, body, *, headers=(), port=None):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", path, raw, {**JSON, **dict(headers)}, port=port)

    def ask(self, method, path, raw=None, headers=(), *, port=None):
        port = self.port if port is None else port
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
        try:
            connection.request(method, path, raw, dict(headers))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read()), dict(answer.headers)
        finally:
            connection.close()

    def until(self, holds):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not holds(self.scheduler.counts):
            assert time.monotonic() < deadline, self.scheduler.counts
            time.sleep(0.01)

    def take_on(self, count):
        """Make steps until so many turns run: the engine takes on what waits between two steps."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (counts := self.scheduler.counts).running < count:
            assert time.monotonic() < deadline, counts
            self.engine.allow(min(counts.waiting, 1))
            time.sleep(0.01)
        self.engine.allow(0)

    @contextmanager
    def held(self, count, *, max_tokens=MOST):
        """So many turns that run, on an engine that makes no step; they end after the block."""
        self.engine.allow(0)
        with ThreadPoolExecutor(count) as pool:
            try:
                asked = [
                    pool.submit(
                        self.post,
                        GENERATE,
                        request([9, number], seed=number, max_tokens=max_tokens, ignore_eos=True),
                    )
                    for number in range(count)
                ]
                self.take_on(count)
                yield asked
            finally:
                self.engine.allow(None)


def request(tokens, **sampling):
    return {"model": MODEL, "token_ids": tokens, "sampling_params": {"logprobs": 1, **sampling}}


def parts(answer):
    """Tokens, log-probabilities and versions of an answer, which must agree with one another."""
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{t}" for t in choice["token_ids"]]
    spans = choice["weight_versions"]
    ends = [0, *(span["end"] for span in spans)]
    assert [span["start"] for span in spans] == ends[:-1]
    assert ends[-1] == len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    return choice["token_ids"], [entry["logprob"] for entry in content], spans


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("weights"))
    worker = threading.Thread(target=world.scheduler.run)
    worker.start()
    settings = ServeSettings(port=0, slots=SLOTS, queue=QUEUE)
    with listening(world.endpoint, settings, tell=print) as server:
        world.port = server.server_port
        yield world
        world.scheduler.close()
        worker.join()
    order = Order()
    for event in world.events:
        order(event)
        if isinstance(event, Start):
            assert event.running <= SLOTS
    ledger = measure(world.events).run.ledger
    assert ledger.decoded == world.engine.stats.decoded_tokens


@pytest.fixture(autouse=True)
def idle(request):
    yield
    if "world" in request.fixturenames:
        request.getfixturevalue("world").until(lambda counts: not counts.running + counts.waiting)


def test_every_request_is_answered_once_as_if_it_were_alone(world):
    world.use(0)
    draw = random.Random(0)
    asked = []
    for number in range(16):
        tokens = [draw.randrange(256) for _ in range(draw.randrange(1, 40))]
        options = draw.choice(
            [{}, {"temperature": 0.0}, {"top_k": 5, "temperature": 0.7}, {"top_p": 0.8}]
        )
        ends = draw.sample(range(256), 8)
        asked.append((tokens, draw.randrange(-9, 2**63), 1 + 3 * number, ends, options))
    replays = [*asked, *asked[::-1]]

    def ask(number):
        tokens, seed, most, ends, options = replays[number]
        headers = {"X-Session-ID": f"s{number % 5}"} if number % 3 else {}
        body = request(tokens, seed=seed, max_tokens=most, stop_token_ids=ends, **options)
        return world.post(GENERATE, body, headers=headers)

    before = world.scheduler.counts.answered
    with ThreadPoolExecutor(SLOTS + QUEUE) as pool:  # one more could be refused
        answers = list(pool.map(ask, range(len(replays))))
    assert world.scheduler.counts.answered - before == len(replays)
    ids = {answer["request_id"] for _, answer, _ in answers}
    assert len(ids) == len(replays)
    for (tokens, seed, most, ends, options), (status, answer, _) in zip(
        replays, answers, strict=True
    ):
        assert status == 200
        written, logprobs, _ = parts(answer)
        alone = world.written(
            tokens,
            seed=seed,
            max_tokens=most,
            stop_tokens=frozenset(ends) | {world.tokenizer.eos_token_id},
            **options,
        )
        assert written == alone.tokens
        assert logprobs == pytest.approx(alone.logprobs, abs=1e-5)
        assert answer["choices"][0]["finish_reason"] == alone.finish_reason


@pytest.mark.parametrize("steps", [0, 1, 20])
def test_new_weights_interrupt_a_turn_which_keeps_its_tokens_and_goes_on_with_them(world, steps):
    world.use(0)
    old = world.scheduler.counts.weight_version
    with world.held(SLOTS, max_tokens=60) as asked, ThreadPoolExecutor(1) as pool:
        if steps:
            world.engine.allow(steps)
            world.engine.rest()
        loading = pool.submit(
            world.post, LOAD, {"model_path": "weights-1", "weight_version": f"step-{steps}"}
        )
        time.sleep(0.05)  # it may come before or after the next step
        world.engine.allow(None)
        status, loaded, _ = loading.result()
        assert (status, loaded["weight_version"]) == (200, f"step-{steps}")
        assert loaded["num_paused_requests"] == SLOTS
    for number, future in enumerate(asked):
        status, answer, _ = future.result()
        assert status == 200
        written, logprobs, spans = parts(answer)
        kept = sum(span["end"] - span["start"] for span in spans if span["version"] == old)
        assert {span["version"] for span in spans} <= {old, f"step-{steps}"}
        assert max(0, steps - 1) <= kept < len(written) == 60
        under_old = world.written([9, number], seed=number, max_tokens=60)
        assert written[:kept] == under_old.tokens[:kept]
        assert logprobs[:kept] == pytest.approx(under_old.logprobs[:kept], abs=1e-5)
        begun = Trajectory(prompt=Prompt(id=0), sample_index=0, group=0, seed=0)
        begun = begun.extended(written[:kept], logprobs[:kept], version=-1).segments
        under_new = world.written([9, number], seed=number, weights=1, begun=begun, max_tokens=60)
        assert written == under_new.tokens
        assert logprobs == pytest.approx(under_new.logprobs, abs=1e-5)


def test_the_oldest_session_gets_the_slot_first_and_returning_turns_come_before_fresh_ones(world):
    world.use(0)
    for name in ("oldest", "older"):
        world.post(
            GENERATE, request([1], seed=1, max_tokens=2), headers={"X-Session-ID": f"order-{name}"}
        )
    begun = len(world.events)
    numbers = {}
    with world.held(SLOTS, max_tokens=40), ThreadPoolExecutor(QUEUE) as pool:
        for waiting, name in enumerate(("fresh", "older", "oldest", "oldest")):
            headers = {"X-Session-ID": f"order-{name}"}
            numbers[name] = len(world.events)
            pool.submit(
                world.post, GENERATE, request([1, 2, 3], seed=1, max_tokens=2), headers=headers
            )
            world.until(lambda counts, waiting=waiting: counts.waiting == waiting + 1)
        world.engine.allow(None)
    started = [(e.prompt, e.sample) for e in world.events[begun:] if isinstance(e, Start)][SLOTS:]
    (oldest, oldest_again, older, fresh) = started
    assert oldest[0] == oldest_again[0] < older[0] < fresh[0]
    assert (oldest[1], oldest_again[1]) == (0, 1)  # they overlapped: two conversations in the log
    replies = [event for event in world.events[begun:] if isinstance(event, Reply)]
    assert len(replies) == 2  # of the two sessions that came back


def test_a_turn_that_goes_on_is_computed_only_from_where_the_last_one_ended(world):
    world.use(0)
    tokens, stats = list(range(90)), world.engine.stats
    for turn in range(3):
        before = stats.prefilled_tokens
        status, answer, _ = world.post(
            GENERATE, request(tokens, seed=turn, max_tokens=30, ignore_eos=True)
        )
        assert status == 200
        if turn:
            assert stats.prefilled_tokens - before < 64  # the reply, and a block that was not full
        written, _, _ = parts(answer)
        assert written == world.written(tokens, seed=turn, max_tokens=30).tokens
        tokens = [*tokens, *written, 1, 2, 3]


def test_a_full_queue_says_when_to_come_back(world):
    with world.held(SLOTS), ThreadPoolExecutor(QUEUE) as pool:
        waiting = [pool.submit(world.post, GENERATE, request([5], max_tokens=1)) for _ in range(4)]
        world.until(lambda counts: counts.waiting == QUEUE)
        status, answer, headers = world.post(GENERATE, request([5], max_tokens=1))
        assert status == 503
        assert headers["Retry-After"] == "1"
        assert "try again" in answer["error"]["message"]
        world.engine.allow(None)
        assert [future.result()[0] for future in waiting] == [200] * QUEUE


def test_a_caller_that_goes_away_frees_its_slot_and_disturbs_nobody(world):
    world.use(0)
    with world.held(SLOTS - 1, max_tokens=40) as asked, ExitStack() as stack:
        gone = stack.enter_context(socket.create_connection(("127.0.0.1", world.port)))
        raw = json.dumps(request([3], max_tokens=MOST)).encode()
        gone.sendall(
            b"POST /inference/v1/generate HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(raw) + raw
        )
        world.take_on(SLOTS)
        answered, cancelled = (before := world.scheduler.counts).answered, before.cancelled
        gone.close()
        world.until(lambda counts: counts.cancelled == cancelled + 1)
        world.engine.allow(None)
    for number, future in enumerate(asked):
        written, _, _ = parts(future.result()[1])
        assert written == world.written([9, number], seed=number, max_tokens=40).tokens
    world.until(lambda counts: not counts.running)
    assert world.scheduler.counts.answered - answered == SLOTS - 1


def test_a_request_that_takes_too_long_fails_alone(world):
    settings = ServeSettings(port=0, slots=SLOTS, queue=QUEUE, timeout_seconds=0.3)
    with listening(world.endpoint, settings, tell=print) as hasty, world.held(SLOTS - 1) as asked:
        status, answer, _ = world.post(
            GENERATE, request([4], max_tokens=MOST), port=hasty.server_port
        )
        assert (status, answer["error"]["message"]) == (504, "no answer within 0.3 seconds")
        world.engine.allow(None)
        assert all(future.result()[0] == 200 for future in asked)


def test_completions_take_text_and_tokens_and_cut_the_text_at_a_stop_string(world):
    world.use(0)
    body = {"model": MODEL, "prompt": "Hello", "seed": 5, "max_tokens": 30, "logprobs": 0}
    body["ignore_eos"] = True
    _, whole, _ = world.post(COMPLETE, body)
    (choice,) = whole["choices"]
    tokens = choice["token_ids"]
    alone = world.written(list(b"Hello"), seed=5, max_tokens=30)
    assert tokens == alone.tokens
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(alone.logprobs, abs=1e-5)
    _, again, _ = world.post(COMPLETE, {**body, "prompt": list(b"Hello"), "return_token_ids": True})
    assert again["choices"][0]["token_ids"] == tokens
    assert again["choices"][0]["prompt_token_ids"] == list(b"Hello")
    stop = next(chr(token) for token in tokens[5:] if token < 128)
    _, cut, _ = world.post(COMPLETE, {**body, "stop": stop})
    (short,) = cut["choices"]
    assert short["finish_reason"] == "stop"
    assert stop not in short["text"]
    assert short["token_ids"] == tokens[: tokens.index(ord(stop)) + 1]


DEEP = b'{"token_ids":' + b"[" * 200_000


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (GENERATE, b"", 400, "must be JSON"),
        (GENERATE, b"{", 400, "must be JSON"),
        (GENERATE, b"\xff\xfe", 400, "must be JSON"),
        (GENERATE, DEEP, 400, "must be JSON"),
        (GENERATE, [1], 400, "the body must be a JSON object"),
        (GENERATE, {}, 400, "token_ids must have 1..255 tokens, got 0"),
        (GENERATE, request([]), 400, "token_ids must have 1..255 tokens, got 0"),
        (GENERATE, request([1] * 256), 400, "got 256: the model's context"),
        (GENERATE, request([1, 10_000]), 400, "got 10000; was it made with the tokenizer"),
        (GENERATE, request([-1]), 400, "got -1"),
        (GENERATE, request([1.0]), 400, "got 1.0"),
        (GENERATE, request([True]), 400, "got True"),
        (GENERATE, request("text"), 400, "token_ids must be a list of token ids"),
        (GENERATE, {**request([1]), "model": "gpt"}, 404, "the one served, got 'gpt'"),
        (GENERATE, {**request([1]), "stream": True}, 400, "stream must be false"),
        (GENERATE, {**request([1]), "priority": 3}, 400, "priority must be 0"),
        (GENERATE, {**request([1]), "features": {"mm": 1}}, 400, "features must be {}"),
        (GENERATE, {**request([1]), "messages": []}, 400, "unknown field 'messages'"),
        (GENERATE, {**request([1]), "request_id": "a\nb"}, 400, "request_id must be printable"),
        (GENERATE, {**request([1]), "sampling_params": 3}, 400, "sampling_params must be a JSON"),
        (GENERATE, b'{"token_ids":[1],"sampling_params":{"temperature":NaN}}', 400, "NaN is no"),
        (GENERATE, b'{"token_ids":[1],"sampling_params":{"top_p":1e999}}', 400, "a finite number"),
        (GENERATE, request([1], temperature=-1), 400, "temperature must be 0 (greedy) or"),
        (GENERATE, request([1], temperature="hot"), 400, "temperature must be a finite number"),
        (GENERATE, request([1], max_tokens=-5), 400, "max_tokens must be a whole number in 1..200"),
        (GENERATE, request([1], max_tokens=10**9), 400, "in 1..200, got 1000000000"),
        (GENERATE, request([1], max_tokens=2.5), 400, "got 2.5"),
        (GENERATE, request([1], top_p=0), 400, "top_p must lie in (0, 1]"),
        (GENERATE, request([1], min_p=1), 400, "min_p must lie in [0, 1)"),
        (GENERATE, request([1], top_k=-7), 400, "top_k must be a whole number"),
        (GENERATE, request([1], seed=2**70), 400, "seed must be a whole number"),
        (GENERATE, request([1], seed="x"), 400, "seed must be a whole number"),
        (GENERATE, request([1], logprobs=5), 400, "logprobs must be a whole number in 0..1"),
        (GENERATE, request([1], n=2), 400, "sampling_params.n must be 1, got 2"),
        (GENERATE, request([1], presence_penalty=0.5), 400, "presence_penalty must be 0, got 0.5"),
        (GENERATE, request([1], temprature=1), 400, "did you mean 'temperature'?"),
        (GENERATE, request([1], stop=[""]), 400, "stop must be texts of 1..256"),
        (GENERATE, request([1], stop=["a"] * 17), 400, "a list of at most 16"),
        (GENERATE, request([1], stop_token_ids=["a"]), 400, "stop_token_ids: token ids must be"),
        (GENERATE, request([1], ignore_eos="yes"), 400, "ignore_eos must be true or false"),
        (COMPLETE, {"prompt": ["a", "b"]}, 400, "prompt must be one prompt, got 2"),
        (COMPLETE, {"prompt": [[1], [2]]}, 400, "prompt must be one prompt, got 2"),
        (COMPLETE, {"prompt": {"a": 1}}, 400, "prompt must be a list of token ids"),
        (COMPLETE, {"prompt": ""}, 400, "prompt must have 1..255 tokens, got 0"),
        (COMPLETE, {"prompt": "a\ud800"}, 400, "a text has half a character"),
        (COMPLETE, {"prompt": "a", "stop": ["\udfff"]}, 400, "a text has half a character"),
        (COMPLETE, {"prompt": "a", "\udb00": 1}, 400, "a text has half a character"),
        (COMPLETE, {"prompt": "a", "stop": ["\\ud800", "\U0001f600"], "n": 3}, 400, "n must be 1"),
        (COMPLETE, {"prompt": "a", "echo": True}, 400, "echo must be false, got True"),
        (COMPLETE, {"prompt": "a", "n": 3}, 400, "n must be 1, got 3"),
        (LOAD, {}, 400, "model_path must name a folder"),
        (LOAD, {"model_path": "nowhere"}, 400, "does not exist"),
        (LOAD, {"model_path": "/"}, 403, "must lie below the server's --weights-folder"),
        (LOAD, {"model_path": "../.."}, 403, "must lie below the server's --weights-folder"),
        (LOAD, {"model_path": "a\0b"}, 400, "model_path must be printable text"),
        (LOAD, {"model_path": "weights-1", "weight_version": []}, 400, "weight_version must be"),
        (LOAD, {"model_path": "weights-1", "load_format": "dummy"}, 400, "load_format must be"),
        ("/v1/chat/completions", {}, 404, "apply the chat template in your program, and send"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_in_a_sentence(
    world, path, body, status, says
):
    given, answer, _ = world.post(path, body)
    assert given == status, answer
    assert says in answer["error"]["message"]
    assert answer["error"]["code"] == status


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Content-Type": "text/plain"}, b"{}", 415),
        ({"Host": "evil.example"}, b"{}", 421),
        ({"X-Session-ID": "s" * 300}, b"{}", 400),
        ({"X-Session-ID": ""}, b"{}", 400),
        ({"Content-Length": "-3"}, b"", 411),
        ({"Content-Length": "9" * 12}, b"", 413),
        ({"Transfer-Encoding": "chunked"}, b"0\r\n\r\n", 411),
        ({}, b" " * (2 << 20), 413),
        ({}, b'{"token_ids": [1], "sampling_params": {"stop": "\xed\xa0\x80"}}', 400),
    ],
)
def test_a_request_with_nasty_headers_is_refused(world, headers, body, status):
    given, answer, _ = world.post(GENERATE, body, headers=headers)
    assert given == status, answer
    assert answer["error"]["message"]


def test_parameters_that_change_nothing_are_accepted(world):
    body = {
        **request([1], max_tokens=1, n=1, repetition_penalty=1.0, skip_special_tokens=False),
        "cache_salt": "salt",
        "priority": 0,
        "stream": False,
        "kv_transfer_params": None,
        "return_token_ids": True,
    }
    status, answer, _ = world.post(GENERATE, body)
    assert status == 200
    assert answer["prompt_token_ids"] == [1]


def test_a_caller_without_the_token_learns_nothing_but_that_the_server_is_there(world):
    settings = ServeSettings(port=0, token="a" * 32, slots=SLOTS, queue=QUEUE)
    with listening(world.endpoint, settings, tell=print) as server:
        port = server.server_port
        assert world.ask("GET", "/health", port=port)[0] == 200
        for given in ("", "Bearer", "Bearer b", "Bearer " + "a" * 31, "Basic " + "a" * 32, "é"):
            headers = {"Authorization": given.encode("latin-1")}
            for path in (GENERATE, COMPLETE, LOAD):
                status, answer, said = world.post(path, {}, headers=headers, port=port)
                assert status == 401
                assert said["WWW-Authenticate"] == "Bearer"
            for path in ("/v1/models", "/server_info", "/secret"):
                assert world.ask("GET", path, headers=headers, port=port)[0] == 401
        headers = {"Authorization": "bearer " + "a" * 32}
        _, answer, _ = world.ask("GET", "/v1/models", headers=headers, port=port)
        assert answer["data"][0] | {"created": 0} == {
            "id": MODEL,
            "object": "model",
            "created": 0,
            "owned_by": "sortedrl",
            "max_model_len": 256,
        }
        assert (
            world.post(GENERATE, request([1], max_tokens=1), headers=headers, port=port)[0] == 200
        )


def test_weights_that_do_not_fit_or_are_not_finite_leave_the_old_ones(world):
    before = world.scheduler.counts.weight_version
    name, tensor = next(iter(world.weights[1].items()))
    for label, changed, says in (
        ("missing", {k: v for k, v in world.weights[1].items() if k != name}, f"missing: {name}"),
        ("shape", world.weights[1] | {name: tensor[:1].clone()}, "must be a tensor of shape"),
        ("nan", world.weights[1] | {name: tensor * float("nan")}, "weights must be finite"),
    ):
        folder = world.folder / label
        folder.mkdir()
        save_file(changed, folder / "model.safetensors")
        status, answer, _ = world.post(LOAD, {"model_path": label})
        assert (status, says in answer["error"]["message"]) == (400, True), answer
    (world.folder / "empty").mkdir()
    assert world.post(LOAD, {"model_path": "empty"})[0] == 400
    assert world.scheduler.counts.weight_version == before
    world.endpoint._weights, reader = None, world.endpoint._weights
    try:
        assert world.post(LOAD, {"model_path": "weights-1"})[0] == 403
    finally:
        world.endpoint._weights = reader


def test_an_engine_that_computes_nonsense_fails_its_turns_and_good_weights_mend_it(world):
    broken = {name: tensor * float("nan") for name, tensor in world.weights[0].items()}
    world.scheduler.load(broken, label="broken")
    status, answer, _ = world.post(GENERATE, request([1], max_tokens=3))
    assert (status, "not finite" in answer["error"]["message"]) == (500, True)
    world.use(0)
    assert world.post(GENERATE, request([1], max_tokens=3))[0] == 200


def test_weights_that_the_engine_refuses_lose_no_turn(world):
    world.use(0)
    with world.held(SLOTS, max_tokens=20) as asked, ThreadPoolExecutor(1) as pool:
        loading = pool.submit(world.scheduler.load, {}, label=None)
        world.engine.allow(None)
        with pytest.raises(HttpError, match="missing"):
            loading.result()
        answers = [future.result() for future in asked]
    for number, (status, answer, _) in enumerate(answers):
        assert status == 200
        assert parts(answer)[0] == world.written([9, number], seed=number, max_tokens=20).tokens


def test_nothing_is_lost_while_callers_leave_and_weights_come(world):
    world.use(0)
    draw, before = random.Random(1), world.scheduler.counts

    def ask(number):
        order = random.Random(number)
        tokens = [order.randrange(256) for _ in range(order.randrange(1, 30))]
        sampling = Sampling(max_tokens=order.randrange(1, 40), stop_tokens=frozenset())
        turn = Turn(tokens, sampling, seed=number, session_id=order.choice([None, "a", "b", "c"]))
        world.scheduler.submit(turn)
        if order.random() < 0.3:
            turn.done.wait(order.random() * 0.05)
            world.scheduler.cancel(turn, status=499, reason="gone")
        assert turn.done.wait(PATIENCE_SECONDS)
        return turn

    with ThreadPoolExecutor(SLOTS + QUEUE) as pool:
        asked = [pool.submit(ask, number) for number in range(60)]
        for _ in range(3):
            world.scheduler.load(world.weights[draw.randrange(2)], label=None)
        turns = [future.result() for future in asked]
    after = world.scheduler.counts
    assert all((turn.answer is None) != (turn.failure is None) for turn in turns)
    assert after.answered - before.answered == sum(turn.answer is not None for turn in turns)
    assert after.cancelled - before.cancelled == sum(turn.answer is None for turn in turns)
    assert all(t.answer.num_tokens == t.sampling.max_tokens for t in turns if t.answer is not None)


def test_a_session_that_was_silent_is_over_and_what_is_left_at_the_end_is_told_so():
    now, events = [0.0], []
    engine = NativeEngine(load_model(MODEL, dtype=None, device="cpu"), slots=1, max_tokens=4)
    log = TurnLog(events.append, clock=WallClock(), slots=1, seed=0, version=0)
    scheduler = TurnScheduler(
        engine, queue=9, seed=0, log=log, session_seconds=60, now=lambda: now[0]
    )
    worker = threading.Thread(target=scheduler.run)
    worker.start()
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        turn = Turn([1], Sampling(max_tokens=2), session_id="s")
        scheduler.submit(turn)
        assert turn.done.wait(PATIENCE_SECONDS)
        assert scheduler.counts.sessions == 1
        now[0] = 61.0
        while scheduler.counts.sessions:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert isinstance(events[-1], Finish)
        left = [Turn([1], Sampling(max_tokens=200, stop_tokens=frozenset())) for _ in range(3)]
        for turn in left:
            scheduler.submit(turn)
    finally:
        scheduler.close()
        worker.join()
    assert all(turn.done.is_set() for turn in left)
    assert left[-1].failure.status == 503  # it would have been the last of three
    with pytest.raises(HttpError, match="stopping"):
        scheduler.submit(Turn([1], Sampling(max_tokens=2)))


def test_a_port_that_is_taken_is_refused_in_a_sentence(world):
    settings = ServeSettings(port=world.port)
    with (
        pytest.raises(ConfigError, match="choose others with --host and --port"),
        listening(world.endpoint, settings, tell=print),
    ):
        pass


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_other_machines_are_not_let_in_without_a_token(host, monkeypatch):
    monkeypatch.delenv("SORTEDRL_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="can be reached from other machines, which needs a toke"):
        serve("no-such-model", ServeSettings(host=host), tell=print)


def test_a_token_that_no_header_can_carry_is_refused(monkeypatch):
    for token in ("two words", "ä", "a\nb"):
        with pytest.raises(ConfigError, match="printable ASCII"):
            ServeSettings(token=token)
        monkeypatch.setenv("SORTEDRL_TOKEN", token)
        with pytest.raises(ConfigError, match="printable ASCII"):
            ServeSettings()
    monkeypatch.setenv("SORTEDRL_TOKEN", "")
    assert replace(ServeSettings()).secret is None


def agent(port, problems):
    """A program that owns its loop: it asks, uses a tool, and asks again with what it was told."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda number: episode(port, number), range(problems)))


def episode(port, number):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    tokens, turns = list(f"What is {number} + {number}?".encode()), 0
    while turns < 3:
        body = json.dumps(request(tokens, seed=number, max_tokens=6))
        connection.request(
            "POST", GENERATE, body, {**JSON, "X-Session-ID": f"episode-{number}"}
        )  # on one connection, kept alive
        answer = connection.getresponse()
        assert answer.status == 200
        written, _, _ = parts(json.loads(answer.read()))
        tokens += [*written, *f" = {2 * number}\n".encode()]
        turns += 1
    connection.close()
    return tokens


def test_the_command_serves_an_agent_until_it_is_told_to_stop(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out, found = tmp_path / "run", {}

    def use():
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while (url := capsys.readouterr().out) == "":
                assert time.monotonic() < deadline
                time.sleep(0.05)
            port = int(json.loads(url)["url"].rpartition(":")[2])
            found["talks"] = agent(port, 6)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    user = threading.Thread(target=use)
    user.start()
    words = ["serve", MODEL, "--slots", "3", "--port", "0", "--json", "--out", str(out)]
    assert main([*words, "--max-tokens", "50"]) == 0
    user.join()
    assert len(found["talks"]) == 6
    events = list(read_events(out / "events.jsonl"))
    assert sum(isinstance(event, Reply) for event in events) == 12
    assert main(["report", str(out), "--out", str(tmp_path / "page.html")]) == 0
    assert main(["trace", str(out), "--out", str(tmp_path / "trace.json")]) == 0
    assert main(words) == 2  # what is there is not written over
    assert "is a file" in capsys.readouterr().err
