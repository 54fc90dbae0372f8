"""A reference that is refreshed: it follows the trained model, also over a resume."""

import pytest
import torch

from native_worlds import tiny_model
from sortedrl.config.algorithm import Algorithm
from sortedrl.config.cluster import Cluster
from sortedrl.config.schedule import Schedule
from sortedrl.config.train import Lora, TrainSettings
from sortedrl.errors import ConfigError
from sortedrl.training.batch import TokenSequence
from sortedrl.training.checkpoint import save
from sortedrl.types import TrainBatch
from training_worlds import train_settings, trainer_of, written

ALGORITHM = Algorithm(kl_coef=0.1, kl_place="loss", reference_refresh=2)
SETTINGS = train_settings(algorithm=ALGORITHM, schedule=Schedule(group_prompts=4, update_batch=4))
TEXT = [TokenSequence((3, 4), (5, 6, 7))]


class NoTokenizer:
    def save_pretrained(self, folder):
        """There is none."""


def update(trainer):
    trajectories = written(trainer.model, [5, 9, 3, 7], version=trainer.version)
    trainer.update(TrainBatch(trainer.version, tuple(trajectories)))


def test_the_reference_becomes_the_trained_model_every_so_many_updates():
    trainer = trainer_of(tiny_model(std=0.3), SETTINGS)
    seen = [trainer._reference.logprobs(TEXT)]
    ages = []
    for _ in range(4):
        update(trainer)
        seen.append(trainer._reference.logprobs(TEXT))
        ages.append(trainer.last["kl/reference_age"])
        if trainer.version % 2 == 0:
            assert torch.equal(seen[-1], trainer._policy_logprobs(TEXT).detach())
            assert not torch.equal(seen[-1], seen[-2])
        else:
            assert torch.equal(seen[-1], seen[-2])
    assert ages == [0.0, 1.0, 0.0, 1.0]


def test_a_resumed_run_has_the_reference_of_its_last_refresh(tmp_path):
    trainer = trainer_of(tiny_model(std=0.3), SETTINGS)
    for _ in range(3):
        update(trainer)
    counters = {}
    folder = tmp_path / "checkpoint"
    save(folder, lambda part: counters.update(trainer.save(part, tokenizer=NoTokenizer())))
    other = trainer_of(tiny_model(std=0.3), SETTINGS)
    other.load(folder, counters)
    assert torch.equal(other._reference.logprobs(TEXT), trainer._reference.logprobs(TEXT))


def test_a_reference_that_stays_is_not_saved():
    settings = train_settings(algorithm=Algorithm(kl_coef=0.1))
    assert "reference" not in trainer_of(tiny_model(std=0.3), settings).tensors()


def test_a_reference_is_refreshed_only_where_there_is_a_whole_copy():
    with pytest.raises(
        ConfigError, match="reference_refresh needs a reference, got 3 with kl_coef"
    ):
        Algorithm(reference_refresh=3)
    with pytest.raises(ConfigError, match=r"without adapters, got lora\.rank 4"):
        TrainSettings(algorithm=ALGORITHM, lora=Lora(rank=4))
    with pytest.raises(ConfigError, match="trainer_ranks 1"):
        TrainSettings(algorithm=ALGORITHM, cluster=Cluster(rollout_workers=1))
