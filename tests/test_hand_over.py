"""Weights from the trainer to the workers: three ways, to the bit, and what if one fails."""

import json
import os
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

from hand_over_worlds import KeepingRecipe, Source, digest
from sortedrl.cluster.broadcast import Buffer, MeetingPlace, Receiver, Sender, parts
from sortedrl.cluster.connection import connected
from sortedrl.cluster.fleet import Fleet
from sortedrl.cluster.placement import Placement, blueprint
from sortedrl.cluster.weight_sync import HandOvers, Loading
from sortedrl.cluster.weight_transport import (
    LocalSource,
    Meeting,
    WayFailed,
    WeightSource,
    read_weights,
    write_weights,
)
from sortedrl.config.cluster import Cluster
from sortedrl.errors import ConfigError, EngineError, ModelError, TrainingError
from sortedrl.types import Weights

TWO = Cluster(
    rollout_workers=2,
    trainer_ranks=0,
    dashboard=False,
    object_store_gib=0.2,
    patience_seconds=15,
    start_seconds=300,
)
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


# --- the group ------------------------------------------------------------------------------------


class Members:
    """A sender and its receivers, as threads of one process."""

    def __init__(self, count):
        self.place = MeetingPlace("127.0.0.1", seconds=60)
        self.sender, self.receivers = Sender(), [Receiver() for _ in range(count)]
        self.failures = 0

    def meeting(self, key, *, timeout=60.0):
        return Meeting(
            host="127.0.0.1",
            port=self.place.port,
            world=1 + len(self.receivers),
            # A key under which something failed is not used again.
            key=f"{key}-{self.failures}",
            timeout=timeout,
        )

    def hand_over(self, buckets, meeting):
        self.failures += 1
        with ThreadPoolExecutor() as threads:
            received = [
                threads.submit(receiver.receive, meeting, rank)
                for rank, receiver in enumerate(self.receivers, 1)
            ]
            sent = self.sender.send(meeting, buckets)
            results = [future.result() for future in received]
        self.failures -= 1
        return sent, results

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
    sent, received = members.hand_over(buckets, members.meeting("law"))
    assert sent.buckets == len(buckets)
    assert sent.bytes == sum(tensor.nbytes for tensor in tensors.values())
    for one in received:
        assert digest(one.tensors) == digest(tensors)
        assert list(one.tensors) == list(tensors)
        assert (one.bytes, one.buckets) == (sent.bytes, sent.buckets)


def test_a_group_is_kept_under_its_key_and_formed_anew_under_another(members):
    tensors = all_kinds()
    groups = []
    for key in ("a", "a", "b"):
        _, received = members.hand_over([list(tensors.items())], members.meeting(key))
        assert all(digest(one.tensors) == digest(tensors) for one in received)
        groups.append(members.sender._seat._group)
    assert groups[0] is groups[1]
    assert groups[1] is not groups[2]


def test_the_next_bucket_is_gathered_and_packed_while_one_travels(members, monkeypatch):
    gathered, packed = [], []
    whole = Buffer.packed

    def under_way():
        return len(members.sender._seat._group._under_way)

    def buckets():
        for number in range(4):
            gathered.append(under_way())
            yield [(f"{number}", torch.zeros(1 << 20))]

    def pack(buffer, part):
        packed.append(under_way())
        return whole(buffer, part)

    monkeypatch.setattr(Buffer, "packed", pack)
    members.hand_over(buckets(), members.meeting("overlap"))
    # A front and a flat for each bucket; two buffers are never exceeded.
    assert gathered == [0, 2, 4, 4]
    assert packed == [0, 2, 2, 2]


