"""The folder of a run: begun once, with settings that are read back as they were written."""

import errno
import math
import os
from pathlib import Path

import pytest

from sortedrl.config.algorithm import Algorithm, Optimisation
from sortedrl.config.cluster import Cluster
from sortedrl.config.data import PeriodicEvaluation, RewardSettings
from sortedrl.config.parsing import read_toml, settings_over, settings_to_toml
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.config.train import Lora, PassSettings, Rollout, Saving, Tracking, TrainSettings
from sortedrl.errors import ConfigError, DataError
from sortedrl.runs.folder import RunFolder, as_saved, refuse_other_settings

SIBLINGS = Schedule(samples_per_prompt=4, harvest_unit="prompt")
SETTINGS = [
    TrainSettings(),
    TrainSettings(model="some/model", out=Path("a b/c"), seed=7, max_updates=3, threads=2),
    TrainSettings(reward='my "own".py:f', reward_options=("a=1", "b=[1, 2]"), folder=Path("d")),
    TrainSettings(schedule=Schedule(mode="coupled", tolerance=math.inf, lookahead=2)),
    TrainSettings(algorithm=Algorithm(dual_clip=3.0, kl_coef=1e-3, kl_place="loss")),
    TrainSettings(algorithm=Algorithm(name="ppo", value_clip=None)),
    TrainSettings(
        optimiser=Optimisation(max_grad_norm=None, learning_rate=1e-06, schedule="cosine")
    ),
    TrainSettings(lora=Lora(rank=8, targets=("q_proj", "v_proj")), precision="bfloat16"),
    TrainSettings(
        evaluation=PeriodicEvaluation(tasks=("gsm8k", "a:b=1-2,c=3"), target=0.5, limit=9),
        saving=Saving(every=3, keep_last=1, keep_best=False),
        engine=EngineSettings(slots=3, max_tokens=5),
    ),
    TrainSettings(tracking=Tracking(wandb="mine")),
    TrainSettings(tracking=Tracking(tensorboard=True)),
    TrainSettings(schedule=SIBLINGS, algorithm=Algorithm(name="dapo", filter_zero_variance=False)),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=range(len(SETTINGS)))
def test_settings_are_read_back_as_they_were_written(tmp_path, settings):
    folder = RunFolder(tmp_path / "run")
    with folder.created(settings_to_toml(settings, TrainSettings())):
        pass
    table = read_toml(folder.config)
    found = settings_over(TrainSettings(), table, path=folder.config)
    assert found == settings


def test_every_setting_is_written_down():
    """Also those that are as by default, which may be others in the next version."""
    text = settings_to_toml(TrainSettings(), TrainSettings())
    for line in ("seed = 0", "[schedule]", 'mode = "partial"', "learning_rate = 1e-06"):
        assert line in text.splitlines()


def test_a_folder_is_begun_in_once(tmp_path):
    folder = RunFolder(tmp_path / "some" / "run")
    assert not folder.holds_run
    folder.refuse_second_run()
    with folder.created("seed = 1\n"):
        assert folder.holds_run
    with (
        pytest.raises(ConfigError, match=r"already holds a run; resume it \(--resume\)"),
        folder.created("seed = 2\n"),
    ):
        pass
    assert folder.config.read_text() == "seed = 1\n"
    folder.write("seed = 3\n")
    assert folder.config.read_text() == "seed = 3\n"


def test_a_folder_with_other_things_in_it_may_be_begun_in(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with RunFolder(tmp_path).created("seed = 1\n"):
        pass
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_run_that_comes_to_nothing_leaves_nothing(tmp_path):
    folder = RunFolder(tmp_path / "a" / "b")

    def fail(log):
        with folder.left_as_found(), folder.created("seed = 1\n"):
            folder.events.write_text(log)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail("")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt):
        fail("something happened\n")
    assert folder.holds_run


