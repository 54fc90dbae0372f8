"""Workers at the place of a sender read its buffers: to the bit, none too early, none kept."""

import logging
import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import PrefixStore

from buffer_sharing_worlds import (
    Cluster,
    RefusingSharing,
    UnsharingSharing,
    bits_of,
    buckets,
    receive_as_process,
)
from sortedrl.cluster.broadcast import _can_use_nccl
from sortedrl.cluster.weight_transport import Rendezvous, TransportFailed
from sortedrl.errors import TrainingError
from sortedrl.models import shared_memory
from sortedrl.models.shared_memory import CudaSharing, FileSharing

SHARED, BROADCAST = ["SharedChannel"], ["BroadcastChannel"]


@pytest.fixture
def folders(tmp_path):
    """Three places; each is left empty."""
    made = [tmp_path / name for name in "abc"]
    for folder in made:
        folder.mkdir()
    yield made
    assert not [file for folder in made for file in folder.iterdir()]


def mapped(folder):
    """Whether this process still has a file of this folder in its memory."""
    return str(folder) in Path("/proc/self/maps").read_text()


# --- who reads buffers, and who gets a broadcast --------------------------------------------------


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    senders=st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=2, unique=True),
    workers=st.lists(
        st.tuples(st.sampled_from([0, 1, 2, None]), st.booleans()), min_size=1, max_size=3
    ),
    count=st.integers(0, 6),
)
def test_every_worker_has_the_bits_of_every_sync_wherever_it_is(folders, senders, workers, count):
    ends = [
        None if place is None else (FileSharing if opens else RefusingSharing)(folders[place])
        for place, opens in workers
    ]
    with Cluster([FileSharing(folders[place]) for place in senders], ends) as cluster:
        for sync in range(2):
            sent = bits_of(buckets(count, seed=sync))
            for found in cluster.sync(
                cluster.rendezvous(), lambda sync=sync: buckets(count, seed=sync)
            ):
                assert bits_of(found) == sent
        assert cluster.kinds() == [
            SHARED if place in senders and opens else BROADCAST for place, opens in workers
        ]


def test_on_cpus_nothing_is_shared_and_the_first_sender_sends_to_all():
    with Cluster([None, None], [None, None]) as cluster:
        found = cluster.sync(cluster.rendezvous(), lambda: buckets(3))
        assert [bits_of(parts) for parts in found] == [bits_of(buckets(3))] * 2
        assert cluster.kinds() == [BROADCAST, BROADCAST]
        assert cluster.senders[1]._member._channels == []


@pytest.mark.parametrize(
    ("sender", "worker", "reason"),
    [
        (FileSharing, RefusingSharing, "the container has no IPC"),
        (UnsharingSharing, FileSharing, "this memory cannot be shared"),
    ],
)
def test_who_cannot_open_a_buffer_gets_a_broadcast_and_one_sentence_says_why(
    folders, caplog, sender, worker, reason
):
    with (
        caplog.at_level(logging.WARNING),
        Cluster([sender(folders[0])], [worker(folders[0])]) as cluster,
    ):
        for key in ("one", "one", "two"):
            (found,) = cluster.sync(cluster.rendezvous(key), lambda: buckets(4))
            assert bits_of(found) == bits_of(buckets(4))
        assert cluster.kinds() == [BROADCAST]
    assert [record.getMessage() for record in caplog.records] == [
        f"weights go to rank 1 of 2 through main memory, not by CUDA IPC: {reason}"
    ]


def test_nccl_takes_gpus_that_are_all_different():
    assert _can_use_nccl(["GPU-a", "GPU-b", "GPU-c"])
    assert not _can_use_nccl(["GPU-a", "GPU-b", "GPU-b"])
    assert not _can_use_nccl(["GPU-a", "cpu"])
    assert not _can_use_nccl(["cpu /dev/shm/a", "cpu /dev/shm/b"])


# --- buffers --------------------------------------------------------------------------------------


class HeldSharing(FileSharing):
    """A worker whose copies are done when a test says so."""

    def __init__(self, folder):
        super().__init__(folder)
        self.may_finish = threading.Event()

    def synchronize(self):
        assert self.may_finish.wait(60)


def test_a_buffer_is_filled_again_only_when_its_readers_have_their_copies(folders):
    worker, taken = HeldSharing(folders[0]), []

    def parts():
        for part in buckets(6):
            taken.append(part[0][0])
            yield part

    with Cluster([FileSharing(folders[0])], [worker]) as cluster, ThreadPoolExecutor(2) as threads:
        sending, receiving = cluster.start(threads, cluster.rendezvous(), parts)
        until = time.monotonic() + 60
        while len(taken) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.3)
        # Two buffers are filled, and the third bucket waits for the first of them.
        assert taken == ["0.a", "1.a", "2.a"]
        worker.may_finish.set()
        sending[0].result()
        assert bits_of(receiving[0].result()) == bits_of(buckets(6))


