"""The folder of a run: begun once, with settings that are read back as they were written."""

import math
from dataclasses import asdict
from pathlib import Path

import pytest

from sortedrl.arguments import all_to_toml, settings_over
from sortedrl.config import EngineSettings, Schedule
from sortedrl.errors import ConfigError, DataError
from sortedrl.runs.folder import RunFolder, refuse_other_settings
from sortedrl.toml_file import read_toml
from sortedrl.trackers import Tracking
from sortedrl.training.algorithm import Algorithm
from sortedrl.training.optimisation import Optimisation
from sortedrl.training.saving import Saving
from sortedrl.training.settings import Lora, PeriodicEvaluation, TrainSettings

SIBLINGS = Schedule(samples_per_prompt=4, harvest_unit="prompt")
SETTINGS = [
    TrainSettings(),
    TrainSettings(model="some/model", out=Path("a b/c"), seed=7, max_updates=3, threads=2),
    TrainSettings(reward='my "own".py:f', reward_options=("a=1", "b=[1, 2]"), folder=Path("d")),
    TrainSettings(schedule=Schedule(mode="coupled", tolerance=math.inf, lookahead=2)),
    TrainSettings(algorithm=Algorithm(value_clip=None, dual_clip=3.0, kl=1e-3, kl_place="loss")),
    TrainSettings(optimiser=Optimisation(max_norm=None, learning_rate=1e-06, schedule="cosine")),
    TrainSettings(lora=Lora(rank=8, targets=("q_proj", "v_proj")), precision="bfloat16"),
    TrainSettings(
        evaluation=PeriodicEvaluation(tasks=("gsm8k", "a:b=1-2,c=3"), target=0.5, limit=9),
        saving=Saving(every=3, keep_last=1, keep_best=False),
        engine=EngineSettings(slots=3, max_tokens=5),
    ),
    TrainSettings(tracking=Tracking(wandb="mine")),
    TrainSettings(tracking=Tracking(tensorboard=True)),
    TrainSettings(schedule=SIBLINGS, algorithm=Algorithm(name="dapo", drop_equal=False)),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=range(len(SETTINGS)))
def test_settings_are_read_back_as_they_were_written(tmp_path, settings):
    folder = RunFolder(tmp_path / "run")
    folder.begin(all_to_toml(settings, TrainSettings()))
    table = read_toml(folder.config)
    found = settings_over(TrainSettings(), table, path=folder.config)
    assert found == settings


def test_every_setting_is_written_down():
    """Also those that are as by default, which may be others in the next version."""
    text = all_to_toml(TrainSettings(), TrainSettings())
    for line in ("seed = 0", "[schedule]", 'mode = "partial"', "learning_rate = 1e-06"):
        assert line in text.splitlines()


def test_a_folder_is_begun_in_once(tmp_path):
    folder = RunFolder(tmp_path / "some" / "run")
    assert not folder.holds_run
    folder.refuse_second_run()
    folder.begin("seed = 1\n")
    assert folder.holds_run
    with pytest.raises(ConfigError, match=r"already holds a run; go on with it \(--resume\)"):
        folder.begin("seed = 2\n")
    assert folder.config.read_text() == "seed = 1\n"
    folder.write("seed = 3\n")
    assert folder.config.read_text() == "seed = 3\n"


def test_a_folder_with_other_things_in_it_may_be_begun_in(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    RunFolder(tmp_path).begin("seed = 1\n")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        RunFolder(tmp_path / "file" / "run").begin("")


def test_the_same_settings_are_accepted():
    refuse_other_settings(asdict(TrainSettings()), asdict(TrainSettings()))


MAY_CHANGE = TrainSettings(
    out=Path("elsewhere"),
    epochs=9,
    max_updates=7,
    device="cpu",
    folder=Path("data"),
    evaluation=PeriodicEvaluation(tasks=("gsm8k",)),
    saving=Saving(every=1),
    tracking=Tracking(wandb="mine"),
)


def test_settings_that_change_no_answer_may_change():
    refuse_other_settings(asdict(TrainSettings()), asdict(MAY_CHANGE))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (TrainSettings(seed=1), "seed was 0, is 1"),
        (TrainSettings(model="other"), "model was 'tiny', is 'other'"),
        (TrainSettings(precision="float32"), "precision was 'auto', is 'float32'"),
        (TrainSettings(lora=Lora(rank=4)), "lora.rank was None, is 4"),
        (TrainSettings(engine=EngineSettings(slots=1)), "engine.slots was 128, is 1"),
        (TrainSettings(threads=1), "threads was None, is 1"),
    ],
)
def test_others_are_refused_by_name(given, words):
    with pytest.raises(ConfigError, match=words):
        refuse_other_settings(asdict(TrainSettings()), asdict(given))
