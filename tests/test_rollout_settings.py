"""Which engine writes the answers: what fits together, and what is refused with what to do."""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sortedrl.config.cluster import Cluster
from sortedrl.config.data import EnvironmentSettings
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.config.train import PassSettings, Rollout, TrainSettings
from sortedrl.errors import ConfigError, EngineError
from sortedrl.models.shape import KNOWN_SHAPES
from sortedrl.types import Weights

SERVER = "http://localhost:8000"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"engine": "vlm"}, "did you mean 'vllm'"),
        ({"engine": "servers"}, "needs the address of at least one server, got none"),
        ({"urls": (SERVER,)}, "set rollout.engine to 'servers' or leave"),
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


def test_two_runs_never_share_a_weight_sync_folder(tmp_path):
    from sortedrl.runs.build_engine import _weight_folder

    rollout = Rollout(
        engine="servers", urls=("http://a", "http://b"), weight_sync_folder=tmp_path / "shared"
    )
    settings = TrainSettings(
        rollout=rollout, schedule=Schedule(mode="partial"), out=tmp_path / "run"
    )
    folders = {_weight_folder(settings).path for _ in range(2)}
    assert len(folders) == 2
    assert {folder.parent for folder in folders} == {tmp_path / "shared"}


def test_the_servers_of_a_run_read_one_copy_of_each_version(monkeypatch, tmp_path):
    from sortedrl.engines.streaming import weight_files

    written = []
    monkeypatch.setattr(
        weight_files,
        "save_file",
        lambda tensors, path: (written.append(sorted(tensors)), path.write_bytes(b"x")),
    )
    folder = weight_files.WeightFolder(tmp_path / "weights")
    for version in (1, 2):
        weights = Weights(version, {"a": torch.zeros(2)})
        with ThreadPoolExecutor(4) as servers:
            places = set(servers.map(folder.export, [weights] * 4))
        assert places == {tmp_path / "weights" / f"version-{version}"}
    assert len(written) == 2
    again = Weights(2, {"a": torch.ones(2)})
    folder.export(again)
    assert len(written) == 3, "other tensors under the same number are written"
    folder.remove()
    folder.remove()
    assert not (tmp_path / "weights").exists()


# --- redraw ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_ignores_seeds_is_refused_for_redraw(engine):
    from sortedrl.runs.build_engine import _require_seeds

    settings = TrainSettings(schedule=Schedule(mode="redraw"), rollout=Rollout(engine=engine))
    assert settings.needs_seeds
    assert not TrainSettings(schedule=Schedule(mode="redraw", strategy="sync")).needs_seeds
    seeded = SimpleNamespace(engine="a", no_seeds=None)
    blind = SimpleNamespace(engine="b", no_seeds="it has no kernels for CPUs")
    _require_seeds(SimpleNamespace(request_limits=[seeded]))
    with pytest.raises(
        EngineError, match=r"'redraw' .* but b does not: it has no kernels for CPUs"
    ):
        _require_seeds(SimpleNamespace(request_limits=[seeded, blind]))


# --- memory ---------------------------------------------------------------------------------------

COLOCATED = Cluster(kind="colocated", rollout_workers=8, gpus_per_worker=1, trainer_ranks=8)
SEPARATED = Cluster(rollout_workers=4, gpus_per_worker=1, trainer_ranks=4)
SHARDED = Cluster(
    kind="colocated", rollout_workers=2, gpus_per_worker=4, tensor_parallel=4, trainer_ranks=8
)


