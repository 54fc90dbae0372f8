"""Keys of older versions: refused in files and in flags, with the new name."""

from dataclasses import asdict
from pathlib import Path

import pytest

from sortedrl.cli import arguments
from sortedrl.cli.train import _given
from sortedrl.config import parsing
from sortedrl.config.cluster import Cluster
from sortedrl.config.parsing import RENAMED_KEYS, settings_over
from sortedrl.config.train import TrainSettings
from sortedrl.errors import ConfigError, DataError

RENAMED = {"cluster.old_workers": "cluster.rollout_workers", "places": "[cluster]: set its kind"}


@pytest.fixture
def _renamed(monkeypatch):
    monkeypatch.setattr(parsing, "RENAMED_KEYS", RENAMED)
    monkeypatch.setattr(arguments, "RENAMED_KEYS", RENAMED)


@pytest.mark.usefixtures("_renamed")
def test_an_old_key_in_a_file_is_refused_with_the_new_one(tmp_path):
    path = tmp_path / "run.toml"
    with pytest.raises(DataError, match=r"cluster\.old_workers is now cluster\.rollout_workers;"):
        settings_over(TrainSettings(), {"cluster": {"old_workers": 2}}, path=path)
    with pytest.raises(DataError, match=r"cluster\.old_workers is now cluster\.rollout_workers;"):
        settings_over(Cluster(), {"old_workers": 2}, path=path, section="cluster.")


@pytest.mark.usefixtures("_renamed")
def test_an_old_section_in_a_file_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"places is now \[cluster\]: set its kind; change it"):
        settings_over(TrainSettings(), {"places": {"number": 2}}, path=tmp_path / "run.toml")


@pytest.mark.usefixtures("_renamed")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--cluster.old-workers", "2"], "--cluster.old-workers is now --cluster.rollout-workers;"),
        (["--cluster.old_workers=2"], "--cluster.old-workers is now --cluster.rollout-workers;"),
        (["--places.number", "2"], r"places is now \[cluster\]: set its kind"),
        (["--places.no-number"], r"places is now \[cluster\]: set its kind"),
    ],
)
def test_an_old_flag_is_refused_with_the_new_one(flags, words):
    with pytest.raises(ConfigError, match=words):
        _given(flags)


@pytest.mark.usefixtures("_renamed")
def test_a_flag_without_its_section_is_known_too():
    from sortedrl.cli.cluster import run

    with pytest.raises(ConfigError, match="--old-workers is now --rollout-workers;"):
        run(["check", "--old-workers", "2"])


@pytest.mark.usefixtures("_renamed")
def test_what_was_never_a_key_is_unknown(tmp_path):
    with pytest.raises(DataError, match=r"unknown key 'cluster\.older_workers'"):
        settings_over(
            TrainSettings(), {"cluster": {"older_workers": 2}}, path=tmp_path / "run.toml"
        )


OF_TRAINING = [key for key in RENAMED_KEYS if key.split(".")[0] in asdict(TrainSettings())]


@pytest.mark.parametrize("old", OF_TRAINING)
def test_every_renamed_key_is_refused_in_a_file_and_as_a_flag(old):
    section, name = old.split(".")
    with pytest.raises(DataError, match=rf"mine\.toml: {old} is now .*; change it"):
        settings_over(TrainSettings(), {section: {name: 1}}, path=Path("mine.toml"))
    flag = f"--{old}".replace("_", "-")
    with pytest.raises(ConfigError, match=rf"{old}|{flag} is now "):
        _given([flag, "1"])


def test_a_run_saved_under_the_old_keys_is_read():
    table = {"passes": {"tokens": 7, "compiled": False}, "optimiser": {"steps": 3}}
    settings = settings_over(TrainSettings(), table, path=Path("config.toml"), takes_old_keys=True)
    assert settings.passes.micro_batch_tokens == 7
    assert settings.optimiser.mini_batches == 3
    assert table["passes"] == {"tokens": 7, "compiled": False}


def test_a_run_saved_with_a_layout_and_a_hand_over_is_read():
    table = {
        "layout": {"devices": 1, "tensor_parallel": 1, "offload": False},
        "cluster": {"rollout_workers": 2, "hand_over": "group", "patience_seconds": 9.0},
    }
    settings = settings_over(TrainSettings(), table, path=Path("config.toml"), takes_old_keys=True)
    assert settings.cluster == Cluster(
        rollout_workers=2, weight_sync="broadcast", worker_timeout_seconds=9.0
    )


def test_a_key_under_both_names_is_refused():
    table = {"passes": {"tokens": 7, "micro_batch_tokens": 8}}
    with pytest.raises(DataError, match=r"got both; remove passes\.tokens"):
        settings_over(TrainSettings(), table, path=Path("config.toml"), takes_old_keys=True)
