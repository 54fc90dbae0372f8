"""The laws of every engine, for SGLang: in processes of ours, and as a server."""

import os
from importlib.util import find_spec

import pytest
from served import SGL_KERNEL_STUB, sglang_servers, streamed

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
from sortedrl.engines.sglang.sglang_process import SglangProcess
from sortedrl.engines.sglang.sglang_server import SglangServer
from sortedrl.engines.streaming.backend import ServerRequirements

pytestmark = [
    pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang, in a venv of its own"),
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sglang-model")
    reference_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["process", "server"])
def world(request, folder, tmp_path_factory):
    form = process if request.param == "process" else server
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(SGL_KERNEL_STUB), prepend=os.pathsep)
        environment.syspath_prepend(SGL_KERNEL_STUB)
        environment.setenv("HF_HUB_OFFLINE", "1")
        yield from form(folder, tmp_path_factory.mktemp("hand-over"))


def process(folder, _):
    def opening():
        return SglangProcess.start(
            model=str(folder),
            slots=SLOTS,
            context=CONTEXT,
            dtype="float32",
            seed=0,
            memory_share=0.1,
            device="cpu",
            options={},
        )

    world = EngineUnderTest(opening=lambda: streamed(opening))
    yield world
    world.close()


def server(folder, hand_over):
    with sglang_servers(folder, count=1, slots=SLOTS, context=CONTEXT) as (one,):

        def opening():
            required = ServerRequirements(
                vocabulary=VOCABULARY, context=CONTEXT, temperature=TEMPERATURE
            )
            return SglangServer.connect(one.url, required, weights_folder=hand_over)

        world = EngineUnderTest(opening=lambda: streamed(opening), is_ordered=False, is_fresh=False)
        yield world
        world.close()
        assert one.process.poll() is None, "a server lives on"


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_every_engine_keeps_the_law(law, world):
    check(law, world)
