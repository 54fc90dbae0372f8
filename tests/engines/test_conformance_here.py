"""The laws of every engine, for those that need nothing but this package."""

import asyncio

import pytest
import torch

from sortedrl.core.clock import VirtualClock
from sortedrl.engines import conformance
from sortedrl.engines.conformance import (
    CONTEXT,
    LAWS,
    LONGEST,
    SLOTS,
    STOPS,
    TEMPERATURE,
    VOCABULARY,
    EngineUnderTest,
    check,
    limit_of,
    no_more_answers_are_written_at_once_than_there_are_slots,
    nothing_is_lost_or_doubled_whatever_happens,
    reference_model,
)
from sortedrl.engines.native import NativeEngine
from sortedrl.engines.pool import EnginePool
from sortedrl.engines.sampling import Sampling
from sortedrl.engines.streaming.backend import BackendLimits, Delta
from sortedrl.engines.streaming.streamed_engine import StreamedEngine
from sortedrl.simulate.costs import ticks
from sortedrl.simulate.engine import SimulatedEngine
from sortedrl.simulate.lengths import Lengths, LengthSettings


def native(slots=SLOTS):
    own = reference_model(0)
    return NativeEngine(
        own,
        slots=slots,
        max_tokens=limit_of,
        stop_tokens=STOPS,
        sampling=Sampling(temperature=TEMPERATURE),
    )


def pool():
    return EnginePool([native(2), native(2)], warn=lambda words: pytest.fail(words))


class PlainBackend:
    """The model on its own behind the seam: a whole forward pass for every token."""

    name = "plain model"
    num_at_once = SLOTS
    limits = BackendLimits(slots=SLOTS, context=CONTEXT, vocabulary=VOCABULARY)

    def __init__(self):
        self._model = reference_model(0)
        self._generator = torch.Generator().manual_seed(0)
        self._open = {}
        self._aborted = set()

    @classmethod
    async def opened(cls):
        return cls()

    async def stream(self, request):
        self._open[request.id] = request.priority
        text = list(request.tokens)
        end = None
        try:
            while end is None:
                if request.id in self._aborted:
                    yield Delta(tokens=(), logprobs=(), end="abort")
                    return
                if request.priority not in sorted(self._open.values())[: self.num_at_once]:
                    await asyncio.sleep(0.0005)
                    continue
                token, logprob = self._next(text, request.sampling)
                text.append(token)
                if token in request.stop_tokens:
                    end = "stop"
                elif len(text) == len(request.tokens) + request.max_tokens:
                    end = "length"
                yield Delta(tokens=[token], logprobs=[logprob], end=end)
                await asyncio.sleep(0)
        finally:
            del self._open[request.id]

    async def abort(self, ids):
        self._aborted |= set(ids)

    async def load_weights(self, weights):
        assert not self._open, "nothing is being written"
        self._model.load_state_dict(weights.tensors)

    async def score(self, tokens, *, start):
        with torch.no_grad():
            logprobs = self._model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return [logprobs[place - 1, tokens[place]].item() for place in range(start, len(tokens))]

    async def sleep(self):
        return False

    async def close(self):
        pass

    @torch.no_grad()
    def _next(self, text, sampling):
        logits = self._model(torch.tensor([text])).logits[0, -1]
        logprobs = (logits / (sampling.temperature or 1)).log_softmax(-1)
        if sampling.temperature:
            token = torch.multinomial(logprobs.exp(), 1, generator=self._generator).item()
        else:
            token = logits.argmax().item()
        return token, logprobs[token].item()


class Simulated(SimulatedEngine):
    """It holds nothing to let go of."""

    def close(self):
        pass


def simulated():
    lengths = LengthSettings(median=12, sigma=0.8)
    return Simulated(
        slots=SLOTS,
        lengths=Lengths(lengths, seed=0, max_tokens=LONGEST, samples_per_prompt=1),
        costs=ticks(),
        clock=VirtualClock(),
    )


def streamed(opening=PlainBackend.opened):
    return StreamedEngine(
        opening,
        max_tokens=limit_of,
        stop_tokens=STOPS,
        sampling=Sampling(temperature=TEMPERATURE),
    )


@pytest.fixture(scope="module", params=["native", "pool", "streamed"])
def world(request):
    world = {
        "native": EngineUnderTest(opening=native, precision=5e-5),
        "pool": EngineUnderTest(opening=pool, precision=5e-5, is_ordered=False),
        "streamed": EngineUnderTest(opening=streamed, precision=5e-5),
    }[request.param]
    yield world
    world.close()


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_every_engine_keeps_the_law(law, world):
    check(law, world)


def test_a_simulated_engine_keeps_the_laws_that_need_no_model():
    check(
        nothing_is_lost_or_doubled_whatever_happens,
        EngineUnderTest(opening=simulated, is_simulated=True),
    )


class RoomyBackend(PlainBackend):
    """Generates more answers at once than it says."""

    num_at_once = SLOTS + 3


@pytest.mark.parametrize("is_ordered", [True, False])
def test_an_engine_with_more_slots_than_it_says_breaks_the_law(is_ordered, monkeypatch):
    monkeypatch.setattr(conformance, "_TRIES", 2)
    roomy = EngineUnderTest(
        opening=lambda: streamed(RoomyBackend.opened), precision=5e-5, is_ordered=is_ordered
    )
    with pytest.raises(AssertionError, match="a slot that does not exist"):
        check(no_more_answers_are_written_at_once_than_there_are_slots, roomy)
    roomy.close()
