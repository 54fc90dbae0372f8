"""Whole runs of conversations with vLLM or SGLang beside the trainer: turns, replies, masks."""

import json
from collections import Counter
from copy import deepcopy

import pytest
import torch
from served import OPTIONS

from run_worlds import STOPS, write_world
from sortedrl.config.algorithm import Optimisation
from sortedrl.config.data import EnvironmentSettings
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.config.train import Rollout, TrainSettings
from sortedrl.core.files import read_metrics
from sortedrl.engines.conformance import logprob_gap
from sortedrl.engines.streaming.streamed_engine import OpenRequest
from sortedrl.models.loading import load_model
from sortedrl.report.live import PlainView
from sortedrl.runs.opening import opened_run
from sortedrl.runs.start import Stopping
from sortedrl.runs.tasks import training_tasks
from sortedrl.training.batch import TokenSequence

pytestmark = pytest.mark.filterwarnings("default")
ROWS, SAMPLES, TURNS = 8, 2, 4
CALL = ord("=")


def write_caller(folder):
    """A model most of whose turns are a call of the calculator, and rows for it."""
    write_world(folder, stops=(CALL, *STOPS[:6]), hidden=64)
    model = load_model(folder / "begun", dtype=None, device="cpu")
    with torch.no_grad():
        model.get_input_embeddings().weight[CALL] *= 25
    model.save_pretrained(folder / "begun")
    # Long enough that the prefix cache of every engine has a block of it.
    rows = [
        {"prompt": f"{'0' * 40}{40 + n}*86:", "answer": str((40 + n) * 86)} for n in range(ROWS)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("mode", ["partial", "on_policy", "redraw"])
def test_conversations_are_trained_once_on_what_the_policy_wrote(
    engine, mode, tmp_path, monkeypatch
):
    if (engine, mode) == ("sglang", "redraw"):
        pytest.skip("on a CPU SGLang ignores seeds")
    monkeypatch.chdir(tmp_path)
    write_caller(tmp_path)
    settings = TrainSettings(
        model="begun",
        task="rows.jsonl",
        reward="judge.py:letters",
        out=tmp_path / "run",
        device="cpu",
        threads=1,
        environment=EnvironmentSettings(
            name="calculator", reward="function", max_turns=TURNS, processes=1
        ),
        engine=EngineSettings(slots=4, max_tokens=48),
        schedule=Schedule(group_prompts=4, samples_per_prompt=SAMPLES, update_batch=4, mode=mode),
        rollout=Rollout(engine=engine, options=OPTIONS[engine]),
        optimiser=Optimisation(learning_rate=1e-3),
    )
    reused = watched_cache(monkeypatch)
    task, held_out = training_tasks(settings)
    view = PlainView(lambda *_: None)
    with (
        opened_run(settings, task=task, held_out=held_out, is_resumed=False, view=view) as run,
        Stopping(lambda *_: None) as stopping,
    ):
        batches, models = watched_updates(run.parts.trainer, monkeypatch)
        ending = run.go(stopping)
    assert ending.reason == "data"
    conversations = [t for batch in batches for t in batch.trajectories]
    keys = Counter(t.key for t in conversations)
    assert keys == Counter((row, n) for row in range(ROWS) for n in range(SAMPLES))
    assert sum(t.num_turns > 1 for t in conversations) >= 2
    for conversation in conversations:
        assert logprob_gap(conversation, models, temperature=1.0) < 1e-3
        places = TokenSequence.of(conversation).scored_places
        assert [conversation.response[place] for place in places] == conversation.tokens
        assert len(conversation.logprobs) == len(places)
    rows = [row for row in read_metrics(settings.out / "metrics.jsonl") if "loss" in row]
    assert rows[-1]["total/trained_tokens"] == sum(t.num_tokens for t in conversations)
    assert max(row.get("gap/max", 0) for row in rows) < 1e-3
    ages = {b.version - s.version for b in batches for t in b.trajectories for s in t.segments}
    assert (ages == {0}) == (mode != "partial")
    assert sum(reused) > 0, "the prefix cache is off"


def watched_cache(monkeypatch):
    """The tokens of each request that the engine found in its prefix cache."""
    reused, append = [], OpenRequest.append

    def watched(request, delta, **how):
        reused.append(delta.num_cached_tokens)
        append(request, delta, **how)

    monkeypatch.setattr(OpenRequest, "append", watched)
    return reused


def watched_updates(trainer, monkeypatch):
    """The batches of all updates, and the model before each of them by its version."""
    batches, models, update = [], {}, trainer.update
    plain = load_model("begun", dtype=None, device="cpu")

    def watched(batch):
        models[trainer.version] = deepcopy(plain)
        models[trainer.version].load_state_dict(trainer.weights().tensors, strict=False)
        batches.append(batch)
        update(batch)

    monkeypatch.setattr(trainer, "update", watched)
    return batches, models
