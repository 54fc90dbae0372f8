"""Which engine writes the answers: what fits together, and what is refused with what to do."""

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from sortedrl.config.schedule import Schedule
from sortedrl.config.train import Rollout, TrainSettings
from sortedrl.errors import ConfigError

SERVER = "http://localhost:8000"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"engine": "vlm"}, "did you mean 'vllm'"),
        ({"engine": "servers"}, "give at least one address"),
        ({"urls": (SERVER,)}, "set engine to 'servers'"),
        ({"engine": "servers", "urls": (SERVER, SERVER)}, "each server once"),
        ({"engine": "servers", "urls": ("localhost:8000",)}, "such as http://localhost:8000"),
        ({"engine": "vllm", "weight_sync_folder": Path("x")}, "is for engine 'servers'"),
        ({"options": ("a=1",)}, "are for engine 'vllm' or 'sglang'"),
        ({"engine": "servers", "urls": (SERVER,), "options": ("a=1",)}, "leave them out"),
        ({"queue": -1}, "must be at least 0"),
        ({"temperature": 0.0}, "rollout.temperature must lie in 0.0001..100, got 0.0"),
        ({"temperature": 1e-6}, "rollout.temperature must lie in"),
        ({"temperature": 1e6}, "rollout.temperature must lie in"),
        ({"temperature": math.nan}, "rollout.temperature must lie in"),
        ({"cache_gib": 0.0}, "must be above 0"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(given, said):
    with pytest.raises(ConfigError, match=said):
        Rollout(**given)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "servers"])
def test_coupled_mode_is_refused_with_an_outside_engine_and_the_other_modes_are_named(engine):
    rollout = Rollout(engine=engine, urls=(SERVER,) if engine == "servers" else ())
    with pytest.raises(ConfigError, match="'native'") as refused:
        TrainSettings(schedule=Schedule(mode="coupled"), rollout=rollout)
    assert "'partial'" in str(refused.value)
    assert "'on_policy'" in str(refused.value)


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(mode="partial"),
        Schedule(mode="on_policy"),
        Schedule(mode="coupled", tolerance=float("inf")),
        Schedule(strategy="sync", mode="coupled"),
    ],
)
def test_schedules_that_verify_nothing_go_with_every_engine(schedule):
    assert TrainSettings(schedule=schedule, rollout=Rollout(engine="vllm")).needs_correction


def test_the_correction_is_on_where_the_engine_is_not_the_trainers_own_module():
    on_policy = Schedule(mode="on_policy")
    assert not TrainSettings(schedule=on_policy).needs_correction
    assert TrainSettings(schedule=on_policy, rollout=Rollout(engine="sglang")).needs_correction
    assert TrainSettings(schedule=Schedule(mode="partial")).needs_correction


def test_two_runs_never_share_a_weight_sync_folder(monkeypatch, tmp_path):
    from sortedrl.engines import servers
    from sortedrl.runs import build_engine

    given = []

    async def connect(url, required, *, weights_folder):
        given.append(weights_folder)

    monkeypatch.setattr(servers, "connect_server", connect)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=9))
    world = SimpleNamespace(model=SimpleNamespace(config=config), context=lambda settings: 8)
    rollout = Rollout(
        engine="servers", urls=("http://a", "http://b"), weight_sync_folder=tmp_path / "shared"
    )
    for _ in range(2):
        settings = TrainSettings(
            rollout=rollout, schedule=Schedule(mode="partial"), out=tmp_path / "run"
        )
        for number in range(2):
            asyncio.run(build_engine._server(settings, world, number))
    assert len(set(given)) == 4
    assert {folder.parent for folder in given} == {tmp_path / "shared"}