@pytest.mark.parametrize("absent", ["sender", "receiver"])
def test_who_never_comes_is_not_waited_for_longer_than_the_timeout(absent):
    pair = Members(1)
    meeting = pair.meeting("alone", timeout=1.0)
    taken = []

    def gathered():
        for number in range(3):
            taken.append(number)
            yield [("x", torch.zeros(3))]

    def come():
        if absent == "sender":
            pair.receivers[0].receive(meeting, 1)
        else:
            pair.sender.send(meeting, gathered())

    start = time.monotonic()
    with pytest.raises(WayFailed, match="the members did not meet"):
        come()
    assert time.monotonic() - start < 30
    # Ranks that gather together would hang if one of them stopped.
    assert taken == ([0, 1, 2] if absent == "receiver" else [])


def test_who_is_known_to_be_gone_is_not_waited_for_at_all():
    pair = Members(1)
    meeting = pair.meeting("gone")
    pair.place.miss(meeting.key, rank=0)
    start = time.monotonic()
    with pytest.raises(WayFailed, match="member 0 of 2 is gone"):
        pair.receivers[0].receive(meeting, 1)
    assert time.monotonic() - start < 30


def test_a_source_that_breaks_in_the_middle_frees_the_receivers_at_once():
    pair = Members(1)

    def gathered():
        yield [("x", torch.zeros(3))]
        raise TrainingError("a rank broke")

    start = time.monotonic()
    with ThreadPoolExecutor() as threads:
        received = threads.submit(pair.receivers[0].receive, pair.meeting("broken"), 1)
        with pytest.raises(TrainingError, match="a rank broke"):
            pair.sender.send(pair.meeting("broken"), gathered())
        with pytest.raises(WayFailed, match="the broadcast failed"):
            received.result()
    assert time.monotonic() - start < 30


def test_what_is_no_tensor_is_refused():
    with pytest.raises(ModelError, match="x must be a tensor to travel, got int"):
        list(parts([("x", 3)], bucket_bytes=8))


# --- the file -------------------------------------------------------------------------------------


def test_a_file_holds_the_tensors_to_the_bit_and_nothing_else_is_left(tmp_path):
    tensors = all_kinds()
    write_weights(tensors, tmp_path / "w.safetensors")
    assert digest(read_weights(tmp_path / "w.safetensors")) == {**digest(tensors)}
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def test_a_file_that_cannot_be_written_or_read_is_a_way_that_failed(tmp_path):
    with pytest.raises(WayFailed, match="could not be written"):
        write_weights(all_kinds(), tmp_path / "nowhere" / "w.safetensors")
    (tmp_path / "half").write_bytes(b"12")
    for name in ("half", "none"):
        with pytest.raises(WayFailed, match=f"{name} could not be read"):
            read_weights(tmp_path / name)


# --- the meeting of the workers -------------------------------------------------------------------


def hand_overs(ways=("objects",), *, folder=None, patience_seconds=1.0):
    told, warnings = [], []
    made = HandOvers(
        told.append,
        warn=warnings.append,
        ways=ways,
        folder=folder,
        patience_seconds=patience_seconds,
    )
    made.told, made.warnings = told, warnings
    return made


def take(offer):
    return Loading(version=1, bytes=1, buckets=1, fetch_seconds=0.0, load_seconds=0.0)


def test_disk_without_a_folder_is_refused():
    with pytest.raises(ConfigError, match="disk needs a folder that all machines see"):
        hand_overs(("disk",))


def test_if_no_way_is_left_all_reasons_are_said(tmp_path):
    made = hand_overs(("objects", "disk"), folder=tmp_path)
    made.join(0)
    broken = Source({}, broken=("objects", "disk"))
    assert isinstance(broken, WeightSource)
    with pytest.raises(EngineError, match=r"objects: objects is out of order; disk: disk is out"):
        made.deliver(Weights(1, broken), worker=0, take=take)
    assert len(made.warnings) == 2
    assert "no other way is left" in made.warnings[1]


