"""A smoke run: the layout of the paper's files with a tiny model, on CPUs."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from sortedrl.cluster.placement import placement_plan
from sortedrl.config.cluster import Cluster
from sortedrl.config.parsing import settings_over
from sortedrl.config.sizes import with_siblings
from sortedrl.config.train import TrainSettings
from sortedrl.runs.start import smoke_run

PAPER = Path(__file__).parents[1] / "experiments" / "paper"


def paper_settings(name):
    path = PAPER / f"{name}.toml"
    return settings_over(TrainSettings(), with_siblings(tomllib.loads(path.read_text())), path=path)


@pytest.mark.parametrize("name", ["logic-vllm", "logic-sglang", "maths-vllm", "maths-sglang"])
def test_a_smoke_run_has_the_workers_and_ranks_of_the_file_and_says_what_it_replaces(name):
    real = paper_settings(name)
    smoke = smoke_run(real)
    small, cluster = smoke.settings, smoke.settings.cluster
    assert cluster.num_workers == real.cluster.num_workers
    assert cluster.trainer_ranks == real.cluster.trainer_ranks == 8
    assert placement_plan(cluster).total == {"CPU": cluster.num_workers + 8}
    assert small.algorithm.name == real.algorithm.name
    assert small.schedule.strategy == real.schedule.strategy
    assert small.schedule.mode == real.schedule.mode
    assert small.schedule.lookahead == real.schedule.lookahead
    assert small.max_updates == 2
    assert small.out.parent == real.out.parent
    assert small.out != real.out
    text = "; ".join(smoke.lines)
    assert f"model tiny in place of {real.model}" in text
    assert f"the native engine in place of {real.rollout.engine}" in text
    assert ("kind separated in place of colocated" in text) == (cluster.num_workers == 1)
    assert "rollout workers: " in text


def test_a_run_without_a_cluster_and_with_a_tiny_model_replaces_little():
    smoke = smoke_run(replace(TrainSettings(), model="tiny"))
    assert smoke.settings.cluster == Cluster()
    assert not any("in place of" in line and "task" not in line for line in smoke.lines)