def test_a_full_disk_refuses_a_new_run_and_keeps_nothing_of_it(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = RunFolder(tmp_path / "run")
    monkeypatch.setattr(Path, "write_text", refuse)
    with (
        pytest.raises(DataError, match=r"run\.json: cannot be written \(No space left"),
        folder.left_as_found(),
        folder.created("seed = 1\n"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_one_process_at_a_time_holds_a_folder(tmp_path):
    folder = RunFolder(tmp_path)
    for hold in (lambda: folder.created(""), folder.reopened):
        with hold(), pytest.raises(ConfigError, match="another process"), folder.reopened():
            pass


def test_a_run_of_an_older_version_is_marked_when_it_is_taken_up(tmp_path):
    (tmp_path / "config.toml").write_text("seed = 1\n")
    (tmp_path / "events.jsonl").write_text("")
    folder = RunFolder(tmp_path)
    assert folder.holds_run
    with folder.reopened():
        pass
    assert "sortedrl-run" in folder.mark.read_text()


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(DataError, match="cannot be written"),
        RunFolder(tmp_path / "file" / "run").created(""),
    ):
        pass


BEGUN = TrainSettings()


@pytest.mark.parametrize("settings", SETTINGS, ids=range(len(SETTINGS)))
def test_the_same_settings_are_accepted(settings):
    assert refuse_other_settings(as_saved(settings), settings) == []


MAY_CHANGE = TrainSettings(
    out=Path("elsewhere"),
    epochs=9,
    max_updates=7,
    device="cpu",
    threads=3,
    folder=Path("data"),
    engine=EngineSettings(slots=BEGUN.engine.slots - 1),
    rollout=Rollout(cache_gib=1.0),
    optimiser=Optimisation(
        learning_rate=1e-9, max_grad_norm=0.1, warmup_steps=3, schedule="cosine", max_bad_updates=9
    ),
    passes=PassSettings(micro_batch_tokens=7, gradient_checkpointing=True),
    cluster=Cluster(rollout_workers=1),
    rewards=RewardSettings(workers=1, time_limit_seconds=1.0, on_failure="skip"),
    evaluation=PeriodicEvaluation(tasks=("gsm8k",)),
    saving=Saving(every=1),
    tracking=Tracking(wandb="mine"),
)


def test_settings_that_change_no_answer_may_change_and_are_named():
    told = refuse_other_settings(as_saved(BEGUN), MAY_CHANGE)
    assert "optimiser.learning_rate was 1e-06, is 1e-09" in told
    assert len(told) == 22


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (TrainSettings(seed=1), "seed was 0, is 1"),
        (TrainSettings(model="other"), "model was 'tiny', is 'other'"),
        (TrainSettings(precision="float32"), "precision was 'auto', is 'float32'"),
        (TrainSettings(lora=Lora(rank=4)), "lora.rank was None, is 4"),
        (TrainSettings(engine=EngineSettings(slots=129)), "engine.slots was 128, is 129"),
        (TrainSettings(reward_options=("a=1",)), "reward_options was"),
        (TrainSettings(rewards=RewardSettings(failure_reward=-1.0)), "rewards.failure_reward was"),
        (TrainSettings(schedule=Schedule(update_batch=64)), "schedule.update_batch was 128, is 64"),
        (
            TrainSettings(optimiser=Optimisation(mini_batches=2)),
            "optimiser.mini_batches was 1, is 2",
        ),
    ],
)
def test_others_are_refused_by_name(given, words):
    with pytest.raises(ConfigError, match=words):
        refuse_other_settings(as_saved(BEGUN), given)


def test_settings_saved_under_old_keys_are_compared_under_the_new_ones():
    saved = as_saved(BEGUN)
    saved["optimiser"]["steps"] = saved["optimiser"].pop("mini_batches")
    assert refuse_other_settings(saved, BEGUN) == []
    saved["optimiser"]["steps"] = 2
    with pytest.raises(ConfigError, match=r"optimiser\.mini_batches was 2, is 1"):
        refuse_other_settings(saved, BEGUN)


def test_a_setting_that_is_newer_than_the_checkpoint_was_as_it_is_by_default():
    saved = as_saved(BEGUN)
    del saved["seed"], saved["schedule"]["mode"]
    assert refuse_other_settings(saved, BEGUN) == []
    with pytest.raises(ConfigError, match="seed was 0, is 1"):
        refuse_other_settings(saved, TrainSettings(seed=1))