def test_a_way_that_always_fails_is_not_tried_for_ever(tmp_path):
    made = hand_overs(("objects", "disk"), folder=tmp_path)
    made.join(0)
    tensors = {"x": torch.zeros(2)}
    for version, is_broken in enumerate([True, True, False, *[True] * 5]):
        source = Source(tensors, broken=("objects",) if is_broken else ())
        if not is_broken:
            source.ship = list
        made.deliver(Weights(version, source), worker=0, take=take)
    assert [told.way for told in made.told] == ["disk", "disk", "objects", *["disk"] * 5]
    assert len(made.warnings) == 2 + 3
    assert "failed 3 times in a row and is not tried again" in made.warnings[-1]
    assert not list(tmp_path.iterdir())


def test_a_trainer_that_is_lost_while_it_sends_is_not_a_way_that_failed():
    made = hand_overs(("group", "objects"), patience_seconds=60)
    made.join(0)
    source = Source({})

    def send(meeting):
        raise TrainingError("a rank is lost")

    source.send = send

    def receive(offer):
        raise WayFailed("the sender is gone")

    made._meetings.called = lambda members: Meeting(host="", port=1, world=2, key="k", timeout=1)
    with pytest.raises(TrainingError, match="a rank is lost"):
        made.deliver(Weights(1, source), worker=0, take=receive)
    assert not made.warnings


# --- workers --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray_here():
    with pytest.MonkeyPatch.context() as patch:
        # Workers import the worlds too, and know this path only from the environment.
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        with connected(replace(TWO, rollout_workers=4), tell=lambda words: None) as connection:
            yield connection


@pytest.fixture
def open_fleet(ray_here, tmp_path):
    """Makes fleets that write down what they were given; at the end no thread is left."""
    opened = []
    before = threading.active_count()

    def make(cluster=TWO):
        placement = Placement(blueprint(cluster), seconds=300)
        warnings, told = [], []
        fleet = Fleet(
            cluster,
            KeepingRecipe(folder=tmp_path),
            placement=placement,
            warn=warnings.append,
            report=told.append,
            hand_over_folder=tmp_path / "weights",
        )
        fleet.warnings, fleet.told = warnings, told
        opened.append((fleet, placement))
        return fleet

    yield make
    for fleet, placement in opened:
        fleet.close()
        placement.remove()
    assert threading.active_count() <= before + 2, threading.enumerate()
    assert not list((tmp_path / "weights").glob("*"))


def check_given(folder, fleet, tensors, *, version, workers=None):
    """All workers that live have these tensors."""
    alive = [worker for worker in fleet.workers if not worker.is_lost]
    for worker in alive if workers is None else workers:
        file = folder / f"{worker.facts.process}-{version}.json"
        assert json.loads(file.read_text()) == digest(tensors)


@pytest.mark.parametrize("way", ["group", "objects", "disk"])
def test_every_way_brings_the_weights_to_the_bit_and_says_what_it_took(open_fleet, tmp_path, way):
    fleet = open_fleet(replace(TWO, hand_over=way))
    for version in (1, 2):
        tensors = all_kinds()
        fleet.pool.load_weights(Weights(version, tensors))
        check_given(tmp_path, fleet, tensors, version=version)
        told = fleet.told[-1]
        assert (told.version, told.way, told.workers, told.buckets) == (version, way, 2, 1)
        assert told.bytes == sum(tensor.nbytes for tensor in tensors.values())
        assert 0 < told.put_seconds <= told.seconds
        assert 0 < told.fetch_seconds <= told.seconds
        assert 0 < told.load_seconds <= told.seconds
    assert not fleet.warnings


def kill(worker):
    os.kill(worker.facts.process, signal.SIGKILL)


