"""Whole runs on Ray that lose a process to SIGKILL, or a host: nothing lost, nothing trained twice.

Whoever is killed, at the end of the run every answer was trained on exactly once (`law`).
"""

import os
import re
import shutil
import signal
import subprocess
from contextlib import suppress

import pytest

pytest.importorskip("ray", reason="the cluster needs the package ray")

from fault_worlds import OWN_RAY, Node, Run, free_port, law, until_gone
from run_worlds import write_world
from sortedrl.cluster.connection import _no_ray as no_ray

# Four bytes of 256 end an answer, so that a round is long enough to be hit.
STOPS = range(128, 132)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    write_world(folder, stops=STOPS)
    return folder


@pytest.fixture(scope="module")
def seen():
    """The processes of all runs; at last none of them is left."""
    processes = []
    yield processes
    # Ray's agents look for a lost Ray for a minute before they end; that is not waited for.
    agents = [process for process in processes if "agent" in process.words.lower()]
    left = until_gone([process for process in processes if process not in agents])
    for process in (*agents, *left):
        with suppress(AssertionError, ProcessLookupError):  # it may have ended
            process.signal(signal.SIGKILL)
    assert not left


@pytest.fixture
def opened(seen):
    """Runs and nodes, in the order of their start; what descends from them ends with the test."""
    families = []
    yield families
    for family in reversed(families):
        seen += family.family()
        family.end()


@pytest.fixture
def begun(world, opened, seen):
    """Begins runs; each has some updates behind it, and is in the middle of a round."""

    def begin(name, **options):
        run = Run(world, name, **options)
        opened.append(run)
        run.until_mid("start", "finish")
        seen.extend(run.family())
        return run

    return begin


def resumed(run, *words):
    """Go on with a run by hand, as its last words say; it must come to its end."""
    assert run.says(f"resume with: sortedrl train {run.out.name} --resume\n"), run.err
    run.resume(*words)
    assert run.wait() == 0, run.err
    assert "resuming from" in run.err
    law(run.out)


def test_another_worker_takes_the_place_of_one_that_is_killed(world, begun):
    run = begun("worker", cluster=f"{OWN_RAY}trainer_ranks = 0\n", reward="held")
    # The run must not end before the other worker has started, however slow the machine is.
    (world / "held").touch()
    run.family("ray::RolloutWorker")[0].signal(signal.SIGKILL)
    run.until(lambda: "has joined" in run.err or run.process.poll() is not None, every=0.05)
    (world / "held").unlink()
    assert run.wait() == 0, run.err
    assert "its process has died" in run.err
    assert "4 slots are left" in run.err
    # On a slow machine the first that is started in its place may be given up.
    joined = r"rollout worker [2-9], the native engine on cpu at \S+ has joined: 8 slots now"
    assert re.search(joined, run.err), run.err
    assert "resuming from" not in run.err, "no checkpoint is needed"
    law(run.out)


def test_a_run_whose_trainer_loses_a_rank_in_mid_update_goes_on_from_its_checkpoint(begun):
    run = begun("rank", workers=1, cluster=f"{OWN_RAY}trainer_ranks = 2\n")
    updating = []

    def is_updating():
        updating[:] = run.family("ray::TrainerRank.update") if run.last_event == "score" else ()
        return len(updating) == 2

    run.until(is_updating)
    updating[-1].signal(signal.SIGKILL)
    assert run.wait() == 0, run.err
    assert "a trainer rank is lost: its process has died" in run.err
    assert "Resuming from the last checkpoint (3 restarts left).\n" in run.err
    assert run.err.count("a Ray of our own") == 2
    law(run.out)


def test_nothing_outlives_the_controller(begun):
    run = begun("controller", workers=1)
    named = ("ray::RolloutWorker", "ray::TrainerRank", "/core/src/ray/")
    core = [p for p in run.family() if any(word in p.words for word in named)]
    assert len(core) == 4, "a worker and a rank, gcs_server and raylet"
    run.process.kill()
    run.wait()
    assert not until_gone(core)
    # It need not be a cluster that goes on.
    resumed(run, "--cluster.rollout-workers", "0")


