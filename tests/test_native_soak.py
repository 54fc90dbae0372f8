"""Very many short answers, interrupted and renewed at random: nothing leaks, nothing is lost.

`SORTEDRL_SOAK=1000000` runs it longer.
"""

import os
from pathlib import Path
from random import Random

import pytest
import torch

from native_worlds import blocks_bytes, fresh, lagging, tiny_model
from sortedrl.engines.native import NativeEngine
from sortedrl.types import Weights

REQUESTS = int(os.environ.get("SORTEDRL_SOAK", "8000"))
TINY = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
SLOTS = 128
BLOCKS = 300
MEMORY = Path("/proc/self/statm")


def resident_bytes():
    return int(MEMORY.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Soak:
    """An engine under random load, and the books about it."""

    def __init__(self, *, lag):
        self.random = Random(7)
        self.model = tiny_model(**TINY)
        self.engine = NativeEngine(
            self.model,
            slots=SLOTS,
            max_tokens=lambda t: 1 + t.seed * 7 % 6,
            stop_tokens=[0],
            block_tokens=1,
            cache_bytes=blocks_bytes(self.model, BLOCKS, block_tokens=1),
        )
        if lag:
            self.engine = lagging(self.engine, lag=lag)
        self.tolerance = None
        self.inside = set()
        self.submitted = self.finished = self.decoded = self.owed = 0

    def submit(self, count):
        random = self.random
        work = [
            fresh(random.choices(range(16), k=random.randint(1, 4)), prompt=number, seed=number)
            for number in range(self.submitted, self.submitted + count)
        ]
        self.submitted += count
        self.inside |= {t.key for t in work}
        self.engine.submit(work, tolerance=self.tolerance)

    def step(self):
        step = self.engine.step()
        assert step.finished or step.decoded_tokens, "an engine with work moves"
        self.decoded += step.decoded_tokens
        self.finished += len(step.finished)
        for trajectory in step.finished:
            self.inside.remove(trajectory.key)
            self.owed += trajectory.decoded_tokens

    def interrupt(self):
        stopped = self.engine.interrupt()
        assert {t.key for t in stopped} == self.inside
        assert len(stopped) == len(self.inside)
        if self.random.random() < 0.5:
            self.change_weights()
        self.random.shuffle(stopped)
        self.tolerance = self.random.choice((None, 0.0, 0.1))
        self.engine.submit(stopped, tolerance=self.tolerance)

    @torch.no_grad()
    def change_weights(self):
        for parameter in self.model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
        tensors = self.model.state_dict() if self.random.random() < 0.5 else None
        self.engine.load_weights(Weights(self.engine.version + 1, tensors))

    def run_until(self, submitted):
        while self.submitted < submitted:
            if len(self.inside) < 2 * SLOTS:
                self.submit(min(SLOTS, submitted - self.submitted))
            self.step()
            if self.random.random() < 0.05:
                self.interrupt()
            if self.random.random() < 0.03:
                self.change_weights()

    def drain(self):
        while self.inside:
            self.step()


@pytest.mark.slow
@pytest.mark.parametrize(("lag", "requests"), [(0, REQUESTS), (1, REQUESTS // 10)])
def test_thousands_of_requests_leave_nothing_behind(lag, requests):
    soak = Soak(lag=lag)
    soak.run_until(requests // 2)
    before = resident_bytes() if MEMORY.exists() else 0
    soak.run_until(requests)
    after = resident_bytes() if MEMORY.exists() else 0
    soak.drain()
    planner = soak.engine._planner
    assert soak.finished == soak.submitted == requests
    assert soak.decoded == soak.owed == soak.engine.stats.decoded_tokens
    assert planner.pool.num_free == planner.pool.num_usable
    assert not planner.has_work
    assert not soak.engine.interrupt()
    assert after - before < 10 << 20
