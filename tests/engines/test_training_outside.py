"""Whole runs with vLLM or SGLang beside the trainer: the weights really change in there."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from run_worlds import TASK, write_world
from sortedrl.config.algorithm import Optimisation
from sortedrl.config.cluster import Cluster
from sortedrl.config.data import PeriodicEvaluation
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.config.train import Rollout, TrainSettings
from sortedrl.core.files import read_metrics
from sortedrl.engines.generation import fresh_trajectories, run_to_end
from sortedrl.engines.sampling import Sampling
from sortedrl.models.loading import load_model
from sortedrl.report.live import PlainView
from sortedrl.runs.opening import opened_run
from sortedrl.runs.start import Stopping
from sortedrl.runs.tasks import training_tasks

pytestmark = pytest.mark.filterwarnings("default")
OPTIONS = {"vllm": ("enforce_eager=true",), "sglang": ()}
ON_RAY = Cluster(
    rollout_workers=2, trainer_ranks=1, dashboard=False, object_store_gib=0.2, start_seconds=300
)
PROMPTS = [[40 + n, 50, 60 + n] for n in range(6)]
TOKENS = 24


@pytest.fixture(params=("vllm", "sglang"))
def engine(request, monkeypatch):
    if find_spec(request.param) is None:
        pytest.skip(f"needs {request.param}, in a venv of its own")
    if request.param == "sglang":
        stub = Path(__file__).parent / "sgl_kernel_stub"
        monkeypatch.syspath_prepend(stub)
        # Its processes are started anew and look there too.
        inherited = os.environ.get("PYTHONPATH", "")
        monkeypatch.setenv("PYTHONPATH", f"{stub}{os.pathsep}{inherited}")
        monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    return request.param


@torch.no_grad()
def greedy(model, prompt):
    """What a model writes on its own, token by token."""
    text = list(prompt)
    while len(text) < len(prompt) + TOKENS:
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("cluster", [Cluster(), ON_RAY], ids=["beside", "on_ray"])
def test_a_run_trains_with_an_outside_engine_which_has_the_new_weights_in_the_end(
    engine, cluster, tmp_path, monkeypatch
):
    if cluster.is_used:
        pytest.importorskip("ray", reason="the cluster needs the package ray")
    monkeypatch.chdir(tmp_path)
    write_world(tmp_path, hidden=64)
    settings = TrainSettings(
        model="begun",
        task=TASK,
        reward="judge.py:letters",
        out=tmp_path / "run",
        device="cpu",
        threads=1,
        engine=EngineSettings(slots=6, max_tokens=32),
        schedule=Schedule(group_prompts=8, update_batch=4),
        rollout=Rollout(engine=engine, options=OPTIONS[engine], queue=2),
        optimiser=Optimisation(learning_rate=1e-2),
        cluster=cluster,
        evaluation=PeriodicEvaluation(tasks=("knights_knaves:people=2,count=4,style=compact",)),
    )
    task, held_out = training_tasks(settings)
    lines = []
    view = PlainView(lambda *_: None)
    monkeypatch.setattr(view, "tell", lines.append)
    with (
        opened_run(settings, task=task, held_out=held_out, is_resumed=False, view=view) as run,
        Stopping(lines.append) as stopping,
    ):
        ending = run.go(stopping)
        parts = run.parts
        parts.engine.load_weights(parts.trainer.weights())
        trial = fresh_trajectories(PROMPTS, samples_per_prompt=1, seed=0)
        frozen = Sampling(temperature=0, stop_tokens=frozenset(), max_tokens=TOKENS)
        parts.engine.submit(trial, tolerance=None, sampling=frozen)
        written = run_to_end(parts.engine, [t.key for t in trial], show_progress=False)
    model = load_model(settings.out / "model", dtype=None, device="cpu")
    trained = [greedy(model, prompt) for prompt in PROMPTS]
    assert ending.reason == "data"
    assert [t.tokens for t in written] == trained
    begun = load_model("begun", dtype=None, device="cpu")
    assert trained != [greedy(begun, prompt) for prompt in PROMPTS], "nothing was learned"
    updates = [row for row in read_metrics(settings.out / "metrics.jsonl") if "loss" in row]
    # An update all of whose tokens are stale shows nothing of the engine.
    rows = [row for row in updates if "gap/max" in row]
    # How many answers are complete at a harvest, and so how many updates there are, is timing.
    assert updates[-1]["total/samples"] == len(task.rows)
    assert max(row["gap/max"] for row in rows) < 1e-3
    assert any(row["stale_1/share"] > 0 for row in updates), "no answer was gone on with"
    assert not list(settings.out.glob("engine-model-*")), "the model's folder is left behind"