@pytest.mark.parametrize(
    "cluster", [COLOCATED, SEPARATED, SHARDED], ids=["turns", "own", "sharded"]
)
@pytest.mark.parametrize("slots", [8, 4096])
@pytest.mark.parametrize("engine", ["vllm", "native"])
def test_a_worker_takes_the_cache_that_the_dry_run_names(monkeypatch, cluster, slots, engine):
    from sortedrl.runs import build_engine
    from sortedrl.runs.plan.dry_run import Expected, planned_run, run_memory

    model = "meta-llama/Llama-3.1-8B"
    if engine == "native" and cluster.tensor_parallel > 1:
        return
    whole = TrainSettings(
        model=model,
        cluster=cluster,
        rollout=Rollout(engine=engine),
        schedule=Schedule(mode="partial"),
        engine=EngineSettings(slots=slots, max_tokens=4096),
        passes=PassSettings(gradient_checkpointing=True),
    )
    plan = planned_run(
        whole,
        [],
        card_name="h100",
        expected=Expected(rows=100, prompt_tokens=256),
        tell=lambda words: None,
    )
    builder = build_engine.EngineBuilder(
        settings=build_engine.GenerationSettings.of(whole),
        plan=run_memory(whole, KNOWN_SHAPES[model], is_gpu=True, prompt_tokens=256),
        device=torch.device("cuda"),
        model=None,
        stop_tokens=(),
        tokenizer=None,
        prompts=(),
        version=0,
    )
    total = plan.device_bytes

    def found(free):
        monkeypatch.setattr(build_engine, "device_memory", lambda device: (total, int(free)))
        if engine == "native":
            return builder.native_cache_bytes()
        return builder.outside_cache_bytes()

    # The native engine has its weights on the card already, vLLM has not.
    weights = builder.plan.demand.engine_bytes if engine == "native" else 0
    cache = found(0.98 * total - weights)
    assert cache == pytest.approx(plan.memory.cache_bytes(total), rel=0.05)
    assert cache > 0
    assert found(0.3 * total) <= max(0.3 * total, plan.memory.demand.least_cache_bytes)


@pytest.mark.parametrize("block_tokens", [None, 16, 128])
def test_the_cache_of_an_outside_engine_holds_a_conversation_with_all_its_replies(block_tokens):
    from sortedrl.runs import build_engine
    from sortedrl.runs.plan.dry_run import run_memory

    model = "meta-llama/Llama-3.1-8B"
    whole = TrainSettings(
        model=model,
        rollout=Rollout(engine="vllm"),
        environment=EnvironmentSettings(name="calculator"),
        schedule=Schedule(mode="partial"),
        engine=EngineSettings(slots=1, max_tokens=64),
    )
    builder = build_engine.EngineBuilder(
        settings=build_engine.GenerationSettings.of(whole),
        plan=run_memory(whole, KNOWN_SHAPES[model], is_gpu=False, prompt_tokens=256),
        device=torch.device("cpu"),
        model=None,
        stop_tokens=(),
        tokenizer=None,
        prompts=(),
        version=0,
    )
    room = builder.outside_cache_bytes(block_tokens=block_tokens)
    block = block_tokens or 32
    blocks = room // (block * builder.plan.demand.cache_token_bytes)
    assert (blocks - 1) * block >= builder.context == 256 + 64 + 16 * 512


def test_the_trainer_scores_the_trial_before_engines_take_the_rest_of_its_gpus(
    monkeypatch, tmp_path
):
    from sortedrl.runs import build_cluster

    calls = []

    class Pool:
        version = 0

        def __init__(self, *_, **__):
            calls.append("engines start")

        def load_weights(self, weights):
            calls.append(f"weights {weights.version}")

        def scores(self, rows):
            calls.append(f"{len(rows)} rows compared")
            return {}

    class Trainer:
        version = 2

        def logprobs(self, rows):
            calls.append("trainer scores")
            return [[0.0]] * len(rows)

        def weights(self):
            return Weights(2)

    monkeypatch.setattr(build_cluster, "WorkerPool", Pool)
    monkeypatch.setattr(Pool, "close", lambda self: None, raising=False)
    settings = TrainSettings(
        model="tiny",
        out=tmp_path,
        cluster=Cluster(kind="colocated", rollout_workers=1, gpus_per_worker=1, trainer_ranks=1),
        rollout=Rollout(engine="vllm"),
        schedule=Schedule(mode="partial"),
    )
    cluster = build_cluster.RunningCluster(settings, None, tell=print)
    cluster.engine(Trainer(), longest_prompt=8, trial_prompts=[[1, 2, 3], [4, 5]])
    assert calls == ["trainer scores", "engines start", "weights 2", "2 rows compared"]
