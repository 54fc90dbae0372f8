"""Rollout workers behind a real Ray of two workers: the laws of engines, deaths, logs."""

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="the cluster needs the package ray")
import torch

from cluster_worlds import BreakingRecipe, ImpossibleRecipe, LawfulRecipe, TinyRecipe
from native_worlds import answer, fresh_all, roll_out, tiny_model, trained_a_little
from sortedrl.cli.cluster import _from_file as from_file
from sortedrl.cluster.check import NodeReport, check, machine
from sortedrl.cluster.check import _memory as found_memory
from sortedrl.cluster.check import _versions as found_versions
from sortedrl.cluster.connection import connected
from sortedrl.cluster.fleet import ElasticEngine, Fleet
from sortedrl.cluster.placement import Placement, blueprint
from sortedrl.cluster.worker import LogFolder, SimulatedRecipe
from sortedrl.config.cluster import Cluster
from sortedrl.config.schedule import Schedule
from sortedrl.core.buffer import Buffer
from sortedrl.core.clock import VirtualClock
from sortedrl.core.controller import Controller
from sortedrl.core.loop import Loop
from sortedrl.core.meter import measure
from sortedrl.core.randomness import mix
from sortedrl.core.recorder import Journal
from sortedrl.engines.native import NativeEngine
from sortedrl.errors import ConfigError, DataError, EngineError, EngineLost
from sortedrl.simulate.costs import ticks
from sortedrl.simulate.engine import SimulatedPrompts, SimulatedTrainer
from sortedrl.simulate.lengths import LengthSettings
from sortedrl.types import Weights
from worlds import CountingScorer

sys.path.append(str(Path(__file__).parent / "engines"))
from sortedrl.engines import conformance

