"""What runs inside the workers of the cluster tests; they import this module themselves."""

import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from sortedrl.engines.sampling import Sampling
from sortedrl.errors import EngineError, EngineLost


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyRecipe:
    """The native engine on a tiny random model."""

    slots: int = 2
    limits: dict
    stop_tokens: tuple = (3, 50)

    @property
    def has_weights(self):
        return True

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
class LawfulRecipe:
    """The native engine that the laws of all engines are tried on."""

    slots: int

    @property
    def has_weights(self):
        return True

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
class BreakingRecipe:
    """A simulated engine that breaks at some step, but whose process lives on."""

    inner: object
    breaks_at: int
    is_lost: bool

    @property
    def has_weights(self):
        return False

    def engine(self):
        engine = self.inner.engine()
        whole_step, steps = engine.step, iter(range(1 << 30))

        def step():
            if next(steps) >= self.breaks_at:
                raise EngineLost("the pipe broke") if self.is_lost else KeyError("a bug")
            return whole_step()

        engine.step = step
        return engine


@dataclass(frozen=True, slots=True, kw_only=True)
class ImpossibleRecipe:
    """An engine that cannot be made."""

    has_weights = False

    def engine(self):
        raise ValueError("there is no such model")


def cut_off_a_host():
    """Two Ray nodes as two hosts; one is cut off in mid-round, and another one comes.

    Runs in a process of its own, because a process has one Ray.
    """
    from ray.cluster_utils import Cluster as Nodes

    from native_worlds import fresh_all
    from sortedrl.cluster.connection import connected
    from sortedrl.cluster.placement import Placement, blueprint
    from sortedrl.cluster.worker import SimulatedRecipe
    from sortedrl.config.cluster import Cluster
    from sortedrl.simulate.lengths import LengthSettings
    from sortedrl.types import Weights

    room = {"num_cpus": 1, "object_store_memory": 100 << 20}
    nodes = Nodes(initialize_head=True, head_node_args=room | {"include_dashboard": False})
    other = nodes.add_node(**room)
    cluster = Cluster(
        address=nodes.address, rollout_workers=2, trainer_ranks=0, patience_seconds=20
    )
    said, warnings = [], []
    with connected(cluster, tell=said.append) as connection:
        from sortedrl.cluster.fleet import Fleet

        assert (connection.is_own, connection.num_nodes) == (False, 2)
        recipe = SimulatedRecipe(
            slots=4, max_tokens=60, lengths=LengthSettings(median=12), pause_seconds=0.02
        )
        fleet = Fleet(
            cluster,
            recipe,
            placement=Placement(blueprint(cluster), seconds=30),
            warn=warnings.append,
            report=lambda _: None,
        )
        done, rounds = Counter(), 0
        while not warnings:
            rounds += 1
            assert rounds < 200, "the worker of a dead node lives on"
            work = fresh_all((1,) * 40)
            fleet.pool.submit(work, tolerance=None)
            while sum(done.values()) < rounds * len(work):
                done.update(t.key for t in fleet.pool.step().finished)
                if rounds == 1 and other is not None and sum(done.values()) > 10:
                    nodes.remove_node(other, allow_graceful=False)
                    other = None
        assert len(done) == len(work)
        assert set(done.values()) == {rounds}
        assert len(warnings) == 1
        assert fleet.pool.slots == 4
        nodes.add_node(**room)
        # Ray takes some seconds to see that the old node is gone, and moves its bundle then.
        until = time.monotonic() + 60
        while fleet.lost:
            with suppress(EngineError):
                fleet.refill(lambda: Weights(0))
            assert time.monotonic() < until
        assert fleet.pool.slots == 8
        fleet.close()
    nodes.shutdown()
    sys.stdout.write(f"the run went on: {warnings[0]}\n")


def length_reward(prompt, response):
    """Something that differs from answer to answer, of a model that knows nothing."""
    return (len(response) + sum(map(ord, response))) % 17 / 17
