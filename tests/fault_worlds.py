"""Whole runs on Ray, the processes they consist of, and the law that all of them obey.

A run is `python -m sortedrl train`; only processes that descend from it, or from the Ray nodes that
a test has started, are ever killed.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from forked import Forked, command
from sortedrl.core.events import Update, read_events
from sortedrl.core.files import read_metrics
from sortedrl.core.meter import measure
from sortedrl.models.loading import load_model

ROWS = 48
PATIENCE_SECONDS = 600
"""A deadline for a busy machine; a test that passes never waits for it."""
OWN_RAY = "dashboard = false\nobject_store_gib = 0.1\n"
_CONFIG = """\
model = "begun"
task = "knights_knaves:people=2-3,count={rows},style=compact"
reward = "judge.py:{reward}"
threads = 1
device = "cpu"
out = "{out}"

[schedule]
mode = "partial"
group_prompts = 16
update_batch = 8

[engine]
slots = 8
max_tokens = 64

[optimiser]
learning_rate = 1e-2

[saving]
every = 2

[rewards]
workers = 1

[cluster]
rollout_workers = {workers}
worker_timeout_seconds = 20
{cluster}
"""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    # Ray's own patience, which is a minute and more.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "2",
}


@dataclass(frozen=True)
class Process:
    """A process; its number alone may be another one's later."""

    pid: int
    begun: str
    words: str

    @property
    def lives(self):
        """Whether it is there, and no zombie."""
        found = _read(self.pid)
        return found is not None and found[1] == self.begun

    def signal(self, number):
        """Send a signal to it and to nobody else."""
        assert self.lives, self
        os.kill(self.pid, number)


def _read(pid):
    """Parent, beginning and words of a process that lives."""
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        if stat[0] not in "ZX":
            return int(stat[1]), stat[19], words.strip()
    return None


def descendants(*pids):
    """All processes that these have started, and what those have started, and so on."""
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    found = {pid: row for pid in numbers if (row := _read(pid)) is not None}
    family = set(pids)
    while more := {pid for pid, row in found.items() if row[0] in family} - family:
        family |= more
    return [Process(pid, *found[pid][1:]) for pid in sorted(family - set(pids))]


class Family:
    """A process that was started here, and all that descend from it."""

    process: subprocess.Popen

    def family(self, words=""):
        """The processes that descend from it and are called so."""
        return [p for p in descendants(self.process.pid) if words in p.words]

    def end(self):
        """Kill what is left of them."""
        left = self.family()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in left:
            with suppress(ProcessLookupError):
                if process.lives:
                    process.signal(signal.SIGKILL)


class Run(Family):
    """A training run in a process of its own."""

    def __init__(self, folder, name, *, workers=2, cluster=OWN_RAY, reward="letters", within=()):
        """`within`: words before the command, such as those that enter a namespace."""
        self.folder, self.out = folder, folder / name
        self._log = folder / f"{name}.err"
        self._within = within
        text = _CONFIG.format(rows=ROWS, reward=reward, out=name, workers=workers, cluster=cluster)
        (folder / f"{name}.toml").write_text(text)
        self._begin(f"{name}.toml")

    def _begin(self, *words):
        self._log.touch()
        if not self._within:
            self.process = Forked(
                command,
                "train",
                *words,
                folder=self.folder,
                out=os.devnull,
                err=self._log,
                environment=ENVIRONMENT,
            )
            return
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                [*self._within, sys.executable, "-m", "sortedrl", "train", *words],
                cwd=self.folder,
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def resume(self, *words):
        """Go on with it by hand."""
        self._begin(self.out.name, "--resume", *words)

    @property
    def err(self):
        """What it has said to the person who waits."""
        return self._log.read_text()

    def says(self, words, *, seconds=120):
        """Whether it says this; after a kill another process says how to resume."""
        end = time.monotonic() + seconds
        while words not in self.err and time.monotonic() < end:
            time.sleep(0.05)
        return words in self.err

    @property
    def updates(self):
        """Updates that are written down."""
        with suppress(OSError):
            return (self.out / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    @property
    def last_event(self):
        """The kind of what happened last."""
        with (self.out / "events.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 20_000))
            lines = file.read().rpartition(b"\n")[0].splitlines()
        return json.loads(lines[-1])["event"] if lines else None

    def until(self, happens, *, seconds=PATIENCE_SECONDS, every=0.005):
        """Wait until something happens while it runs."""
        end = time.monotonic() + seconds
        while not happens():
            assert self.process.poll() is None, self.err
            assert time.monotonic() < end, self.err
            time.sleep(every)

    def until_mid(self, *events, updates=2):
        """Wait until the last that happened, after so many updates, is one of these."""
        self.until(lambda: self.updates >= updates, every=0.05)
        self.until(lambda: self.last_event in events)

    def wait(self, *, seconds=PATIENCE_SECONDS):
        """Its exit code."""
        return self.process.wait(seconds)


class Node(Family):
    """A Ray node, which counts as a machine; all its processes descend from one."""

    def __init__(self, *words, log, within=()):
        script = Path(sys.executable).with_name("ray")
        room = ("--num-cpus=1", f"--object-store-memory={100 << 20}", "--disable-usage-stats")
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*within, script, "start", "--block", *room, *words],
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        end = time.monotonic() + PATIENCE_SECONDS
        while "Ray runtime started" not in log.read_text():
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)


def free_port():
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def until_gone(processes, *, seconds=120):
    """Wait until all of them have ended; gives those that have not."""
    end = time.monotonic() + seconds
    while (left := [p for p in processes if p.lives]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def law(out):
    """Everything was trained on once, the books balance, and there is a model."""
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["update"] for row in rows] == list(range(1, len(rows) + 1))
    events = list(read_events(out / "events.jsonl"))
    updates = [event for event in events if isinstance(event, Update)]
    trained = Counter((t.prompt, t.sample) for update in updates for t in update.trained)
    assert trained == Counter((prompt, 0) for prompt in range(ROWS)), "each answer once"
    assert [update.version + 1 for update in updates] == [row["version"] for row in rows]
    metrics = measure(events)
    assert metrics.run.ledger.cached == 0, "the tokens of the run balance"
    assert metrics.run.ledger.trained == rows[-1]["total/trained_tokens"]
    assert sum(group.figures.trajectories for group in metrics.groups) == ROWS
    assert all(group.figures.ledger.cached == 0 for group in metrics.groups), "and of each group"
    assert events[-1].kind == "end"
    model = load_model(out / "model", dtype=torch.float32, device="cpu")
    assert all(parameter.isfinite().all() for parameter in model.parameters())
