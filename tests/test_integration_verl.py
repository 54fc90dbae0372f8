"""The laws of a verl run with our trainer mode, on a local Ray and the real TransferQueue.

Needs verl, in a venv of its own: `make test-verl`.
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed: make test-verl")

import ray
import transfer_queue
from omegaconf import open_dict

from sortedrl.errors import ConfigError, TrainingError
from sortedrl.integrations.verl.trainer import schedule_for, seed_of
from verl_run.paper import overrides_of
from verl_run.run import RecordingTrainer, Stage, run_config, verl_config
from verl_run.servers import STOP, length_of, noise

_ROWS, _BATCH, _SAMPLES = 16, 4, 2
_ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def stage():
    """A local Ray with TransferQueue, for all runs."""
    environment = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "VERL_USE_EXTERNAL_MODULES": "sortedrl.integrations.verl",
    }
    # Its actors wait for CPUs of their own, which they do not use.
    ray.init(
        address="local",
        num_cpus=32,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
    config = verl_config("transfer_queue.backend.SimpleStorage.num_data_storage_units=1")
    with open_dict(config):
        config.transfer_queue.enable = True
    transfer_queue.init(config.transfer_queue)
    yield Stage()
    transfer_queue.close()
    ray.shutdown()


def _config(folder, mode, *extra, epochs=1):
    own = [f"+trainer.v1.sortedrl.mode={mode}", "+trainer.v1.sortedrl.group_prompts=8"]
    own += [f"trainer.total_epochs={epochs}"]
    return run_config(folder, rows=_ROWS, extra=[*own, *extra])


def _refuse_lost_or_repeated(batches, *, epochs):
    """Every prompt is trained once per epoch, whole, in batches of the exact size."""
    assert [len(batch) for batch in batches] == [_BATCH * _SAMPLES] * (epochs * _ROWS // _BATCH)
    rows = [answer["row"] for batch in batches for answer in batch]
    for epoch in range(epochs):
        of_epoch = rows[epoch * _ROWS * _SAMPLES : (epoch + 1) * _ROWS * _SAMPLES]
        assert Counter(of_epoch) == {row: _SAMPLES for row in range(_ROWS)}
    keys = [(a["uid"], a["session"]) for batch in batches for a in batch]
    assert len(set(keys)) == len(keys)


def _uninterrupted(answer):
    seed = seed_of(answer["uid"], answer["session"])
    length = length_of(seed)
    return [*(noise(seed, position) for position in range(length - 1)), STOP]


def _answers(trainer: RecordingTrainer):
    return [answer for batch in trainer.trained for answer in batch]


def _totals(batch):
    totals = Counter()
    for answer in batch:
        totals[answer["uid"]] += len(answer["tokens"])
    return list(totals.values())


def test_partial_mode_trains_every_prompt_once_short_first_and_survives_failures(stage, tmp_path):
    """Interrupted answers are resumed; failed requests are repeated; lengths are measured."""
    trainer = stage.run(_config(tmp_path, "partial", epochs=2), fail_first=2)

    _refuse_lost_or_repeated(trainer.trained, epochs=2)
    assert sum(step["sortedrl/failed_prompts"] for step in trainer.logged) > 0
    for batch in trainer.trained:
        assert _totals(batch) == sorted(_totals(batch))
    bound = trainer.schedule.staleness_bound
    assert 0 < max(answer["staleness"] for answer in _answers(trainer)) <= bound
    assert all(answer["tokens"] == _uninterrupted(answer) for answer in _answers(trainer))
    assert all(answer["reward"] > 0 for answer in _answers(trainer))

    _refuse_unmeasured(tmp_path / "lengths.jsonl", answers=2 * _ROWS * _SAMPLES)


def _refuse_unmeasured(path, *, answers):
    """verl's reward workers called `measure`, and `sortedrl compare` reads what it noted."""
    assert len(path.read_text().splitlines()) >= answers
    compared = subprocess.run(
        [sys.executable, "-m", "sortedrl", "compare", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert compared.returncode == 0, compared.stderr
    assert "sorted/partial" in compared.stdout


def test_with_a_lookahead_two_groups_are_open_and_the_older_goes_first(stage, tmp_path):
    """The slots that a group's last answers leave free are lent to the next one."""
    config = _config(tmp_path, "partial", "+trainer.v1.sortedrl.lookahead=1")
    trainer = stage.run(config)

    _refuse_lost_or_repeated(trainer.trained, epochs=1)
    assert trainer.logged[0]["sortedrl/open_groups"] == 2
    bound = trainer.schedule.staleness_bound
    assert max(answer["staleness"] for answer in _answers(trainer)) <= bound


def test_redraw_mode_is_on_policy_and_trains_the_answers_of_the_seeds(stage, tmp_path):
    """Nothing stale is trained, and an interruption changes no answer of frozen weights."""
    trainer = stage.run(_config(tmp_path, "redraw"))

    _refuse_lost_or_repeated(trainer.trained, epochs=1)
    assert {answer["staleness"] for answer in _answers(trainer)} == {0}
    assert all(answer["tokens"] == _uninterrupted(answer) for answer in _answers(trainer))
    assert sum(step["sortedrl/stale_prompts"] for step in trainer.logged) > 0


def test_on_policy_mode_trains_nothing_stale(stage, tmp_path):
    """With verl's own agent loop, which has no seeds, and with verl's validation in between."""
    agent_loop = "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent"
    validation = ["trainer.val_before_train=True", "trainer.test_freq=2", "data.val_batch_size=8"]
    trainer = stage.run(_config(tmp_path, "on_policy", agent_loop, *validation))

    _refuse_lost_or_repeated(trainer.trained, epochs=1)
    validated = [any(name.startswith("val-") for name in step) for step in trainer.logged]
    assert validated == [False, True, False, True]
    assert {answer["staleness"] for answer in _answers(trainer)} == {0}


def test_a_run_that_is_killed_and_resumed_loses_no_prompt_and_trains_none_twice(stage, tmp_path):
    """What was in flight is in TransferQueue's checkpoint, with its number."""
    extra = ["trainer.save_freq=1", "trainer.resume_mode=auto"]
    first = stage.run(_config(tmp_path, "partial", *extra, epochs=2), stop_after=3)
    second = stage.run(_config(tmp_path, "partial", *extra, epochs=2))

    assert len(first.trained) == 3
    _refuse_lost_or_repeated([*first.trained, *second.trained], epochs=2)


@pytest.mark.parametrize("place", [("on_sample_begin", 1), ("prepare_step", 3)])
def test_a_dead_agent_loop_worker_ends_the_run_with_a_sentence(place, stage, tmp_path):
    """Its prompts would be waited for for ever; new ones cannot be submitted to it."""
    with pytest.raises(TrainingError, match="resume_mode=auto"):
        stage.run(_config(tmp_path, "partial"), kill_worker_at=place)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["+trainer.v1.sortedrl.grup_prompts=8"], "did you mean 'group_prompts'"),
        (["+trainer.v1.sortedrl.group_prompts=1000"], "multiple of data.train_batch_size"),
        (["+trainer.v1.sortedrl.mode=coupled"], "verifies cached tokens"),
        (["+trainer.v1.sortedrl.mode=partial"], "bypass_mode=True"),
        (["+trainer.v1.sortedrl.mode=redraw"], "default_agent_loop=sortedrl"),
        (
            [
                "+trainer.v1.sortedrl.mode=redraw",
                "actor_rollout_ref.rollout.agent.default_agent_loop=sortedrl",
                "actor_rollout_ref.rollout.name=sglang",
            ],
            "enable_deterministic_inference=True",
        ),
        (
            [
                "+trainer.v1.sortedrl.mode=on_policy",
                "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
            ],
            "single turn",
        ),
        (
            ["+trainer.v1.sortedrl.mode=on_policy", "algorithm.filter_groups.enable=True"],
            "colocate_async",
        ),
        (
            [
                "+trainer.v1.sortedrl.mode=on_policy",
                "trainer.v1.sampler.custom_sampler.path=mine.py",
            ],
            "custom_sampler.path 'mine.py'; leave it out",
        ),
        (
            ["++actor_rollout_ref.rollout.agent.agent_loop_manager_class=my.Manager"],
            "agent_loop_manager_class 'my.Manager'; leave it out",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(overrides, said):
    """Before anything is started."""
    with pytest.raises(ConfigError, match=said):
        schedule_for(verl_config(*overrides))


@pytest.mark.parametrize("name", ["verl-logic.sh", "verl-maths.sh"])
def test_the_papers_command_lines_have_only_settings_that_verl_knows(name):
    """They are composed as verl composes its own command line, which refuses unknown keys."""
    overrides = overrides_of(_ROOT / "experiments" / "paper" / name)
    config = verl_config(*overrides)
    schedule = schedule_for(config)

    assert config.trainer.v1.trainer_mode == "sortedrl"
    assert config.trainer.n_gpus_per_node == 8
    assert config.actor_rollout_ref.rollout.name == "sglang"
    assert schedule.updates_per_group > 1
