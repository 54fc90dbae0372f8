"""Trackers: the real TensorBoard and W&B, and stand-ins for what needs an account."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sortedrl.config.train import Tracking
from sortedrl.errors import ConfigError
from sortedrl.runs.output import TrackedRun, Trackers, open_trackers

STAND_IN = '''
"""Keeps what it is given; refuses to open a run whose id or name is taken, as the real one does."""

runs = {}


class Run:
    def __init__(self, options):
        self.options = options
        self.rows = []
        self.is_finished = False

    def log(self, values, step):
        self.rows.append((step, values))

    def finish(self):
        self.is_finished = True


def init(*, project, name, config, resume, id=None, dir=None):
    key = (project, id or name)
    if key in runs and resume != "allow":
        raise RuntimeError("this run exists")
    run = runs.setdefault(key, Run({"name": name, "config": config, "dir": dir}))
    run.is_finished = False
    return run
'''


def stand_in(name, folder, monkeypatch):
    """A module of that name, which can be imported until the test is over."""
    modules = folder / "modules"
    modules.mkdir(exist_ok=True)
    (modules / f"{name}.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(modules)
    # What stood there before is put back at the end, and nothing if nothing did.
    monkeypatch.setitem(sys.modules, name, None)
    del sys.modules[name]
    return __import__(name)


def refuse(message):
    raise AssertionError(message)


def run_in(folder: Path, **changes) -> TrackedRun:
    folder.mkdir(exist_ok=True)
    return TrackedRun(folder=folder, settings={"seed": 1}, **changes)


def log_steps(tracking, run, steps, *, scale=1.0):
    trackers = open_trackers(tracking, run, warn=refuse)
    for step in steps:
        trackers.log({"reward": scale * step, "bubble": 0.5}, step=step)
    return trackers


def scalars(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_tensorboard_shows_each_number_at_its_step(tmp_path):
    trackers = log_steps(Tracking(tensorboard=True), run_in(tmp_path), [1, 2, 3])
    assert trackers.names == ("tensorboard",)
    assert scalars(tmp_path, "reward") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    trackers.close()
    assert scalars(tmp_path, "bubble") == [(1, 0.5), (2, 0.5), (3, 0.5)]


def test_points_after_the_checkpoint_are_not_doubled_in_tensorboard(tmp_path):
    log_steps(Tracking(tensorboard=True), run_in(tmp_path), [1, 2, 3, 4]).close()
    resumed = run_in(tmp_path, resumed_step=2)
    log_steps(Tracking(tensorboard=True), resumed, [3, 4, 5], scale=10.0).close()
    assert scalars(tmp_path, "reward") == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]


def test_a_new_run_in_an_old_folder_hides_what_was_there(tmp_path):
    log_steps(Tracking(tensorboard=True), run_in(tmp_path), [1, 2, 3]).close()
    log_steps(Tracking(tensorboard=True), run_in(tmp_path), [1], scale=10.0).close()
    assert scalars(tmp_path, "reward") == [(1, 10.0)]


def test_no_tracker_at_all_is_fine(tmp_path):
    trackers = log_steps(Tracking(), run_in(tmp_path), [1])
    assert trackers.names == ()
    trackers.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_resumed_run_goes_on_with_its_own_and_a_new_one_with_another(name, tmp_path, monkeypatch):
    module = stand_in(name, tmp_path, monkeypatch)
    tracking = Tracking(**{name: "my-project"})
    folder = tmp_path / "logic"
    log_steps(tracking, run_in(folder), [1, 2]).close()
    ((key, run),) = module.runs.items()
    assert key[0] == "my-project"
    assert run.options["name"].startswith("logic")
    assert run.options["config"] == {"seed": 1}
    log_steps(tracking, run_in(folder, resumed_step=2), [3]).close()
    assert list(module.runs) == [key]
    assert [step for step, _ in run.rows] == [1, 2, 3]
    assert run.rows[0] == (1, {"reward": 1.0, "bubble": 0.5})
    assert run.is_finished
    log_steps(tracking, run_in(folder), [1]).close()
    assert len(module.runs) == 2


def test_all_trackers_show_the_same_run(tmp_path, monkeypatch):
    modules = [stand_in(name, tmp_path, monkeypatch) for name in ("wandb", "trackio")]
    tracking = Tracking(tensorboard=True, wandb="a", trackio="b")
    for resumed_step, step in ((None, 1), (1, 2)):
        run = run_in(tmp_path / "logic", resumed_step=resumed_step)
        log_steps(tracking, run, [step]).close()
    for module in modules:
        ((_, run),) = module.runs.items()
        assert [step for step, _ in run.rows] == [1, 2]
    assert [step for step, _ in scalars(tmp_path / "logic", "reward")] == [1, 2]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_refused_before_the_run(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    tracking = Tracking(**{name: "my-project"})
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=f"tracking.{name} needs.*pip install {name}"):
        open_trackers(tracking, run_in(tmp_path), warn=refuse)


class Failing:
    """Works until a step, and fails from then on."""

    def __init__(self, *, until):
        self.until = until
        self.seen = []

    def log(self, values, *, step):
        if step >= self.until:
            raise ConnectionError("no route")
        self.seen.append(step)

    def close(self):
        if self.until < 100:
            raise ConnectionError("still no route")


def test_a_tracker_that_fails_is_warned_of_once_and_switched_off():
    warnings = []
    broken, sound = Failing(until=2), Failing(until=100)
    makers = {"broken": lambda: broken, "sound": lambda: sound}
    trackers = Trackers(makers, warn=warnings.append)
    for step in range(5):
        trackers.log({}, step=step)
    trackers.close()
    assert (broken.seen, sound.seen) == ([0, 1], [0, 1, 2, 3, 4])
    assert len(warnings) == 1
    assert "broken failed and is disabled (ConnectionError: no route)" in warnings[0]


def test_a_tracker_that_cannot_be_opened_or_closed_does_not_stop_the_run(tmp_path, monkeypatch):
    warnings = []
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    trackers = open_trackers(Tracking(tensorboard=True), run_in(tmp_path), warn=warnings.append)
    trackers.log({"reward": 1.0}, step=1)
    assert trackers.names == ()
    assert "tensorboard failed" in warnings[0]
    closing = Trackers({"late": lambda: Failing(until=99)}, warn=warnings.append)
    closing.log({}, step=1)
    closing.close()
    closing.close()
    assert len(warnings) == 2
    assert "still no route" in warnings[1]


WANDB_OFFLINE = """
from pathlib import Path
from sortedrl.config.train import Tracking
from sortedrl.runs.output import TrackedRun, open_trackers

def refuse(words):
    raise AssertionError(words)

for resumed_step, steps in ((None, [1, 2]), (2, [3])):
    run = TrackedRun(folder=Path("logic"), settings={"seed": 1}, resumed_step=resumed_step)
    trackers = open_trackers(Tracking(wandb="my-project"), run, warn=refuse)
    assert trackers.names == ("wandb",)
    for step in steps:
        trackers.log({"reward/mean": 0.5 * step}, step=step)
    trackers.close()
"""


def test_the_real_weights_and_biases_takes_a_run_and_its_continuation_offline(tmp_path):
    (tmp_path / "logic").mkdir()
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    command = [sys.executable, "-c", WANDB_OFFLINE]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=300)
    written = sorted((tmp_path / "logic" / "wandb").glob("offline-run-*/run-*.wandb"))
    identity = (tmp_path / "logic" / "wandb_id").read_text()
    assert [path.stem for path in written] == [f"run-{identity}"] * 2
    assert all(b"reward/mean" in path.read_bytes() for path in written)
