"""What runs inside the workers of the cluster tests; they import this module themselves."""

import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass

from simulated_worker import SimulatedFactory
from sortedrl.engines.sampling import Sampling
from sortedrl.errors import EngineLost


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyFactory:
    """The native engine on a tiny random model."""

    slots: int = 2
    limits: dict
    stop_tokens: tuple = (3, 50)

    def engine(self):
        import torch

        from native_worlds import tiny_model
        from sortedrl.engines.native import NativeEngine

        torch.set_num_threads(1)
        sys.stdout.write("a tiny engine is made\n")
        sys.stdout.flush()
        return NativeEngine(
            tiny_model(),
            slots=self.slots,
            max_tokens=lambda trajectory: self.limits[trajectory.key],
            stop_tokens=list(self.stop_tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LawfulFactory:
    """The native engine that the laws of all engines are tried on."""

    slots: int

    def engine(self):
        from sortedrl.engines.conformance import STOPS, TEMPERATURE, limit_of, reference_model
        from sortedrl.engines.native import NativeEngine

        return NativeEngine(
            reference_model(0),
            slots=self.slots,
            max_tokens=limit_of,
            stop_tokens=STOPS,
            sampling=Sampling(temperature=TEMPERATURE),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakingFactory:
    """A simulated engine that breaks at some step, but whose process lives on."""

    inner: object
    breaks_at: int
    is_lost: bool

    def engine(self):
        engine = self.inner.engine()
        whole_step, steps = engine.step, iter(range(1 << 30))

        def step():
            if next(steps) >= self.breaks_at:
                raise EngineLost("the pipe broke") if self.is_lost else KeyError("a bug")
            return whole_step()

        engine.step = step
        return engine


_WORK = """
import sys, time
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    time.sleep(0.08)
    worked = time.process_time() + 0.02
    while time.process_time() < worked:
        pass
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowFactory:
    """A simulated engine that takes its time to be made, at work in a child process or asleep.

    A fifth of a CPU is work enough, and leaves the rest to other tests.
    """

    seconds: float
    is_busy: bool

    def engine(self):
        command = [sys.executable, "-c", _WORK] if self.is_busy else ["sleep"]
        subprocess.run([*command, str(self.seconds)], check=True)
        return SimulatedFactory(slots=4, max_tokens=60).engine()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImpossibleFactory:
    """An engine that cannot be made."""

    def engine(self):
        raise ValueError("there is no such model")


def cut_off_a_host():
    """Two Ray nodes as two hosts; one is cut off in mid-round, and another one comes.

    Runs in a process of its own, because a process has one Ray.
    """
    from ray.cluster_utils import Cluster as Nodes

    from native_worlds import fresh_all
    from sortedrl.cluster.connection import connected
    from sortedrl.cluster.placement import BundlePlacement, placement_plan
    from sortedrl.config.cluster import Cluster
    from sortedrl.simulate.lengths import LengthSettings
    from sortedrl.types import Weights

    room = {"num_cpus": 1, "object_store_memory": 100 << 20}
    nodes = Nodes(initialize_head=True, head_node_args=room | {"include_dashboard": False})
    other = nodes.add_node(**room)
    cluster = Cluster(
        address=nodes.address, rollout_workers=2, trainer_ranks=0, worker_timeout_seconds=20
    )
    said, warnings = [], []
    with connected(cluster, tell=said.append) as connection:
        from sortedrl.cluster.worker_pool import WorkerPool

        assert (connection.is_own, connection.num_nodes) == (False, 2)
        factory = SimulatedFactory(
            slots=4, max_tokens=60, lengths=LengthSettings(median=12), pause_seconds=0.02
        )
        pool = WorkerPool(
            cluster,
            factory,
            placement=BundlePlacement(placement_plan(cluster), seconds=30),
            source=None,
            tell=warnings.append,
            report=lambda _: None,
        )
        done, rounds = Counter(), 0
        while not warnings:
            rounds += 1
            assert rounds < 200, "the worker of a dead node lives on"
            work = fresh_all((1,) * 40)
            pool.submit(work, tolerance=None)
            while sum(done.values()) < rounds * len(work):
                done.update(t.key for t in pool.step().finished)
                if rounds == 1 and other is not None and sum(done.values()) > 10:
                    nodes.remove_node(other, allow_graceful=False)
                    other = None
        assert len(done) == len(work)
        assert set(done.values()) == {rounds}
        assert len(warnings) == 1
        assert pool.slots == 4
        nodes.add_node(**room)
        # Ray takes some seconds to see that the old node is gone, and moves its bundle then.
        until = time.monotonic() + 60
        version = 0
        while pool.lost:
            version += 1
            pool.load_weights(Weights(version))
            assert time.monotonic() < until
        assert pool.slots == 8
        pool.close()
    nodes.shutdown()
    sys.stdout.write(f"the run went on: {warnings[0]}\n")


def length_reward(prompt, response):
    """Something that differs from answer to answer, of a model that knows nothing."""
    return (len(response) + sum(map(ord, response))) % 17 / 17