def test_the_group_is_formed_anew_when_a_worker_is_lost_and_when_one_joins(open_fleet, tmp_path):
    fleet, sender = open_fleet(), Sender()

    def hand_over(version):
        source = Source({**all_kinds(), "version": torch.tensor(version)}, sender=sender)
        fleet.pool.load_weights(Weights(version, source))
        check_given(tmp_path, fleet, source.tensors, version=version)
        return source

    first, second = hand_over(1), hand_over(2)
    assert first.meetings == second.meetings
    assert fleet.told[-1].buckets == len(second.tensors)
    kill(fleet.workers[0])
    # Nobody knows of its death before it is asked for something.
    lost = hand_over(3)
    assert fleet.told[-1].workers == 1
    third = hand_over(4)
    (joined,) = fleet.refill(lambda: Weights(4, third))
    check_given(tmp_path, fleet, third.tensors, version=4, workers=[joined])
    fourth = hand_over(5)
    met = [source.meetings[-1] for source in (first, lost, third, fourth)]
    assert [meeting.world for meeting in met] == [3, 3, 2, 3]
    assert len({meeting.key for meeting in met}) == 3
    ways = [(told.version, told.workers, told.way) for told in fleet.told]
    assert ways[:2] == [(1, 2, "group"), (2, 2, "group")]
    assert ways[3:] == [(4, 1, "group"), (4, 1, "objects"), (5, 2, "group")]
    sender.close()


def test_a_way_that_fails_is_followed_by_the_next_with_a_warning(open_fleet, tmp_path):
    fleet, sender, tensors = open_fleet(), Sender(), all_kinds()
    met = []
    for version, broken in enumerate([(), ("group",), (), ("group", "objects")], 1):
        source = Source(tensors, sender=sender, broken=broken)
        fleet.pool.load_weights(Weights(version, source))
        check_given(tmp_path, fleet, tensors, version=version)
        met.append(source.meetings[0].key)
    assert [told.way for told in fleet.told] == ["group", "objects", "group", "disk"]
    # In a group that failed nobody knows what the others have seen.
    assert met[0] == met[1] != met[2] == met[3]
    said = [warning.partition(" (")[0] for warning in fleet.warnings]
    assert said == [
        "the weights of version 2 could not be handed over by group",
        "the weights of version 4 could not be handed over by group",
        "the weights of version 4 could not be handed over by objects",
    ]
    assert fleet.warnings[0].endswith("group is out of order); objects is taken instead")
    assert fleet.warnings[2].endswith("objects is out of order); disk is taken instead")

    @ray.remote(num_cpus=0, max_retries=0)
    def lost():
        raise OSError("it is gone")

    source = Source(tensors, sender=sender)
    source.send = lambda meeting: sender.close()
    source.ship = lambda: [lost.remote()]
    fleet.pool.load_weights(Weights(5, source))
    check_given(tmp_path, fleet, tensors, version=5)
    assert fleet.told[-1].way == "disk"
    assert "an object could not be fetched" in fleet.warnings[4]
    sender.close()


def test_a_worker_killed_during_a_broadcast_holds_nobody_up(open_fleet, tmp_path):
    fleet, sender = open_fleet(replace(TWO, rollout_workers=3, patience_seconds=60)), Sender()
    tensors = {f"{number}": torch.randn(1 << 18) for number in range(8)}

    def kill_one(number):
        if number == 4:
            kill(fleet.workers[1])

    start = time.monotonic()
    source = Source(tensors, sender=sender, before=kill_one)
    fleet.pool.load_weights(Weights(1, source))
    assert time.monotonic() - start < 45
    check_given(tmp_path, fleet, tensors, version=1)
    assert [worker.number for worker in fleet.lost] == [1]
    assert fleet.told[0].workers == 2
    assert any("could not be handed over by group" in words for words in fleet.warnings)
    assert any("engine 2 of 3 (rollout-1) is lost" in words for words in fleet.warnings)
    sender.close()


def test_a_worker_that_does_not_come_to_the_meeting_is_not_waited_for(open_fleet, tmp_path):
    fleet, source = open_fleet(replace(TWO, patience_seconds=10)), LocalSource(all_kinds())
    fleet.workers[0].load_weights(Weights(1, source))
    (warning,) = fleet.warnings
    assert "rollout worker 1 did not come to the meeting in 2 s" in warning
    check_given(
        tmp_path, fleet, all_kinds() | source._tensors, version=1, workers=fleet.workers[:1]
    )
    assert not fleet.told
