import asyncio
import json
import os
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from sortedrl.engines.sampling import Sampling
from sortedrl.engines.self_test import (
    STAGE,
    Verdict,
    from_line,
    server_self_test,
    to_line,
    watched,
)
from sortedrl.engines.self_test.__main__ import (
    MAX_TOKENS,
    NonConforming,
    check,
    check_as_it_is,
    made_pair,
    start_engine,
    write_model,
)
from sortedrl.engines.servers import served_vocabulary
from sortedrl.errors import EngineError
from sortedrl.types import Segment, Weights

torch.set_num_threads(1)
CPU = {"device": torch.device("cpu"), "dtype": torch.float32}


@pytest.fixture(scope="module")
def models():
    return made_pair(**CPU)


@pytest.fixture(scope="module")
def folder(models, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_model(models.before, path)
    return path


def silent(stage):
    """Nobody wants to know how far it is."""


def checked(engine, models):
    return check(engine, models, stage=silent)


class Sound:
    """The native engine behind a wall; those that follow break one promise each."""

    name = "an engine on trial"
    slots = 4

    def __init__(self, engine):
        self.engine = engine

    @property
    def version(self):
        return self.engine.version

    def submit(self, trajectories, *, tolerance, sampling=None):
        self.engine.submit(trajectories, tolerance=tolerance, sampling=sampling)

    def step(self):
        return self.engine.step()

    def interrupt(self):
        return self.engine.interrupt()

    def load_weights(self, weights):
        self.engine.load_weights(weights)

    def close(self):
        self.engine.close()


class ShiftsLogprobs(Sound):
    def interrupt(self):
        return [shifted(t, by=0.1) for t in super().interrupt()]


def shifted(trajectory, *, by):
    """Every token a little less likely."""
    segments = tuple(
        Segment(s.tokens, tuple(p - by for p in s.logprobs), s.version) for s in trajectory.segments
    )
    return replace(trajectory, segments=segments)


class ShiftsGreedyLogprobs(Sound):
    is_greedy = False

    def submit(self, trajectories, *, tolerance, sampling=None):
        self.is_greedy = sampling is not None
        super().submit(trajectories, tolerance=tolerance, sampling=sampling)

    def step(self):
        step = super().step()
        if not self.is_greedy:
            return step
        return replace(step, finished=tuple(shifted(t, by=0.1) for t in step.finished))


class KeepsOldWeights(Sound):
    def load_weights(self, weights):
        self.engine.load_weights(Weights(weights.version))


class KeepsOldVersion(Sound):
    def load_weights(self, weights):
        self.engine.load_weights(Weights(self.engine.version, weights.tensors))


class LosesAnAnswer(Sound):
    def step(self):
        step = super().step()
        return replace(step, finished=step.finished[1:])


class LosesAnInterruptedAnswer(Sound):
    def interrupt(self):
        return super().interrupt()[1:]


class LosesTokensWhenInterrupted(Sound):
    def interrupt(self):
        return [replace(t, segments=()) for t in super().interrupt()]


class IsThroughBeforeItStops(Sound):
    """As fast as an engine may be that writes beside us: the first of its interruptions is late."""

    interruptions = 0

    def interrupt(self):
        self.interruptions += 1
        if self.interruptions > 1:
            return super().interrupt()
        complete = []
        while (step := self.engine.step()).finished or step.decoded_tokens:
            self.unreported += step.decoded_tokens
            complete += [replace(t, finish_reason=None) for t in step.finished]
        return complete

    unreported = 0

    def step(self):
        step = super().step()
        unreported, self.unreported = self.unreported, 0
        return replace(step, decoded_tokens=step.decoded_tokens + unreported)


class GivesAnAnswerTwice(Sound):
    def step(self):
        step = super().step()
        return replace(step, finished=step.finished * 2)


class ForgetsWhatWasWritten(Sound):
    def submit(self, trajectories, *, tolerance, sampling=None):
        # Other noise, or the same weights would write the same answers again.
        anew = [replace(t, segments=(), attempt=len(t.segments)) for t in trajectories]
        super().submit(anew, tolerance=tolerance, sampling=sampling)


class StampsTheNewestVersion(Sound):
    def step(self):
        step = super().step()
        return replace(step, finished=tuple(self.stamped(t) for t in step.finished))

    def stamped(self, trajectory):
        segments = tuple(Segment(s.tokens, s.logprobs, self.version) for s in trajectory.segments)
        return replace(trajectory, segments=segments)


class CountsTooMuch(Sound):
    def step(self):
        step = super().step()
        return replace(step, decoded_tokens=step.decoded_tokens + 1)


class IsNeverGreedy(Sound):
    def submit(self, trajectories, *, tolerance, sampling=None):
        warm = None if sampling is None else replace(sampling, temperature=1.0)
        super().submit(trajectories, tolerance=tolerance, sampling=warm)


class IgnoresTheTemperature(Sound):
    def submit(self, trajectories, *, tolerance, sampling=None):
        warm = Sampling(temperature=1.0, max_tokens=MAX_TOKENS) if sampling is None else sampling
        super().submit(trajectories, tolerance=tolerance, sampling=warm)


class IgnoresTheLimit(Sound):
    def submit(self, trajectories, *, tolerance, sampling=None):
        short = Sampling(temperature=0.8, max_tokens=40) if sampling is None else sampling
        super().submit(trajectories, tolerance=tolerance, sampling=short)


def test_the_native_engine_passes(models, folder):
    figures = checked(start_engine("native", folder, **CPU), models)
    assert figures.largest_gap < 1e-4
    assert figures.tokens_per_second > 0


def test_an_engine_that_was_faster_than_the_interruption_is_interrupted_again(models, folder):
    engine = IsThroughBeforeItStops(start_engine("native", folder, **CPU))
    checked(engine, models)
    assert engine.interruptions > 2
    assert engine.version == 1


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (ShiftsLogprobs, "nats off a plain forward pass at temperature 0.8"),
        (ShiftsGreedyLogprobs, "nats off those of temperature 1"),
        (IgnoresTheTemperature, "nats off a plain forward pass at temperature 0.8"),
        (KeepsOldWeights, "it uses other weights"),
        (KeepsOldVersion, "must report version 1, got 0"),
        (LosesAnAnswer, "it lost"),
        (LosesAnInterruptedAnswer, "1 answers did not come back from an interruption"),
        (LosesTokensWhenInterrupted, "never returned an answer that was started and incomplete"),
        (GivesAnAnswerTwice, "came back twice"),
        (ForgetsWhatWasWritten, "tokens when it was resumed"),
        (StampsTheNewestVersion, "with the version of other weights"),
        (CountsTooMuch, f"tokens, but its answers have {8 * MAX_TOKENS}"),
        (IsNeverGreedy, "must write the most likely token"),
        (IgnoresTheLimit, f"must end at {MAX_TOKENS} tokens, it ended at 40"),
    ],
)
def test_an_engine_that_breaks_a_promise_fails_with_the_reason(kind, said, models, folder):
    with pytest.raises(NonConforming) as failure:
        checked(kind(start_engine("native", folder, **CPU)), models)
    assert said in str(failure.value)
    assert "\n" not in str(failure.value)


