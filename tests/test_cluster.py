"""Rollout workers behind a real Ray of two workers: the laws of engines, deaths, logs."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="the cluster needs the package ray")
import ray
import torch
from ray.exceptions import GetTimeoutError, OutOfMemoryError

from cluster_worlds import (
    BreakingFactory,
    ImpossibleFactory,
    LawfulFactory,
    SlowFactory,
    TinyFactory,
)
from forked import run_program
from native_worlds import answer, fresh_all, roll_out, tiny_model, trained_a_little
from simulated_worker import SimulatedFactory
from sortedrl.cli.cluster import _from_file as from_file
from sortedrl.cluster.check import NodeReport, check, machine
from sortedrl.cluster.check import _memory as found_memory
from sortedrl.cluster.check import _versions as found_versions
from sortedrl.cluster.connection import connected
from sortedrl.cluster.placement import (
    BundlePlacement,
    BundleShare,
    device_of_gpu,
    free_resources,
    placement_plan,
    refuse_too_small,
)
from sortedrl.cluster.remote_engine import CONCURRENT, wait_until_ready
from sortedrl.cluster.weight_transport import LocalSource
from sortedrl.cluster.worker import LogFolder
from sortedrl.cluster.worker_pool import WorkerPool
from sortedrl.config.cluster import Cluster
from sortedrl.config.schedule import Schedule
from sortedrl.core.buffer import Buffer
from sortedrl.core.clock import VirtualClock
from sortedrl.core.controller import Controller
from sortedrl.core.loop import Loop
from sortedrl.core.meter import measure
from sortedrl.core.randomness import mix
from sortedrl.core.recorder import Journal
from sortedrl.engines import conformance
from sortedrl.engines.native import NativeEngine
from sortedrl.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    EngineLost,
    TrainerLost,
    TrainingError,
)
from sortedrl.rewards.pool.process import children_of, kill_descendants
from sortedrl.simulate.costs import ticks
from sortedrl.simulate.engine import SimulatedPrompts, SimulatedTrainer
from sortedrl.simulate.lengths import LengthSettings
from sortedrl.types import Weights
from worlds import CountingScorer

TWO = Cluster(
    rollout_workers=2,
    trainer_ranks=0,
    dashboard=False,
    object_store_gib=0.2,
    worker_timeout_seconds=300,
    start_seconds=300,
)
pytestmark = [
    pytest.mark.slow,
    # Ray leaves sockets and files to the end of the process.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def ray_here():
    """One Ray for all tests, with more CPUs than two workers need."""
    said = []
    # Workers import the worlds too, and know this path only from the environment.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        yield from connection_to(said)


def connection_to(said):
    with connected(Cluster(**fields(TWO) | {"trainer_ranks": 2}), tell=said.append) as connection:
        assert connection.is_own
        assert "1 node" in said[0]
        yield connection


def fields(settings):
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


@pytest.fixture
def open_pool(ray_here, tmp_path):
    """Makes worker pools; at the end they are closed, and no thread is left."""
    opened = []
    before = threading.active_count()

    def make(factory, cluster=TWO, **options):
        placement = BundlePlacement(placement_plan(cluster), seconds=300)
        warnings, reports = [], []
        opened.append((placement, []))
        pool = WorkerPool(
            cluster,
            factory,
            placement=placement,
            tell=warnings.append,
            report=reports.append,
            log_folder=tmp_path / "logs",
            **{"source": None} | options,
        )
        opened[-1][1].append(pool)
        pool.warnings, pool.reports = warnings, reports
        return pool

    yield make
    for placement, pools in opened:
        try:
            for pool in pools:
                pool.close()
        finally:
            placement.remove()
    assert threading.active_count() <= before + 2, threading.enumerate()


def simulated(**changes):
    usual = {"slots": 4, "max_tokens": 60, "lengths": LengthSettings(median=12, sigma=0.8)}
    return SimulatedFactory(**usual | changes)


def finished_by(engine, count):
    done = {}
    while len(done) < count:
        for trajectory in engine.step().finished:
            assert trajectory.key not in done
            done[trajectory.key] = trajectory
    return done


def step_for_ever(engine, done):
    while True:
        done |= {t.key: t for t in engine.step().finished}


def kill(worker):
    os.kill(worker.info.process, signal.SIGKILL)


# --- laws -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lawful(ray_here):
    """The world of the laws, over one worker."""
    cluster = Cluster(**fields(TWO) | {"rollout_workers": 1})
    one = WorkerPool(
        cluster,
        LawfulFactory(slots=conformance.SLOTS),
        placement=(placement := BundlePlacement(placement_plan(cluster), seconds=300)),
        source=LocalSource(),
        tell=pytest.fail,
        report=lambda _: None,
    )
    # The worker itself is what is tried: its pool has nothing to do.
    yield conformance.EngineUnderTest(opening=lambda: one.workers[0], precision=5e-5)
    one.close()
    placement.remove()


@pytest.mark.parametrize(
    "law",
    [law for law in conformance.LAWS if law is not conformance.closing_leaves_nothing_behind],
    ids=lambda law: law.__name__,
)
def test_a_remote_engine_keeps_the_laws_of_every_engine(law, lawful):
    conformance.check(law, lawful)


# --- the same answers -----------------------------------------------------------------------------


def test_two_workers_write_what_one_engine_writes_to_the_bit(open_pool):
    work = fresh_all((1, 5, 40, 12), samples=2)
    limits = {t.key: 4 + mix(t.seed) % 16 for t in work}
    one = NativeEngine(
        tiny_model(), slots=4, max_tokens=lambda t: limits[t.key], stop_tokens=[3, 50]
    )
    alone = [answer(t) for t in roll_out(one, work)]
    pool = open_pool(TinyFactory(limits=limits), source=LocalSource())
    assert pool.slots == 4
    assert [answer(t) for t in roll_out(pool, work)] == alone
    new = dict(trained_a_little(tiny_model(), learning_rate=1e-2).state_dict())
    for engine in (one, pool):
        engine.load_weights(Weights(1, new))
    assert pool.version == 1
    other = [answer(t) for t in roll_out(one, work)]
    assert other != alone
    assert [answer(t) for t in roll_out(pool, work)] == other
    (report,) = pool.reports
    assert (report.version, report.workers, report.buckets) == (1, 2, 1)
    assert report.bytes == sum(t.nbytes for t in new.values())
    assert report.put_seconds > 0
    assert report.load_seconds > 0
    with pytest.raises(EngineError, match="must come with their tensors; version 2 came without"):
        pool.load_weights(Weights(2))
    logs = sorted(pool.workers[0].info.log.parent.glob("*.log"))
    assert [log.name for log in logs] == ["rollout-0.log", "rollout-1.log"]
    assert all("a tiny engine is made" in log.read_text() for log in logs)


def test_tensors_of_every_kind_arrive_as_they_were():
    from sortedrl.cluster.buckets import bucket, parts, unpacked

    tensors = {
        "half": torch.randn(3, 5).bfloat16(),
        "turned": torch.randn(4, 6).T,
        "number": torch.tensor(7),
        "none": torch.empty(0, 3),
        "long": torch.arange(1000),
    }
    packed = [bucket(part) for part in parts(tensors.items(), bucket_bytes=200)]
    assert [[one.name for one in part] for part in packed] == [
        ["half", "turned", "number", "none"],
        ["long"],
    ]
    sizes = [one.buffer.nbytes for part in packed for one in part]
    assert sum(sizes) == sum(t.nbytes for t in tensors.values())
    for name, tensor in unpacked(packed).items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name])


# --- the loop -------------------------------------------------------------------------------------


def loop_over(engine, *, prompts, schedule, events):
    clock = VirtualClock()
    return Loop(
        prompts=SimulatedPrompts(prompts, prompt_tokens=3),
        buffer=Buffer(unit_size=schedule.unit_size),
        controller=Controller(schedule),
        engine=engine,
        scorer=CountingScorer(),
        trainer=SimulatedTrainer(costs=ticks(), clock=clock),
        journal=Journal(events.append, clock=clock),
        seed=0,
    )


def check_run(batches, events, *, answers):
    trained = [t for batch in batches for t in batch.trajectories]
    assert len(trained) == len({t.key for t in trained}) == answers
    ledger = measure(events).run.ledger
    assert ledger.decoded == ledger.trained + ledger.discarded


def test_the_loop_runs_over_workers_as_over_one_engine(open_pool):
    pool = open_pool(simulated())
    for mode in ("partial", "on_policy", "coupled"):
        schedule, events = Schedule(group_prompts=16, update_batch=8, mode=mode), []
        loop = loop_over(pool, prompts=48, schedule=schedule, events=events)
        check_run(list(loop.run()), events, answers=48)
        assert not pool.warnings
        assert pool.version > 1
        pool.load_weights(Weights(0))


def test_a_worker_killed_in_mid_round_gives_its_work_to_the_others(open_pool):
    schedule = Schedule(group_prompts=16, update_batch=8)
    pool, events = open_pool(simulated(pause_seconds=0.02)), []
    loop = loop_over(pool, prompts=48, schedule=schedule, events=events)
    whole_step = pool.step
    seen = Counter()

    class Killing:
        """The pool, of which one worker dies while it writes."""

        submit, interrupt, load_weights = (
            pool.submit,
            pool.interrupt,
            pool.load_weights,
        )
        slots = property(lambda self: pool.slots)
        version = property(lambda self: pool.version)

        def step(self):
            step = whole_step()
            seen["answers"] += len(step.finished)
            if seen["answers"] >= 20 and not seen["killed"]:
                seen["killed"] = 1
                kill(pool.workers[0])
            return step

    object.__setattr__(loop, "engine", Killing())
    check_run(list(loop.run()), events, answers=48)
    warning = pool.warnings[0]
    assert warning.startswith("engine 1 of 2 (rollout-0) is lost: rollout worker 0, simulated")
    assert "its process has died (killed, out of memory, or crashed)" in warning
    assert "4 slots are left" in warning
    assert pool.workers[0].is_lost
    assert pool.warnings[-1].endswith("has joined: 8 slots now")
    assert not pool.lost, "replaced at the next weight sync"


def test_a_new_worker_takes_the_place_of_a_dead_one_with_the_present_weights(open_pool):
    pool = open_pool(simulated())
    pool.load_weights(Weights(3))
    work = fresh_all((1,) * 12)
    before = [answer(t) for t in roll_out(pool, work)]
    kill(pool.workers[1])
    assert [answer(t) for t in roll_out(pool, work)] == before
    assert (pool.slots, [worker.number for worker in pool.lost]) == (4, [1])
    pool.load_weights(Weights(4))
    joined = pool.workers[-1]
    assert (joined.number, joined.version, pool.slots, pool.lost) == (2, 4, 8, [])
    assert pool.warnings[-1].endswith("has joined: 8 slots now")
    pool.load_weights(Weights(5))
    assert len(pool.workers) == 3, "nobody else is missing"
    assert [answer(t) for t in roll_out(pool, work)] == before
    assert [report.workers for report in pool.reports] == [2, 1, 2]
    with pytest.raises(ConfigError, match="in a pool only once"):
        pool._pool.add(joined)
    joined.version = 6
    with pytest.raises(
        ConfigError, match="must have the weights of the pool, version 5, got version 6"
    ):
        pool._pool.add(replace_member(joined))


def test_a_run_grows_with_its_cluster_and_mends_itself_when_new_weights_come(open_pool):
    growing = Cluster(**fields(TWO) | {"rollout_workers": 1, "max_rollout_workers": 2})
    engine = open_pool(simulated(), growing)
    work = fresh_all((1,) * 12)
    before = [answer(t) for t in roll_out(engine, work)]
    assert engine.slots == 4
    engine.load_weights(Weights(1))
    assert (engine.slots, engine.version) == (8, 1)
    engine.load_weights(Weights(2))
    assert engine.slots == 8, "two are as many as there may be"
    kill(engine.workers[0])
    assert [answer(t) for t in roll_out(engine, work)] == before
    assert engine.slots == 4
    engine.sleep()
    engine.load_weights(Weights(3))
    assert (engine.slots, engine.version) == (8, 3)
    assert [answer(t) for t in roll_out(engine, work)] == before
    assert sum(line.endswith("has joined: 8 slots now") for line in engine.warnings) == 2


def replace_member(worker):
    """Another object that says the same of itself."""
    return SimpleNamespace(name=worker.name, slots=worker.slots, version=worker.version)


def test_without_a_worker_the_work_can_still_be_taken_back(open_pool):
    pool = open_pool(simulated(pause_seconds=0.2))
    work = fresh_all((1, 2, 3))
    pool.submit(work, tolerance=None)
    for worker in pool.workers:
        kill(worker)
    with pytest.raises(EngineLost, match="no engine is left, all 2 are lost"):
        finished_by(pool, 3)
    assert [t.key for t in pool.interrupt()] == [t.key for t in work]


def test_a_worker_whose_engine_is_lost_gives_back_the_tokens_it_had(open_pool):
    long = simulated(lengths=LengthSettings(values=(2, 50)))
    pool = open_pool(BreakingFactory(inner=long, breaks_at=1, is_lost=True))
    work = fresh_all((1,) * 8)
    pool.submit(work, tolerance=None)
    done = {}
    with pytest.raises(EngineLost, match="no engine is left"):
        step_for_ever(pool, done)
    stopped = {t.key: t for t in pool.interrupt()}
    assert done
    assert stopped
    assert done.keys() | stopped.keys() == {t.key for t in work}
    assert all(t.num_tokens == 2 for t in stopped.values())
    assert "the pipe broke" in pool.warnings[0]


def test_a_bug_in_an_engine_reaches_the_caller_and_loses_nothing(open_pool):
    one = Cluster(**fields(TWO) | {"rollout_workers": 1})
    pool = open_pool(BreakingFactory(inner=simulated(), breaks_at=1, is_lost=False), one)
    work = fresh_all((1,) * 8)
    pool.submit(work, tolerance=None)
    done = {}
    with pytest.raises(KeyError, match="a bug"):
        step_for_ever(pool, done)
    assert not pool.warnings
    stopped = {t.key for t in pool.interrupt()}
    assert done.keys() | stopped == {t.key for t in work}


def test_a_worker_that_does_not_answer_is_lost(open_pool):
    patient = Cluster(**fields(TWO) | {"worker_timeout_seconds": 4.0})
    pool = open_pool(simulated(pause_seconds=0.02), patient)
    os.kill(pool.workers[0].info.process, signal.SIGSTOP)
    work = fresh_all((1,) * 6)
    pool.submit(work, tolerance=None)
    assert finished_by(pool, 6).keys() == {t.key for t in work}
    (warning,) = pool.warnings
    assert "it has not answered for 4 s" in warning


def test_a_host_cut_off_in_mid_round_is_done_without_and_another_one_takes_its_place(ray_here):
    ended = run_program(
        "import cluster_worlds; cluster_worlds.cut_off_a_host()",
        # Ray sees sooner that a node is gone.
        RAY_health_check_period_ms="1000",
        RAY_health_check_failure_threshold="3",
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "the run went on: engine " in ended.stdout
    assert "4 slots are left" in ended.stdout


def test_the_log_of_a_worker_that_does_not_see_the_folder_is_brought_over(tmp_path):
    code = (
        "import os; from pathlib import Path\n"
        "from sortedrl.cluster.worker import LogFolder, WorkerLog\n"
        f"folder = LogFolder(folder=Path({str(tmp_path / 'nowhere')!r}), mark='.controller')\n"
        "out = os.dup(1)\n"
        "log = WorkerLog('rollout-7', folder)\n"
        "os.write(1, b'said to one\\n'); os.write(2, b'said to two\\n')\n"
        "os.write(out, log.remote_text().encode())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "said to one\nsaid to two\n"
    here = LogFolder.opened(tmp_path / "logs")
    assert here.is_here
    assert LogFolder.opened(tmp_path / "logs") == here


# --- starting -------------------------------------------------------------------------------------


def test_an_engine_that_cannot_be_made_says_why(open_pool):
    with pytest.raises(
        EngineError, match=r"0 could not create its engine: there .* rollout-0\.log in"
    ):
        open_pool(ImpossibleFactory())


def test_a_run_that_does_not_fit_is_refused_with_what_is_missing(ray_here):
    big = Cluster(rollout_workers=64, gpus_per_worker=2)
    with pytest.raises(EngineError, match=r"must have 65 CPU and 129 GPU for .* 129 GPU missing"):
        BundlePlacement(placement_plan(big), seconds=5)


def test_a_run_waits_for_what_others_have_taken_and_then_says_what_is_free(ray_here):
    three = placement_plan(Cluster(**fields(TWO) | {"rollout_workers": 3}))
    first = BundlePlacement(three, seconds=60)
    with pytest.raises(EngineError, match="3 CPU in 3 bundles must be free within 1 s"):
        BundlePlacement(three, seconds=1)
    first.remove()
    BundlePlacement(three, seconds=60).remove()


def test_the_check_places_everything_and_lets_ranks_meet(ray_here):
    three = Cluster(**fields(TWO) | {"rollout_workers": 1, "trainer_ranks": 2})
    report = check(three, seconds=60)
    names = [finding.name for finding in report.findings]
    assert names == ["placement", "versions", "memory", "GPUs", "all-reduce"]
    assert report.is_fine, report.findings
    assert "gloo over 2 processes" in report.findings[-1].words
    holders = [bundle.holder for bundle in report.bundles]
    assert holders == ["rollout worker 0", "trainer rank 0", "trainer rank 1"]
    assert "torch" in report.nodes[0].machine.versions


def test_the_check_says_what_is_missing(ray_here):
    report = check(Cluster(rollout_workers=2, gpus_per_worker=1), seconds=5)
    assert not report.is_fine
    assert "3 GPU missing" in report.findings[0].words
    assert [finding.is_fine for finding in report.findings] == [False, True, True]


def test_a_node_with_other_versions_or_without_memory_is_named():
    here = machine()
    old = replace(here, versions=here.versions | {"ray": "1.0"}, free_bytes=1 << 20)
    nodes = [
        NodeReport(address=address, resources="4 CPU", machine=said)
        for address, said in (("a", here), ("b", old), ("c", None))
    ]
    words = found_versions(nodes).words
    assert "b has ray 1.0, the controller " in words
    assert "c does not answer" in words
    assert not found_versions(nodes).is_fine
    assert not found_memory(nodes).is_fine
    assert found_versions(nodes[:1]).is_fine


def test_the_section_of_a_file_is_read_and_its_mistakes_are_named(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'seed = 1\n[cluster]\nkind = "colocated"\nrollout_workers = 2\ntrainer_ranks = 2\n'
    )
    assert from_file(file) == Cluster(kind="colocated", rollout_workers=2, trainer_ranks=2)
    file.write_text("seed = 1\n")
    with pytest.raises(DataError, match=r"has no section \[cluster\]"):
        from_file(file)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_workers": -1}, "rollout_workers must be at least 0, got -1"),
        ({"rollout_workers": None, "trainer_ranks": 2}, "cluster.trainer_ranks need a cluster"),
        (
            {"overlap": True, "kind": "colocated", "trainer_ranks": 2},
            "needs cluster.kind separated",
        ),
        ({"overlap": True, "trainer_ranks": 0}, "needs cluster.trainer_ranks of at least 1"),
        ({"cpus_per_worker": 0}, "must have a CPU or a GPU"),
        ({"worker_timeout_seconds": 0}, "worker_timeout_seconds must be above 0"),
        ({"kind": "colocate"}, "did you mean 'colocated'"),
        ({"kind": "colocated"}, "trainer_ranks must be 2, got 1 with 2 rollout_workers"),
        ({"kind": "colocated", "trainer_ranks": 2, "gpus_per_worker": 2}, "or 0 for CPUs, got 2"),
        ({"address": "auto", "object_store_gib": 1.0}, "is for a Ray that the run starts"),
        ({"address": ""}, "must not be empty"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Cluster(**{"rollout_workers": 2} | settings)


def test_many_workers_speak_less_often():
    assert Cluster().poll_seconds == 0.02
    assert Cluster(rollout_workers=500).poll_seconds == 0.5


def test_the_settings_and_the_help_need_neither_ray_nor_torch():
    code = (
        "import sys; import sortedrl.cli.cluster; "
        "assert not {'ray', 'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_address_where_no_ray_is_is_refused_at_once():
    code = (
        "from sortedrl.cluster.connection import connected\n"
        "from sortedrl.config.cluster import Cluster\n"
        "with connected(Cluster(rollout_workers=1, address='127.0.0.1:9'), tell=print): pass\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert "cluster.address must be the address of a running Ray, got '127.0.0.1:9'" in ended.stderr


# --- repairs --------------------------------------------------------------------------------------


def test_a_worker_without_gpus_sees_none(monkeypatch):
    from sortedrl.cluster.remote_trainer import TrainerRank
    from sortedrl.cluster.worker import RolloutWorker

    worker = partial(RolloutWorker, "x", poll_seconds=1.0, logs=None)
    rank = partial(TrainerRank, "x", logs=None)
    for make, shown in (
        (partial(worker, gpus=None), "0,1"),
        (partial(worker, gpus=()), ""),
        (partial(worker, gpus=("3", "5")), "3,5"),
        (partial(rank, has_gpu=True), "0,1"),
        (partial(rank, has_gpu=False), ""),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        make()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == shown


def test_the_gpu_of_a_trainer_in_the_controllers_process_is_reserved_on_its_machine():
    alone = Cluster(rollout_workers=2, trainer_ranks=0, gpus_per_worker=1)
    placed = placement_plan(alone, controller="10.0.0.7")
    assert placed.total["GPU"] == 3
    assert placed.controller == BundleShare(bundle=2, cpus=0, gpus=1)
    assert placed.bundles[2] == {"GPU": 1, "node:10.0.0.7": 0.001}
    here, there = {"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 1.0}
    with pytest.raises(EngineError, match=r"must have 2 CPU and 3 GPU .* 1 GPU missing"):
        refuse_too_small(placed, [here | {"node:10.0.0.7": 1.0}])
    refuse_too_small(placed, [here, there | {"node:10.0.0.7": 1.0}])
    assert placement_plan(alone).controller is None, (
        "a controller outside of the cluster takes none"
    )
    assert placement_plan(Cluster(rollout_workers=2, trainer_ranks=0)).controller is None
    assert placement_plan(Cluster(rollout_workers=2, gpus_per_worker=1)).controller is None


def test_a_ray_of_our_own_is_started_again_where_its_processes_start_slowly(monkeypatch):
    from sortedrl.cluster import connection

    tries = []

    def init(**given):
        tries.append(given["address"])
        if len(tries) % 3:
            # Ray raises no other type than this one.
            raise Exception("The current node timed out during startup.")
        return "a context"

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    assert connection._own(TWO) == "a context"
    assert tries == ["local"] * 3
    hasty = Cluster(**fields(TWO) | {"start_seconds": 1e-9})
    with pytest.raises(EngineError, match=r"Ray must start .* raise cluster\.start_seconds"):
        connection._own(hasty)


@pytest.mark.parametrize(
    ("visible", "gpu", "device"),
    [(None, "3", "cuda:3"), ("2,3", "3", "cuda:1"), ("GPU-a, GPU-b", "GPU-b", "cuda:1")],
)
def test_the_reserved_gpu_is_found_among_those_that_the_controller_sees(
    monkeypatch, visible, gpu, device
):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(EngineError, match=f"CUDA_VISIBLE_DEVICES is '{visible}'"):
            device_of_gpu("7")
    assert device_of_gpu(gpu) == device


@pytest.mark.parametrize(("workers", "parallel"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_eight_colocated_ranks_have_a_gpu_each_and_the_workers_share_them(workers, parallel):
    cluster = Cluster(
        kind="colocated",
        rollout_workers=workers,
        gpus_per_worker=parallel,
        tensor_parallel=parallel,
        trainer_ranks=8,
    )
    placed = placement_plan(cluster)
    assert placed.total == {"CPU": workers + 8, "GPU": 8}
    assert [bundle["GPU"] for bundle in placed.bundles] == [parallel] * workers
    assert [claim.gpus for claim in placed.ranks] == [1] * 8
    assert [claim.bundle for claim in placed.ranks] == [n // parallel for n in range(8)]
    assert [claim.shared_gpus for claim in placed.workers] == [parallel] * workers
    for number, bundle in enumerate(placed.bundles):
        claims = [c for c in (*placed.workers, *placed.ranks) if c.bundle == number]
        assert sum(claim.gpus for claim in claims) == bundle["GPU"]
        assert sum(claim.cpus for claim in claims) == bundle["CPU"]


def test_separated_workers_have_bundles_of_as_many_gpus_as_their_engine_has_shards():
    cluster = Cluster(rollout_workers=3, gpus_per_worker=4, tensor_parallel=4, trainer_ranks=2)
    placed = placement_plan(cluster)
    assert placed.total == {"CPU": 5, "GPU": 14}
    assert [claim.gpus for claim in placed.workers] == [4, 4, 4]
    assert all(claim.shared_gpus == 0 for claim in placed.workers)


@pytest.mark.parametrize("drops_weights", [True, False])
def test_workers_that_dropped_their_weights_get_them_back_before_they_write(drops_weights):
    """An update that is skipped leaves no new weights, and so does saving after an evaluation."""

    class Inner:
        version = 7

        def submit(self, trajectories, *, tolerance, sampling):
            done.append("submit")

    class Asleep(WorkerPool):
        def __init__(self):
            self._pool, self._needs_weights = Inner(), False
            self.workers = [SimpleNamespace(is_lost=False, sleep=lambda: drops_weights)]

        def load_weights(self, weights):
            done.append(weights)
            self._needs_weights = False

    done = []
    pool = Asleep()
    assert pool.sleep() == drops_weights
    pool.submit([], tolerance=None)
    pool.submit([], tolerance=None)
    assert done == [*([Weights(7)] if drops_weights else []), "submit", "submit"]


def test_no_process_below_a_worker_is_left_when_it_is_abandoned():
    deep = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    above = subprocess.Popen([sys.executable, "-c", deep], stdin=subprocess.PIPE)
    try:
        until = time.monotonic() + 30
        while not (children := children_of(above.pid)):
            assert time.monotonic() < until
            time.sleep(0.05)
        kill_descendants(above.pid)
        above.wait(30)
        assert not any(Path(f"/proc/{child}/cmdline").exists() for child in children)
    finally:
        above.kill()
        above.wait()


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB"), "out of memory: CUDA out of"),
        (MemoryError(), "ran out of memory: MemoryError; resume with smaller passes"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk space: .*No space left"),
    ],
)
def test_what_a_rank_ran_out_of_is_said_in_its_own_words_and_not_tried_again(cause, words):
    from sortedrl.cluster.remote_trainer import exhausted_resource

    assert re.search(words, exhausted_resource([KeyError("x"), cause]))
    assert exhausted_resource([KeyError("x"), OSError(errno.EPIPE, "pipe")]) is None


def test_a_join_that_fails_gives_its_resources_back_and_is_asked_for_less_and_less(
    open_pool, monkeypatch
):
    growing = Cluster(**fields(TWO) | {"rollout_workers": 1, "max_rollout_workers": 2})
    pool, asked = open_pool(simulated(), growing), []
    free = free_resources()

    def refuse(place, weights):
        asked.append(weights.version)
        raise EngineError("it does not start")

    monkeypatch.setattr(pool, "_join", refuse)
    for version in range(1, 15):
        pool.load_weights(Weights(version))
        until = time.monotonic() + 30
        while free_resources().get("CPU") != free.get("CPU"):
            assert time.monotonic() < until, "the bundle of the worker is still reserved"
            time.sleep(0.1)
    assert asked == [1, 4, 9]
    assert pool.warnings == ["it does not start"]


def test_a_lost_worker_that_cannot_be_replaced_is_tried_less_and_less_often(open_pool, monkeypatch):
    pool, asked = open_pool(simulated(), TWO), []
    lost = pool._places[1]
    kill(pool.workers[1])

    def refuse(place, weights):
        if place is lost:  # not a place elsewhere
            asked.append(weights.version)
        raise EngineError("it does not start")

    monkeypatch.setattr(pool, "_join", refuse)
    for version in range(1, 15):
        pool.load_weights(Weights(version))
    assert asked == [1, 4, 9]
    assert pool.slots == 4
    assert "it does not start" in pool.warnings


def test_a_worker_that_starts_slowly_is_waited_for_while_it_makes_progress(open_pool):
    brief = Cluster(**fields(TWO) | {"rollout_workers": 1, "start_seconds": 15})
    pool = open_pool(SlowFactory(seconds=24, is_busy=True), brief)
    assert pool.slots == 4
    with pytest.raises(EngineError, match=r"rollout worker 0 did not start: .*timed out"):
        open_pool(SlowFactory(seconds=300, is_busy=False), brief)


class Starting:
    """An actor that starts, and uses the CPU or does not."""

    def __init__(self, *, is_busy):
        self.is_busy = is_busy

    def cpu_seconds(self):
        return time.monotonic() if self.is_busy else 0.0

    def start(self, seconds):
        time.sleep(seconds)

    def fail(self, error=None):
        raise error or ValueError("there is no model")

    def close(self):
        return None


@pytest.mark.usefixtures("ray_here")
def test_who_waits_for_a_rank_that_makes_progress_is_waited_for_and_a_failure_is_told_at_once():
    made = ray.remote(concurrency_groups={CONCURRENT: 1})(Starting).options(num_cpus=0)
    loading, waiting = made.remote(is_busy=True), made.remote(is_busy=False)
    try:
        ray.get([rank.cpu_seconds.remote() for rank in (loading, waiting)])
        asked = [loading.start.remote(5), waiting.start.remote(5)]
        wait_until_ready(asked, [loading, waiting], quiet_seconds=2)
        never = waiting.start.remote(3600)
        with pytest.raises(GetTimeoutError, match="no progress for 2 s"):
            wait_until_ready([never], [waiting], quiet_seconds=2)
        with pytest.raises(ValueError, match="there is no model"):
            wait_until_ready([never, loading.fail.remote()], [waiting, loading], quiet_seconds=3600)
        assert not ray.wait([never], timeout=0)[0]
    finally:
        ray.kill(loading)
        ray.kill(waiting)


@pytest.fixture
def failed_trainer(ray_here, tmp_path, monkeypatch):
    """A trainer of three ranks, of which one fails and the others wait for it."""
    from sortedrl.cluster import remote_trainer

    monkeypatch.setattr(remote_trainer, "_OTHERS_SECONDS", 1.0)
    monkeypatch.setattr(remote_trainer, "_CLOSE_SECONDS", 2.0)
    made = ray.remote(Starting).options(num_cpus=0)
    trainer = object.__new__(remote_trainer.RemoteTrainer)
    trainer.is_closed = False
    trainer._ranks = [made.remote(is_busy=False) for _ in range(3)]
    trainer._logs = LogFolder.opened(tmp_path)
    ray.get([rank.cpu_seconds.remote() for rank in trainer._ranks])
    yield trainer
    trainer._end()


def test_what_one_rank_raised_is_told_where_the_others_wait_for_it(failed_trainer):
    first = failed_trainer._ranks[0]
    with pytest.raises(TrainerLost, match="a trainer rank is lost: ValueError: there is no model"):
        failed_trainer.call(
            lambda rank: rank.fail.remote() if rank is first else rank.start.remote(3600)
        )
    assert failed_trainer.is_closed


def test_a_full_disk_of_one_rank_is_told_in_its_own_words(failed_trainer):
    first = failed_trainer._ranks[0]
    full = OSError(errno.ENOSPC, "No space left on device")
    others = CheckpointError("1 of 3 ranks could not write their part")
    with pytest.raises(TrainingError, match=r"ran out of disk space: .*No space left on device"):
        failed_trainer.call(lambda rank: rank.fail.remote(full if rank is first else others))


def test_a_rank_that_ray_killed_for_want_of_memory_is_lost(failed_trainer):
    killed = OutOfMemoryError("Task was killed.\nRefer to the documentation")
    error = failed_trainer._failure([ray.put(None)], killed)
    assert isinstance(error, TrainerLost)
    assert "its process has died (killed, out of memory, or crashed)" in str(error)


def test_ranks_that_do_not_answer_are_ended_together(failed_trainer):
    for rank in failed_trainer._ranks:
        rank.start.remote(3600)
    began = time.monotonic()
    failed_trainer.close()
    assert time.monotonic() - began < 2 * 2.0
