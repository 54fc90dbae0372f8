"""The laws of every engine, for vLLM: in a process of ours, as a server, and two servers as one."""

from importlib.util import find_spec

import pytest
from served import streamed, vllm_servers

from sortedrl.engines.conformance import (
    CONTEXT,
    LAWS,
    SLOTS,
    TEMPERATURE,
    VOCABULARY,
    EngineUnderTest,
    check,
    reference_model,
)
from sortedrl.engines.pool import EnginePool
from sortedrl.engines.streaming.backend import ServerRequirements
from sortedrl.engines.vllm.vllm_process import VllmProcess
from sortedrl.engines.vllm.vllm_server import VllmServer

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM, in a venv of its own"),
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm-model")
    reference_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["process", "server", "two servers"])
def world(request, folder, tmp_path_factory):
    form = {"process": process, "server": server, "two servers": two_servers}[request.param]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HUB_OFFLINE", "1")
        yield from form(folder, tmp_path_factory.mktemp("hand-over"))


def process(folder, _):
    def opening():
        return VllmProcess.start(
            model=str(folder),
            slots=SLOTS,
            context=CONTEXT,
            dtype="float32",
            options={"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20},
        )

    world = EngineUnderTest(opening=lambda: streamed(opening))
    yield world
    world.close()


def at(server, hand_over):
    """An engine over a server, which has the weights of the test before."""
    required = ServerRequirements(vocabulary=VOCABULARY, context=CONTEXT, temperature=TEMPERATURE)
    return streamed(lambda: VllmServer.connect(server.url, required, weights_folder=hand_over))


def server(folder, hand_over):
    with vllm_servers(folder, count=1, slots=SLOTS, context=CONTEXT) as (one,):
        world = EngineUnderTest(
            opening=lambda: at(one, hand_over), is_ordered=False, is_fresh=False
        )
        yield world
        world.close()
        assert one.process.poll() is None, "a server lives on"


def two_servers(folder, hand_over):
    with vllm_servers(folder, count=2, slots=SLOTS // 2, context=CONTEXT) as servers:

        def opening():
            members = [at(one, hand_over / str(place)) for place, one in enumerate(servers)]
            return EnginePool(members, warn=lambda words: pytest.fail(words))

        world = EngineUnderTest(opening=opening, is_ordered=False, is_fresh=False)
        yield world
        world.close()


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_every_engine_keeps_the_law(law, world):
    check(law, world)
