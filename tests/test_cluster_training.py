"""A whole training run on Ray beside the same run in one process."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="the cluster needs the package ray")
import torch
from safetensors.torch import load_file

from sortedrl.cluster.remote_trainer import RemoteTrainer
from sortedrl.config.algorithm import Optimisation
from sortedrl.config.cluster import Cluster
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.config.train import Lora, Saving, TrainSettings
from sortedrl.core.events import read_events
from sortedrl.core.files import read_metrics
from sortedrl.core.meter import measure
from sortedrl.runs.start import train
from sortedrl.training.lora import plain_tensors, trained_parameters
from sortedrl.training.trainer import PolicyTrainer

pytestmark = [
    pytest.mark.slow,
    # Ray leaves sockets and files to the end of the process.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

TWO_AND_TWO = Cluster(
    rollout_workers=2,
    trainer_ranks=2,
    dashboard=False,
    object_store_gib=0.2,
    worker_timeout_seconds=300,
    start_seconds=300,
)
ALONE = TrainSettings(
    model="tiny:hidden=32,layers=2,heads=2,seed=3",
    task="knights_knaves:people=3,count=48,style=compact",
    threads=1,
    reward=f"{Path(__file__).parent / 'cluster_worlds.py'}:length_reward",
    schedule=Schedule(mode="partial", group_prompts=24, update_batch=8, lookahead=1),
    engine=EngineSettings(slots=8, max_tokens=24),
    # Where a gradient is next to nothing, AdamW divides noise by noise unless epsilon is larger.
    optimiser=Optimisation(learning_rate=1e-2, epsilon=1e-3),
    saving=Saving(every=2, answers=0),
)


ADAPTED = replace(ALONE, lora=Lora(rank=4))


@pytest.fixture
def batches(monkeypatch):
    """Every batch that a trainer of a run is given."""
    seen = []
    for kind in (RemoteTrainer, PolicyTrainer):

        def spied(self, batch, update=kind.update):
            seen.append(batch)
            update(self, batch)

        monkeypatch.setattr(kind, "update", spied)
    return seen


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def trained(batches) -> dict:
    """The tokens of every answer, by its key; no answer is trained on twice."""
    answers = [answer for batch in batches for answer in batch.trajectories]
    found = {answer.key: (tuple(answer.tokens), answer.reward) for answer in answers}
    assert len(found) == len(answers)
    return found


def largest_gap(left, right) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def test_ranks_with_adapters_make_the_updates_that_one_process_makes_of_the_same_answers(
    batches, tmp_path
):
    out = tmp_path / "cluster"
    ending = train(replace(ADAPTED, out=out, cluster=replace(TWO_AND_TWO, rollout_workers=1)))
    given = list(batches)
    assert len(trained(given)) == 48
    assert ending.updates == len(given) >= 4

    # One process is given these answers, and nothing else of that run.
    from sortedrl.runs.build_training import _trainer

    alone = _trainer(ADAPTED, num_rows=48, saved=None, cluster=None)
    began = {name: tensor.detach().clone() for name, tensor in plain_tensors(alone.model).items()}
    num_compared = 0
    for batch in given:
        # The worker wrote with the adapters of the version that it names.
        present = [
            t for t in batch.trajectories if {s.version for s in t.segments} == {batch.version}
        ]
        for answer, logprobs in zip(
            present, alone.logprobs(present) if present else (), strict=True
        ):
            assert logprobs == pytest.approx(
                [p for s in answer.segments for p in s.logprobs], abs=1e-3
            )
            num_compared += batch.version > 0
        alone.update(batch)
    assert num_compared
    found = {name: tensor.detach() for name, tensor in plain_tensors(alone.model).items()}
    here = {name: found[name] for name in weights(out)}
    assert largest_gap(weights(out), here) <= 1e-5
    assert largest_gap(weights(out), {name: began[name] for name in here}) > 1e-3

    metrics = measure(read_events(out / "events.jsonl"))
    assert metrics.run.trajectories == 48
    assert metrics.run.ledger.decoded == metrics.run.ledger.trained
    last = list(read_metrics(out / "metrics.jsonl"))[-1]
    assert last["hand_over/workers"] == 1
    adapters = trained_parameters(alone.model).values()
    assert last["hand_over/bytes"] == sum(tensor.nbytes for tensor in adapters), "and nothing else"
    logs = sorted(path.name for path in (out / "logs").glob("*.log"))
    assert logs == ["rank-0.log", "rank-1.log", "rollout-0.log"]


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("partial", {"overlap": True, "rollout_workers": 1, "trainer_ranks": 1}),
        ("coupled", {"kind": "colocated", "weight_sync": "disk", "checkpoint": "sharded"}),
    ],
)
def test_with_frozen_weights_a_cluster_trains_on_the_answers_of_one_process(
    batches, tmp_path, mode, changes
):
    still = replace(
        ALONE,
        schedule=replace(ALONE.schedule, mode=mode),
        optimiser=replace(ALONE.optimiser, learning_rate=0.0, weight_decay=0.0),
    )
    train(replace(still, out=tmp_path / "alone"))
    alone = trained(batches)
    batches.clear()
    train(replace(still, out=tmp_path / "cluster", cluster=replace(TWO_AND_TWO, **changes)))
    assert trained(batches) == alone
    assert len(alone) == 48
    assert largest_gap(weights(tmp_path / "alone"), weights(tmp_path / "cluster")) == 0.0

    # What ranks have saved, in one file or in parts, one process goes on from.
    further = replace(still, out=tmp_path / "cluster", epochs=2, cluster=Cluster())
    batches.clear()
    train(further, is_resumed=True)
    assert len(trained(batches)) == 48, "the second epoch"
