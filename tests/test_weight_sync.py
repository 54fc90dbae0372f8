"""Weight sync from the trainer to the workers: three transports, to the bit, and their failures."""

import json
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

pytest.importorskip("ray", reason="the cluster needs the package ray")
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.cluster.broadcast import BroadcastReceiver, BroadcastSender, RendezvousStore
from sortedrl.cluster.buckets import Buffer, parts
from sortedrl.cluster.connection import connected
from sortedrl.cluster.placement import BundlePlacement, placement_plan
from sortedrl.cluster.weight_sync import WeightLoad, WeightSync
from sortedrl.cluster.weight_transport import (
    ReceivedWeights,
    Rendezvous,
    TransportFailed,
    read_weights,
    write_weights,
)
from sortedrl.cluster.worker_pool import WorkerPool
from sortedrl.config.cluster import Cluster
from sortedrl.errors import ConfigError, EngineError, EngineLost, ModelError, TrainingError
from sortedrl.types import Weights
from weight_sync_worlds import KeepingFactory, Source, digest

TWO = Cluster(
    rollout_workers=2,
    trainer_ranks=0,
    dashboard=False,
    object_store_gib=0.2,
    worker_timeout_seconds=15,
    start_seconds=300,
)
PATIENT = replace(TWO, worker_timeout_seconds=600)
"""For a broadcast that is slow on a busy machine: it would give way to the next transport."""
DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int8,
    torch.int64,
    torch.uint8,
    torch.bool,
)
pytestmark = [
    pytest.mark.slow,
    # Ray leaves sockets and files to the end of the process.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def all_kinds():
    """Every dtype, and every shape that is easily forgotten."""
    table = torch.arange(24.0).reshape(4, 6)
    return {
        **{f"kind.{dtype}": torch.randn(3, 5).mul(9).to(dtype) for dtype in DTYPES},
        "not finite": torch.tensor([float("nan"), float("inf"), -0.0]),
        "table": table,
        "tied": table,
        "turned": table.T,
        "row": table[1:2],
        "number": torch.tensor(7),
        "none": torch.empty(0, 3),
        "with gradient": torch.nn.Parameter(torch.randn(2)),
        "ein größerer Name/1": torch.arange(1000),
    }


# --- the broadcast --------------------------------------------------------------------------------


def receive(receiver, rendezvous, rank):
    """The buckets that a receiver gets."""
    return list(receiver.buckets(rendezvous, rank))


def joined(buckets):
    return {name: tensor for bucket in buckets for name, tensor in bucket.items()}


class Members:
    """A sender and its receivers, as threads of one process."""

    def __init__(self, count):
        self.store = RendezvousStore("127.0.0.1", seconds=60)
        self.sender = BroadcastSender()
        self.receivers = [BroadcastReceiver() for _ in range(count)]
        self.failures = 0

    def rendezvous(self, key, *, timeout=60.0):
        return Rendezvous(
            host="127.0.0.1",
            port=self.store.port,
            world=1 + len(self.receivers),
            # A key under which something failed is not used again.
            key=f"{key}-{self.failures}",
            timeout=timeout,
        )

    def sync(self, buckets, rendezvous):
        self.failures += 1
        with ThreadPoolExecutor() as threads:
            received = [
                threads.submit(receive, receiver, rendezvous, rank)
                for rank, receiver in enumerate(self.receivers, 1)
            ]
            self.sender.send(rendezvous, buckets)
            results = [future.result() for future in received]
        self.failures -= 1
        return results

    def close(self):
        for end in (self.sender, *self.receivers):
            end.close()


@pytest.fixture(scope="module")
def members():
    three = Members(2)
    yield three
    three.close()


@st.composite
def any_tensors(draw):
    shapes = st.lists(st.integers(0, 5), max_size=3)
    names = draw(st.lists(st.text(min_size=1, max_size=8), max_size=6, unique=True))
    return {
        name: torch.randn(draw(shapes)).mul(9).to(draw(st.sampled_from(DTYPES))) for name in names
    }


@settings(max_examples=40, deadline=None)
@given(tensors=any_tensors(), bucket_bytes=st.integers(1, 400))
def test_whatever_is_sent_is_received_to_the_bit(members, tensors, bucket_bytes):
    buckets = list(parts(tensors.items(), bucket_bytes=bucket_bytes))
    for found in members.sync(buckets, members.rendezvous("law")):
        assert digest(joined(found)) == digest(tensors)
        assert [list(bucket) for bucket in found] == [[name for name, _ in b] for b in buckets]


def test_a_group_is_kept_under_its_key_and_formed_anew_under_another(members):
    tensors = all_kinds()
    groups = []
    for key in ("a", "a", "b"):
        received = members.sync([list(tensors.items())], members.rendezvous(key))
        assert all(digest(joined(found)) == digest(tensors) for found in received)
        groups.append(members.sender._member._channels[0])
    assert groups[0] is groups[1]
    assert groups[1] is not groups[2]


def test_the_next_bucket_is_gathered_and_packed_while_one_travels(members, monkeypatch):
    gathered, packed = [], []
    whole = Buffer.packed

    def under_way():
        return len(members.sender._member._channels[0]._group._under_way)

    def buckets():
        for number in range(4):
            gathered.append(under_way())
            yield [(f"{number}", torch.zeros(1 << 20))]

    def pack(buffer, part):
        packed.append(under_way())
        return whole(buffer, part)

    monkeypatch.setattr(Buffer, "packed", pack)
    members.sync(buckets(), members.rendezvous("overlap"))
    # A front and a flat for each bucket; two buffers are never exceeded.
    assert gathered == [0, 2, 4, 4]
    assert packed == [0, 2, 2, 2]


@pytest.mark.parametrize("absent", ["sender", "receiver"])
def test_who_never_comes_is_not_waited_for_longer_than_the_timeout(absent):
    pair = Members(1)
    rendezvous = pair.rendezvous("alone", timeout=1.0)
    taken = []

    def gathered():
        for number in range(3):
            taken.append(number)
            yield [("x", torch.zeros(3))]

    def come():
        if absent == "sender":
            receive(pair.receivers[0], rendezvous, 1)
        else:
            pair.sender.send(rendezvous, gathered())

    with pytest.raises(TransportFailed, match="the ranks did not all join"):
        come()
    # Ranks that gather together would hang if one of them stopped.
    assert taken == ([0, 1, 2] if absent == "receiver" else [])


def test_who_is_known_to_be_gone_is_not_waited_for_at_all():
    pair = Members(1)
    rendezvous = pair.rendezvous("gone", timeout=600.0)
    pair.store.set_lost(rendezvous.key, rank=0)
    start = time.monotonic()
    with pytest.raises(TransportFailed, match="rank 0 of 2 is lost"):
        receive(pair.receivers[0], rendezvous, 1)
    assert time.monotonic() - start < 300


def test_a_source_that_breaks_in_the_middle_frees_the_receivers_at_once():
    pair = Members(1)

    def gathered():
        yield [("x", torch.zeros(3))]
        raise TrainingError("a rank broke")

    start = time.monotonic()
    with ThreadPoolExecutor() as threads:
        received = threads.submit(
            receive, pair.receivers[0], pair.rendezvous("broken", timeout=600.0), 1
        )
        with pytest.raises(TrainingError, match="a rank broke"):
            pair.sender.send(pair.rendezvous("broken", timeout=600.0), gathered())
        with pytest.raises(TransportFailed, match="the broadcast failed"):
            received.result()
    assert time.monotonic() - start < 300


def test_what_is_no_tensor_is_refused():
    with pytest.raises(ModelError, match="x must be a tensor to be sent, got int"):
        list(parts([("x", 3)], bucket_bytes=8))


# --- the file -------------------------------------------------------------------------------------


def test_weights_are_passed_on_as_they_arrive_and_kept_only_if_asked_for_by_name():
    gone = []

    def coming():
        for number in range(3):
            yield {f"{number}.{name}": torch.full((4,), float(number)) for name in "ab"}
            gone.append(number)

    streamed = ReceivedWeights(coming())
    items = iter(streamed.items())
    assert next(items)[0] == "0.a"
    assert gone == []
    assert [name for name, _ in items] == ["0.b", "1.a", "1.b", "2.a", "2.b"]
    assert (streamed.num_buckets, streamed.bytes) == (3, 6 * 16)
    with pytest.raises(AssertionError, match="iterated once"):
        dict(streamed.items())
    whole = ReceivedWeights(coming())
    assert whole["2.b"].tolist() == [2.0] * 4
    assert len(whole) == len(dict(whole.items())) == 6


def test_what_breaks_off_in_the_middle_is_a_transport_that_failed():
    def coming():
        yield {"a": torch.zeros(2)}
        raise TransportFailed("the sender is gone")

    for read in (dict, lambda weights: weights["a"], lambda weights: list(weights.items())):
        with pytest.raises(TransportFailed, match="the sender is gone"):
            read(ReceivedWeights(coming()))


def test_a_file_holds_the_tensors_to_the_bit_and_nothing_else_is_left(tmp_path):
    tensors = all_kinds()
    write_weights(tensors.items(), tmp_path / "w.safetensors", like=tensors)
    assert digest(read_weights(tmp_path / "w.safetensors")) == {**digest(tensors)}
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def test_a_file_that_cannot_be_written_or_read_is_a_transport_that_failed(tmp_path):
    with pytest.raises(TransportFailed, match="could not be written"):
        write_weights([], tmp_path / "nowhere" / "w.safetensors", like={})
    (tmp_path / "half").write_bytes(b"12")
    for name in ("half", "none"):
        with pytest.raises(TransportFailed, match=f"{name} could not be read"):
            read_weights(tmp_path / name)


# --- the push -------------------------------------------------------------------------------------


def weight_sync(source, transports=("objects",), *, folder=None, timeout_seconds=1.0):
    reports, warnings = [], []
    sync = WeightSync(
        source,
        reports.append,
        warn=warnings.append,
        transports=transports,
        folder=folder,
        timeout_seconds=timeout_seconds,
    )
    sync.reports, sync.warnings = reports, warnings
    return sync


class Target:
    """A worker that takes everything, unless a test gives it an error."""

    def __init__(self, number=0, error=None):
        self.number, self.error = number, error
        self.taken = []

    def take_weights(self, weights, delivery):
        if self.error is not None:
            raise self.error
        self.taken.append(weights.version)
        return WeightLoad(
            version=weights.version, bytes=1, buckets=1, fetch_seconds=0.0, load_seconds=0.0
        )


def test_disk_without_a_folder_is_refused():
    with pytest.raises(ConfigError, match="disk needs a folder that all machines can read"):
        weight_sync(Source(), ("disk",))


def test_if_no_transport_is_left_all_reasons_are_given(tmp_path):
    sync = weight_sync(
        Source(broken=("objects", "disk")), ("objects", "disk"), folder=tmp_path / "new"
    )
    with pytest.raises(EngineError, match=r"objects: objects is out of order; disk: disk is out"):
        sync.push(Weights(1, {}), [Target()])
    assert len(sync.warnings) == 2
    assert "no other transport is left" in sync.warnings[1]


def test_a_transport_that_always_fails_is_not_tried_for_ever(tmp_path):
    source = Source()
    sync = weight_sync(source, ("objects", "disk"), folder=tmp_path)
    for version, is_broken in enumerate([True, True, False, *[True] * 5]):
        source.broken = ("objects",) if is_broken else ()
        source.local.put = lambda weights: []
        sync.push(Weights(version, {"x": torch.zeros(2)}), [Target()])
    used = [report.transport for report in sync.reports]
    assert used == ["disk", "disk", "objects", *["disk"] * 5]
    assert len(sync.warnings) == 2 + 3
    assert "failed 3 times in a row and is not tried again" in sync.warnings[-1]
    assert not list(tmp_path.iterdir())


def test_a_trainer_that_is_lost_while_it_sends_is_not_a_transport_that_failed():
    source = Source()

    def send(weights, rendezvous):
        raise TrainingError("a rank is lost")

    source.send = send
    sync = weight_sync(source, ("broadcast", "objects"), timeout_seconds=300)
    sync._groups.rendezvous = lambda members: Rendezvous(
        host="", port=1, world=2, key="k", timeout=1
    )
    with pytest.raises(TrainingError, match="a rank is lost"):
        sync.push(Weights(1, {}), [Target(error=TransportFailed("the sender is gone"))])
    assert not sync.warnings


def test_a_worker_lost_in_a_push_is_left_out_and_another_error_is_raised(tmp_path):
    sync = weight_sync(None)
    living, lost = Target(0), Target(1, EngineLost("it is gone"))
    sync.push(Weights(1), [living, lost])
    (report,) = sync.reports
    assert (report.workers, report.transport, living.taken) == (1, None, [1])
    sync.push(Weights(2), [lost])
    assert len(sync.reports) == 1
    with pytest.raises(ModelError, match="no such weight"):
        sync.push(Weights(3), [living, Target(1, ModelError("no such weight"))])
    assert living.taken == [1, 3]


def test_who_joins_gets_the_weights_without_a_broadcast_and_without_a_report(tmp_path):
    sync = weight_sync(Source(), ("broadcast", "disk"), folder=tmp_path)
    sync.push(Weights(1, {"x": torch.zeros(2)}), [Target()], is_joining=True)
    assert not sync.reports
    assert not sync.warnings


# --- workers --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray_here():
    with pytest.MonkeyPatch.context() as patch:
        # Workers import the worlds too, and know this path only from the environment.
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        with connected(replace(TWO, rollout_workers=4), tell=lambda words: None) as connection:
            yield connection


@pytest.fixture
def open_pool(ray_here, tmp_path):
    """Makes pools whose workers write down what they were given; at the end no thread is left."""
    opened = []
    before = threading.active_count()

    def make(cluster=TWO, **options):
        placement = BundlePlacement(placement_plan(cluster), seconds=300)
        warnings, reports = [], []
        sender = BroadcastSender()
        source = Source(sender=sender, **options)
        pool = WorkerPool(
            cluster,
            KeepingFactory(folder=tmp_path),
            placement=placement,
            source=source,
            tell=warnings.append,
            report=reports.append,
            weight_sync_folder=tmp_path / "weights",
        )
        pool.warnings, pool.reports, pool.source = warnings, reports, source
        opened.append((pool, placement, sender))
        return pool

    yield make
    for pool, placement, sender in opened:
        pool.close()
        sender.close()
        placement.remove()
    assert threading.active_count() <= before + 2, threading.enumerate()
    assert not list((tmp_path / "weights").glob("*"))


def check_given(folder, pool, tensors, *, version):
    """All workers that live have these tensors."""
    for worker in pool.workers:
        if not worker.is_lost:
            file = folder / f"{worker.info.process}-{version}.json"
            assert json.loads(file.read_text()) == digest(tensors)


@pytest.mark.parametrize(("transport", "workers"), [("broadcast", 2), ("objects", 1), ("disk", 1)])
def test_every_transport_brings_the_weights_to_the_bit_and_reports(
    open_pool, tmp_path, transport, workers
):
    pool = open_pool(replace(PATIENT, weight_sync=transport, rollout_workers=workers))
    for version in (1, 2):
        tensors = all_kinds()
        pool.load_weights(Weights(version, tensors))
        check_given(tmp_path, pool, tensors, version=version)
        report = pool.reports[-1]
        buckets = len(tensors) if transport == "broadcast" else 1
        assert (report.version, report.transport) == (version, transport)
        assert (report.workers, report.buckets) == (workers, buckets)
        assert report.bytes == sum(tensor.nbytes for tensor in tensors.values())
        assert 0 < report.put_seconds <= report.seconds
        assert 0 < report.fetch_seconds <= report.seconds
        assert 0 < report.load_seconds <= report.seconds
    assert not pool.warnings


def kill(worker):
    os.kill(worker.info.process, signal.SIGKILL)


def test_a_new_process_group_is_formed_when_a_worker_is_lost_and_when_one_joins(
    open_pool, tmp_path
):
    pool = open_pool(PATIENT)

    def sync(version):
        tensors = {**all_kinds(), "version": torch.tensor(version)}
        pool.load_weights(Weights(version, tensors))
        check_given(tmp_path, pool, tensors, version=version)
        return pool.source.rendezvous[-1]

    first, second = sync(1), sync(2)
    assert first == second
    kill(pool.workers[0])
    # Nobody knows of its death before it is asked for something; another one joins at once.
    lost = sync(3)
    assert lost == first
    assert pool.reports[-1].workers == 1
    assert [worker.number for worker in pool.workers] == [0, 1, 2]
    third, fourth = sync(4), sync(5)
    assert third == fourth != first
    assert [rendezvous.world for rendezvous in (first, third)] == [3, 3]
    used = [(report.version, report.workers, report.transport) for report in pool.reports]
    assert used[:2] == [(1, 2, "broadcast"), (2, 2, "broadcast")]
    assert used[3:] == [(4, 2, "broadcast"), (5, 2, "broadcast")]


def test_a_transport_that_fails_is_followed_by_the_next_with_a_warning(open_pool, tmp_path):
    pool, tensors = open_pool(replace(TWO, worker_timeout_seconds=60)), all_kinds()
    for version, broken in enumerate([(), ("broadcast",), (), ("broadcast", "objects")], 1):
        pool.source.broken = broken
        pool.load_weights(Weights(version, tensors))
        check_given(tmp_path, pool, tensors, version=version)
    used = [report.transport for report in pool.reports]
    assert used == ["broadcast", "objects", "broadcast", "disk"]
    # In a group that failed nobody knows what the others have seen.
    met = [rendezvous.key for rendezvous in pool.source.rendezvous]
    assert met[0] == met[1] != met[2] == met[3]
    assert [warning.partition(" (")[0] for warning in pool.warnings] == [
        "weight sync of version 2 by broadcast failed",
        "weight sync of version 4 by broadcast failed",
        "weight sync of version 4 by objects failed",
    ]
    assert pool.warnings[0].endswith("broadcast is out of order); objects is used instead")
    assert pool.warnings[2].endswith("(objects is out of order); disk is used instead")

    @ray.remote(num_cpus=0, max_retries=0)
    def lost():
        raise OSError("it is gone")

    pool.source.broken = ()
    pool.source.send = lambda weights, rendezvous: pool.source.sender.close()
    pool.source.put = lambda weights: [lost.remote()]
    pool.load_weights(Weights(5, tensors))
    check_given(tmp_path, pool, tensors, version=5)
    assert pool.reports[-1].transport == "disk"
    assert "an object could not be fetched" in pool.warnings[4]


def test_a_worker_killed_during_a_broadcast_holds_nobody_up(open_pool, tmp_path):
    tensors = {f"{number}": torch.randn(1 << 18) for number in range(8)}
    pools = []

    def kill_one(number):
        if number == 4 and not pools[0].workers[1].is_lost:
            kill(pools[0].workers[1])

    pool = open_pool(replace(TWO, worker_timeout_seconds=1200), before=kill_one)
    pools.append(pool)
    pool.load_weights(Weights(1, tensors))
    check_given(tmp_path, pool, tensors, version=1)
    assert pool.workers[1].is_lost
    assert pool.reports[0].workers == 1
    # The closed connection is seen: nobody waits for the timeout of the broadcast.
    (failed,) = [words for words in pool.warnings if "version 1 by broadcast failed" in words]
    assert not re.search("timed? ?out", failed, re.IGNORECASE), failed
    assert any("engine 2 of 2 (rollout-1) is lost" in words for words in pool.warnings)