def test_between_two_syncs_no_buffer_is_open_and_no_file_is_left(folders):
    with Cluster([FileSharing(folders[0])], [FileSharing(folders[0])] * 2) as cluster:
        for _ in range(2):
            cluster.sync(cluster.rendezvous(), lambda: buckets(5))
            assert not list(folders[0].iterdir())
            assert not mapped(folders[0])


def test_the_address_of_a_buffer_on_a_gpu_travels_as_text_and_is_taken_back_at_the_end(monkeypatch):
    address = [
        "buffer",
        "torch.uint8",
        [9],
        [1],
        0,
        "GPU-a",
        [b"\x00\xff", 9, 0, b"/t", 3, b"", True],
    ]
    read, released = [], []
    monkeypatch.setattr(shared_memory, "addresses", lambda tensors: [address])
    monkeypatch.setattr(shared_memory, "tensors_at", lambda given: read.extend(given) or [("", 7)])
    monkeypatch.setattr(shared_memory, "release", released.extend)
    sharing = CudaSharing(torch.device("cuda"))
    assert sharing.opened(sharing.handle(torch.zeros(9))) == 7
    assert read == [address]
    sharing.close()
    sharing.close()
    assert released == [address]


# --- failures -------------------------------------------------------------------------------------


def test_a_reader_that_hangs_is_not_waited_for_longer_than_the_timeout(folders):
    worker = HeldSharing(folders[0])
    with Cluster([FileSharing(folders[0])], [worker]) as cluster, ThreadPoolExecutor(2) as threads:
        sending, receiving = cluster.start(
            threads, cluster.rendezvous(timeout=1.0), lambda: buckets(6)
        )
        with pytest.raises(TransportFailed, match="the broadcast failed"):
            sending[0].result()
        worker.may_finish.set()
        with pytest.raises(TransportFailed, match="the broadcast failed"):
            receiving[0].result()


def test_a_sender_that_breaks_frees_its_readers_and_its_buffers_at_once(folders):
    def parts():
        yield from buckets(3)
        raise TrainingError("a rank broke")

    start = time.monotonic()
    with Cluster([FileSharing(folders[0])], [FileSharing(folders[0])]) as cluster:
        rendezvous = cluster.rendezvous(timeout=600.0)
        with ThreadPoolExecutor(2) as threads:
            sending, receiving = cluster.start(threads, rendezvous, parts)
            with pytest.raises(TrainingError, match="a rank broke"):
                sending[0].result()
            with pytest.raises(TransportFailed, match="the broadcast failed"):
                receiving[0].result()
        assert not list(folders[0].iterdir())
        assert not mapped(folders[0])
        (found,) = cluster.sync(cluster.rendezvous("after"), lambda: buckets(3))
        assert bits_of(found) == bits_of(buckets(3))
    assert time.monotonic() - start < 300


def test_a_worker_that_is_lost_before_it_has_tried_a_buffer_is_not_waited_for(folders):
    with Cluster([FileSharing(folders[0])], [FileSharing(folders[0])]) as cluster:
        rendezvous = cluster.rendezvous(timeout=600.0)
        start = time.monotonic()
        with ThreadPoolExecutor(1) as threads:
            sending = threads.submit(cluster.senders[0].send, rendezvous, buckets(3))
            # As far as the worker comes: it has named its place.
            place = FileSharing(folders[0]).place
            PrefixStore(rendezvous.key, cluster.store._store).set("device/1", place)
            time.sleep(0.3)
            assert not sending.done()
            cluster.store.set_lost(rendezvous.key, rank=1)
            with pytest.raises(TransportFailed, match="rank 1 of 2 is lost"):
                sending.result()
        assert time.monotonic() - start < 300


# --- processes ------------------------------------------------------------------------------------


def start_workers(store, folder, *, syncs, die_at):
    """Two workers as processes; the second one may die at a bucket."""
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(
            target=receive_as_process,
            args=(store.port, 3, rank, str(folder), syncs, dies_at),
            daemon=True,
        )
        for rank, dies_at in ((1, None), (2, die_at))
    ]
    for worker in workers:
        worker.start()
    return workers


def processes_rendezvous(store):
    return Rendezvous(host="127.0.0.1", port=store.port, world=3, key="processes", timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("die_at", [None, 4])
def test_processes_read_the_buffers_of_another_one_until_one_of_them_is_killed(folders, die_at):
    with Cluster([FileSharing(folders[0])], []) as cluster:
        (sender,), store = cluster.senders, cluster.store
        workers = start_workers(store, folders[0], syncs=2, die_at=die_at)
        if die_at is None:
            for sync in range(2):
                sender.send(processes_rendezvous(store), buckets(9, seed=sync))
        else:
            with pytest.raises(TransportFailed, match="the broadcast failed"):
                sender.send(processes_rendezvous(store), buckets(9))
        for worker in workers:
            worker.join(60)
        codes = [worker.exitcode for worker in workers]
        assert codes == ([0, 0] if die_at is None else [1, -9])
        assert not mapped(folders[0])