TWO = Cluster(
    rollout_workers=2,
    trainer_ranks=0,
    dashboard=False,
    object_store_gib=0.2,
    patience_seconds=60,
    start_seconds=60,
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
def open_fleet(ray_here, tmp_path):
    """Makes fleets; at the end they are closed, and no thread is left."""
    opened = []
    before = threading.active_count()

    def make(recipe, cluster=TWO, **options):
        placement = Placement(blueprint(cluster), seconds=60)
        warnings, hand_overs = [], []
        opened.append((placement, []))
        fleet = Fleet(
            cluster,
            recipe,
            placement=placement,
            warn=warnings.append,
            report=hand_overs.append,
            folder=tmp_path / "logs",
            **options,
        )
        opened[-1][1].append(fleet)
        fleet.warnings, fleet.hand_overs = warnings, hand_overs
        return fleet

    yield make
    for placement, fleets in opened:
        try:
            for fleet in fleets:
                fleet.close()
        finally:
            placement.remove()
    assert threading.active_count() <= before + 2, threading.enumerate()


def simulated(**changes):
    usual = {"slots": 4, "max_tokens": 60, "lengths": LengthSettings(median=12, sigma=0.8)}
    return SimulatedRecipe(**usual | changes)


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
    os.kill(worker.facts.process, signal.SIGKILL)


# --- laws -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lawful(ray_here):
    """The world of the laws, over one worker."""
    cluster = Cluster(**fields(TWO) | {"rollout_workers": 1})
    one = Fleet(
        cluster,
        LawfulRecipe(slots=conformance.SLOTS),
        placement=(placement := Placement(blueprint(cluster), seconds=60)),
        warn=pytest.fail,
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


def test_two_workers_write_what_one_engine_writes_to_the_bit(open_fleet):
    work = fresh_all((1, 5, 40, 12), samples=2)
    limits = {t.key: 4 + mix(t.seed) % 16 for t in work}
    one = NativeEngine(
        tiny_model(), slots=4, max_tokens=lambda t: limits[t.key], stop_tokens=[3, 50]
    )
    alone = [answer(t) for t in roll_out(one, work)]
    fleet = open_fleet(TinyRecipe(limits=limits))
    assert fleet.pool.slots == 4
    assert [answer(t) for t in roll_out(fleet.pool, work)] == alone
    new = dict(trained_a_little(tiny_model(), learning_rate=1e-2).state_dict())
    for engine in (one, fleet.pool):
        engine.load_weights(Weights(1, new))
    assert fleet.pool.version == 1
    other = [answer(t) for t in roll_out(one, work)]
    assert other != alone
    assert [answer(t) for t in roll_out(fleet.pool, work)] == other
    (told,) = fleet.hand_overs
    assert (told.version, told.workers, told.buckets) == (1, 2, 1)
    assert told.bytes == sum(t.nbytes for t in new.values())
    assert told.put_seconds > 0
    assert told.load_seconds > 0
    with pytest.raises(EngineError, match="must come with their tensors; version 2 came without"):
        fleet.workers[0].load_weights(Weights(2))
    logs = sorted(fleet.workers[0].facts.log.parent.glob("*.log"))
    assert [log.name for log in logs] == ["rollout-0.log", "rollout-1.log"]
    assert all("a tiny engine is made" in log.read_text() for log in logs)


def test_tensors_of_every_kind_arrive_as_they_were():
    from sortedrl.cluster.broadcast import buckets, num_bytes, unpacked

    tensors = {
        "half": torch.randn(3, 5).bfloat16(),
        "turned": torch.randn(4, 6).T,
        "number": torch.tensor(7),
        "none": torch.empty(0, 3),
        "long": torch.arange(1000),
    }
    parts = list(buckets(tensors, bucket_bytes=200))
    assert [[p.name for p in part] for part in parts] == [
        ["half", "turned", "number", "none"],
        ["long"],
    ]
    assert sum(map(num_bytes, parts)) == sum(t.nbytes for t in tensors.values())
    for name, tensor in unpacked(parts).items():
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


def test_the_loop_runs_over_workers_as_over_one_engine(open_fleet):
    fleet = open_fleet(simulated())
    for mode in ("partial", "on_policy", "coupled"):
        schedule, events = Schedule(group_prompts=16, update_batch=8, mode=mode), []
        loop = loop_over(fleet.pool, prompts=48, schedule=schedule, events=events)
        check_run(list(loop.run()), events, answers=48)
        assert not fleet.warnings
        assert fleet.pool.version > 1
        fleet.pool.load_weights(Weights(0))


def test_a_worker_killed_in_mid_round_gives_its_work_to_the_others(open_fleet):
    schedule = Schedule(group_prompts=16, update_batch=8)
    fleet, events = open_fleet(simulated(pause_seconds=0.02)), []
    loop = loop_over(fleet.pool, prompts=48, schedule=schedule, events=events)
    whole_step = fleet.pool.step
    seen = Counter()

    class Killing:
        """The pool, of which one worker dies while it writes."""

        submit, interrupt, load_weights = (
            fleet.pool.submit,
            fleet.pool.interrupt,
            fleet.pool.load_weights,
        )
        slots = property(lambda self: fleet.pool.slots)
        version = property(lambda self: fleet.pool.version)

        def step(self):
            step = whole_step()
            seen["answers"] += len(step.finished)
            if seen["answers"] >= 20 and not seen["killed"]:
                seen["killed"] = 1
                kill(fleet.workers[0])
            return step

    object.__setattr__(loop, "engine", Killing())
    check_run(list(loop.run()), events, answers=48)
    (warning,) = fleet.warnings
    assert warning.startswith("engine 1 of 2 (rollout-0) is lost: rollout worker 0, simulated")
    assert "its process has died (killed, out of memory, or crashed)" in warning
    assert "4 slots are left" in warning
    assert [worker.number for worker in fleet.lost] == [0]


def test_a_new_worker_takes_the_place_of_a_dead_one_with_the_present_weights(open_fleet):
    fleet, new = open_fleet(simulated()), Weights(3)
    fleet.pool.load_weights(new)
    work = fresh_all((1,) * 12)
    before = [answer(t) for t in roll_out(fleet.pool, work)]
    kill(fleet.workers[1])
    assert [answer(t) for t in roll_out(fleet.pool, work)] == before
    assert fleet.pool.slots == 4
    (joined,) = fleet.refill(lambda: new)
    assert (joined.version, fleet.pool.slots, fleet.lost) == (3, 8, [])
    assert not fleet.refill(lambda: new)
    added = fleet.add(new)
    assert (added.number, fleet.pool.slots) == (3, 12)
    assert [answer(t) for t in roll_out(fleet.pool, work)] == before
    assert [told.workers for told in fleet.hand_overs] == [2, 1, 1]
    with pytest.raises(ConfigError, match="in a pool once"):
        fleet.pool.add(joined)
    joined.version = 4
    with pytest.raises(ConfigError, match="must have the weights of version 3, as the pool"):
        fleet.pool.add(replace_member(joined))


def test_a_run_grows_with_its_cluster_and_mends_itself_when_new_weights_come(open_fleet):
    growing = Cluster(**fields(TWO) | {"rollout_workers": 1, "most_rollout_workers": 2})
    said = []
    engine = ElasticEngine(open_fleet(simulated(), growing), growing, tell=said.append)
    work = fresh_all((1,) * 12)
    before = [answer(t) for t in roll_out(engine, work)]
    assert engine.slots == 4
    engine.load_weights(Weights(1))
    assert (engine.slots, engine.version) == (8, 1)
    engine.load_weights(Weights(2))
    assert engine.slots == 8, "two are as many as there may be"
    kill(engine.fleet.workers[0])
    assert [answer(t) for t in roll_out(engine, work)] == before
    assert engine.slots == 4
    engine.release()
    engine.load_weights(Weights(3))
    assert (engine.slots, engine.version) == (8, 3)
    assert [answer(t) for t in roll_out(engine, work)] == before
    assert [line.endswith("has joined: 8 slots now") for line in said] == [True, True]


def replace_member(worker):
    """Another object that says the same of itself."""
    return SimpleNamespace(name=worker.name, slots=worker.slots, version=worker.version)


def test_without_a_worker_the_work_can_still_be_taken_back(open_fleet):
    fleet = open_fleet(simulated(pause_seconds=0.2))
    work = fresh_all((1, 2, 3))
    fleet.pool.submit(work, tolerance=None)
    for worker in fleet.workers:
        kill(worker)
    with pytest.raises(EngineLost, match="no engine is left, all 2 are lost"):
        finished_by(fleet.pool, 3)
    assert [t.key for t in fleet.pool.interrupt()] == [t.key for t in work]


def test_a_worker_whose_engine_is_lost_gives_back_the_tokens_it_had(open_fleet):
    long = simulated(lengths=LengthSettings(values=(2, 50)))
    fleet = open_fleet(BreakingRecipe(inner=long, breaks_at=1, is_lost=True))
    work = fresh_all((1,) * 8)
    fleet.pool.submit(work, tolerance=None)
    done = {}
    with pytest.raises(EngineLost, match="no engine is left"):
        step_for_ever(fleet.pool, done)
    stopped = {t.key: t for t in fleet.pool.interrupt()}
    assert done
    assert stopped
    assert done.keys() | stopped.keys() == {t.key for t in work}
    assert all(t.num_tokens == 2 for t in stopped.values())
    assert "the pipe broke" in fleet.warnings[0]


def test_a_bug_in_an_engine_reaches_the_caller_and_loses_nothing(open_fleet):
    one = Cluster(**fields(TWO) | {"rollout_workers": 1})
    fleet = open_fleet(BreakingRecipe(inner=simulated(), breaks_at=1, is_lost=False), one)
    work = fresh_all((1,) * 8)
    fleet.pool.submit(work, tolerance=None)
    done = {}
    with pytest.raises(KeyError, match="a bug"):
        step_for_ever(fleet.pool, done)
    assert not fleet.warnings
    stopped = {t.key for t in fleet.pool.interrupt()}
    assert done.keys() | stopped == {t.key for t in work}


def test_a_worker_that_does_not_answer_is_lost(open_fleet):
    patient = Cluster(**fields(TWO) | {"patience_seconds": 1.0})
    fleet = open_fleet(simulated(pause_seconds=0.02), patient)
    os.kill(fleet.workers[0].facts.process, signal.SIGSTOP)
    work = fresh_all((1,) * 6)
    fleet.pool.submit(work, tolerance=None)
    assert finished_by(fleet.pool, 6).keys() == {t.key for t in work}
    (warning,) = fleet.warnings
    assert "it has not answered for 1 s" in warning


def test_a_host_cut_off_in_mid_round_is_done_without_and_another_one_takes_its_place(ray_here):
    code = "import cluster_worlds; cluster_worlds.cut_off_a_host()"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        # Ray sees sooner that a node is gone.
        env=os.environ
        | {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"},
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
        "os.write(out, log.text_away().encode())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "said to one\nsaid to two\n"
    here = LogFolder.opened(tmp_path / "logs")
    assert here.is_here
    assert LogFolder.opened(tmp_path / "logs") == here


# --- starting -------------------------------------------------------------------------------------


def test_an_engine_that_cannot_be_made_says_why(open_fleet):
    with pytest.raises(EngineError, match="worker 0 could not make its engine: there is no such"):
        open_fleet(ImpossibleRecipe())


def test_a_run_that_does_not_fit_is_refused_with_what_is_missing(ray_here):
    big = Cluster(rollout_workers=64, gpus_per_worker=2)
    with pytest.raises(EngineError, match=r"must have 65 CPU and 129 GPU for .* 129 GPU missing"):
        Placement(blueprint(big), seconds=5)


def test_a_run_waits_for_what_others_have_taken_and_then_says_what_is_free(ray_here):
    three = blueprint(Cluster(**fields(TWO) | {"rollout_workers": 3}))
    first = Placement(three, seconds=60)
    with pytest.raises(EngineError, match="3 CPU in 3 bundles must be free within 1 s"):
        Placement(three, seconds=1)
    first.remove()
    Placement(three, seconds=60).remove()


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
        ({"patience_seconds": 0}, "patience_seconds must be above 0"),
        ({"kind": "colocate"}, "did you mean 'colocated'"),
        ({"kind": "colocated"}, "got 1 trainer_ranks and 2 rollout_workers"),
        ({"kind": "colocated", "trainer_ranks": 2, "gpus_per_worker": 2}, "set it to 1 or 0"),
        ({"address": "auto", "object_store_gib": 1.0}, "is for a Ray of our own"),
        ({"address": ""}, "must not be empty"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Cluster(**{"rollout_workers": 2} | settings)


def test_many_workers_speak_less_often():
    assert Cluster().beat_seconds == 0.02
    assert Cluster(rollout_workers=500).beat_seconds == 0.5


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
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "cluster.address must be that of a Ray that runs, got '127.0.0.1:9'" in ended.stderr