def test_a_server_is_tried_without_touching_its_weights(models, folder):
    class HasASacredModel(Sound):
        def load_weights(self, weights):
            raise AssertionError("the weights of a server belong to others")

    engine = HasASacredModel(start_engine("native", folder, **CPU))
    figures = check_as_it_is(engine, vocabulary=models.vocabulary, stage=silent)
    assert figures.largest_gap is None
    assert figures.tokens_per_second > 0


@pytest.mark.parametrize("kind", [LosesAnAnswer, GivesAnAnswerTwice, ForgetsWhatWasWritten])
def test_a_server_can_fail_too(kind, models, folder):
    engine = kind(start_engine("native", folder, **CPU))
    with pytest.raises(NonConforming):
        check_as_it_is(engine, vocabulary=models.vocabulary, stage=silent)


# The process around it.


def python(program):
    return [sys.executable, "-c", program]


PASSED = Verdict(reason=None, name="mine", slots=4, largest_gap=1e-6, tokens_per_second=10.0)


def test_a_verdict_survives_the_way_through_a_line():
    verdict = replace(PASSED, reason="no", log=("a", "b"))
    assert "\n" not in to_line(verdict)
    assert from_line(to_line(verdict)) == verdict


def test_the_verdict_of_a_process_is_taken_over_and_its_noise_is_not():
    program = f"import sys; print('noise', file=sys.stderr); print({to_line(PASSED)!r})"
    verdict = watched(python(program), seconds=30)
    assert verdict.passed
    assert verdict.log == ()
    assert verdict.seconds > 0
    assert replace(verdict, seconds=0.0) == PASSED