@pytest.mark.parametrize(
    ("name", "words"), [("head", "gcs/gcs_server"), ("raylet", "raylet/raylet")]
)
def test_a_run_that_loses_ray_itself_says_how_to_go_on(begun, name, words):
    # A run goes on for a while without the head, and must not reach its end then.
    run = begun(name, workers=1, reward="slow" if name == "head" else "letters")
    (victim,) = run.family(f"/core/src/ray/{words}")
    victim.signal(signal.SIGKILL)
    code = run.wait()
    if name == "raylet" and code == 0:
        # Without a raylet the workers die first, and a run that notices begins a Ray of its own.
        assert "Resuming from the last checkpoint" in run.err
        law(run.out)
        return
    assert code == 1, run.err
    assert run.says("or Ray's own processes on this machine were (gcs_server, raylet)"), run.err
    resumed(run, "--cluster.rollout-workers", "0")


def cut_off(run, cut):
    """Cut off the host of one of the two workers in mid-round; the run ends with the other one."""
    run.until_mid("start", "finish", updates=run.updates)
    cut()
    assert run.wait() == 0, run.err
    assert run.err.count("is lost") == 1
    assert "4 slots are left" in run.err
    # Said at the next hand-over, if there is one, and not again.
    assert run.err.count("its machine is gone, and no other has room") <= 1
    law(run.out)


def test_a_run_goes_on_when_a_host_dies(world, opened, begun):
    port = free_port()
    address = f"127.0.0.1:{port}"
    head = ("--head", f"--port={port}", "--include-dashboard=false")
    opened.append(Node(*head, log=world / "head.log"))
    opened.append(Node(f"--address={address}", log=world / "other.log"))
    other = opened[-1]
    # A worker outlives the raylet of its host for a moment, and the run must not end before it.
    run = begun("host", cluster=f'address = "{address}"\ntrainer_ranks = 0\n', reward="slow")
    assert len(other.family("ray::RolloutWorker")) == 1
    (raylet,) = other.family("/core/src/ray/raylet/raylet")
    cut_off(run, lambda: raylet.signal(signal.SIGKILL))


@pytest.fixture
def namespaces():
    """Two network namespaces, joined by a wire; gives both, and what cuts the wire."""
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("network namespaces need root and the program ip")
    one, other = (f"sortedrl-{os.getpid()}-{number}" for number in (1, 2))

    def ip(words, *, check=True):
        return subprocess.run(["ip", *words.split()], check=check, capture_output=True, text=True)

    made = ip(f"netns add {one}", check=False)
    if made.returncode:
        pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
    try:
        ip(f"netns add {other}")
        ip(f"link add wire netns {one} type veth peer name wire netns {other}")
        for number, name in enumerate((one, other), start=1):
            ip(f"-n {name} addr add 10.77.0.{number}/24 dev wire")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link set wire up")
        yield one, other, lambda: ip(f"-n {other} link set wire down")
    finally:
        for name in (one, other):
            ip(f"netns del {name}", check=False)


def test_a_run_goes_on_when_the_wire_to_a_host_is_cut(world, opened, begun, namespaces):
    one, other, cut = namespaces
    port = free_port()
    address = f"10.77.0.1:{port}"
    here, there = (("ip", "netns", "exec", name) for name in (one, other))
    head = ("--head", f"--port={port}", "--include-dashboard=false", "--node-ip-address=10.77.0.1")
    opened.append(Node(*head, log=world / "head.log", within=here))
    joining = (f"--address={address}", "--node-ip-address=10.77.0.2")
    opened.append(Node(*joining, log=world / "other.log", within=there))
    cluster = f'address = "{address}"\ntrainer_ranks = 0\n'
    far = opened[-1]
    run = begun("wire", cluster=cluster, within=here)
    assert len(far.family("ray::RolloutWorker")) == 1
    cut_off(run, cut)


def test_a_ray_that_wants_a_token_says_so():
    error = ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")
    assert "ray start --head" in str(no_ray("10.0.0.1:6379", error))
    error.__cause__ = RuntimeError("ray.exceptions.AuthenticationError: RPC error")
    assert "the Ray at 10.0.0.1:6379 requires a token" in str(no_ray("10.0.0.1:6379", error))
