"""Whole runs with vLLM or SGLang, in three forms: the weights really change in there."""

from contextlib import contextmanager

import pytest
import torch
from served import OPTIONS, sglang_servers, vllm_servers

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
ON_RAY = Cluster(
    rollout_workers=2, trainer_ranks=1, dashboard=False, object_store_gib=0.2, start_seconds=300
)
SLOTS, CONTEXT = 6, 256
PROMPTS = [[40 + n, 50, 60 + n] for n in range(6)]
TOKENS = 24


@torch.no_grad()
def greedy(model, prompt):
    """What a model writes on its own, token by token."""
    text = list(prompt)
    while len(text) < len(prompt) + TOKENS:
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(prompt) :]


@contextmanager
def rollout(engine, form):
    """How the answers of a run are generated: by a process of it, by workers, or by a server."""
    if form == "served":
        servers = {"vllm": vllm_servers, "sglang": sglang_servers}[engine]
        with servers("begun", count=1, slots=SLOTS, context=CONTEXT) as (one,):
            yield Rollout(engine="servers", urls=(one.url,), queue=2)
            assert one.process.poll() is None, "a server lives on"
    else:
        yield Rollout(engine=engine, options=OPTIONS[engine], queue=2)


@pytest.mark.parametrize("form", ["beside", "on_ray", "served"])
def test_a_run_trains_with_an_outside_engine_which_has_the_new_weights_in_the_end(
    engine, form, tmp_path, monkeypatch
):
    if form == "on_ray":
        pytest.importorskip("ray", reason="the cluster needs the package ray")
    monkeypatch.chdir(tmp_path)
    write_world(tmp_path, hidden=64)
    with rollout(engine, form) as generated:
        trains(generated, ON_RAY if form == "on_ray" else Cluster(), tmp_path, monkeypatch)


def trains(rollout, cluster, tmp_path, monkeypatch):
    settings = TrainSettings(
        model="begun",
        task=TASK,
        reward="judge.py:letters",
        out=tmp_path / "run",
        device="cpu",
        threads=1,
        engine=EngineSettings(slots=SLOTS, max_tokens=32),
        schedule=Schedule(group_prompts=8, update_batch=4),
        rollout=rollout,
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