def test_what_an_engine_that_failed_has_printed_is_shown():
    failed = Verdict(reason="it lost\n one answer")
    program = (
        f"import sys; [print('line', n, file=sys.stderr) for n in range(100)]\n"
        f"print({to_line(failed)!r})"
    )
    verdict = watched(python(program), seconds=30)
    assert verdict.reason == "it lost one answer"
    assert verdict.log[-1] == "line 99"
    assert len(verdict.log) == 12


def test_an_engine_that_crashes_fails_with_its_last_words():
    verdict = watched(python("raise MemoryError('no room')"), seconds=30)
    assert verdict.reason == "its process exited with code 1 without a result: MemoryError: no room"
    verdict = watched(python("import os; os.abort()"), seconds=30)
    assert verdict.reason.startswith("its process exited with code -6 without a result")


def is_let_go(reader):
    """Whether nobody is left who could write into a pipe; a killed process takes a moment."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            assert os.read(reader, 100) == b""
        except BlockingIOError:
            time.sleep(0.05)
        else:
            os.close(reader)
            return True
    return False


def test_an_engine_that_hangs_is_ended_with_all_its_children(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    program = (
        "import subprocess, sys, time\n"
        f"out = open({str(fifo)!r}, 'wb')\n"
        "subprocess.Popen(['sleep', '1000'], stdout=out)\n"
        "out.write(b'started'); out.flush()\n"
        f"print({STAGE + 'starting the engine'!r}, file=sys.stderr, flush=True)\n"
        "time.sleep(1000)"
    )
    verdict = watched(python(program), seconds=3)
    assert verdict.reason == "no result within 3 s; last stage: starting the engine"
    assert os.read(reader, 100) == b"started"
    assert is_let_go(reader)


def test_children_that_outlive_a_process_are_ended_too(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    program = (
        "import subprocess\n"
        f"subprocess.Popen(['sleep', '1000'], stdout=open({str(fifo)!r}, 'wb'))\n"
        f"print({to_line(PASSED)!r})"
    )
    assert watched(python(program), seconds=30).passed
    assert is_let_go(reader)


# Servers, by what they refuse.


@contextmanager
def refusing(path, words):
    """A server that refuses one path in its own words, and does not know any other."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            body = json.dumps({"error": words}).encode()
            self.send_response(400 if self.path == path else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if self.path == path else b" " * len(body))

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/completions", "token_id 2147483647 in logit_bias ... Vocabulary size: 151936"),
        ("/generate", "token_ids_logprob contains 2147483647; valid range is [0, 151936)."),
    ],
)
def test_a_server_tells_its_vocabulary_by_what_it_refuses(path, words):
    with refusing(path, words) as url:
        assert asyncio.run(served_vocabulary(url)) == 151936


def test_a_stranger_is_no_server_of_answers():
    with (
        refusing("/v1/completions", "what?") as url,
        pytest.raises(EngineError, match="must be a vLLM or SGLang server"),
    ):
        asyncio.run(served_vocabulary(url))


def test_a_server_that_is_not_there_fails_in_one_line():
    verdict = server_self_test("http://127.0.0.1:9", seconds=120)
    assert verdict.reason.startswith("http://127.0.0.1:9 does not respond")
