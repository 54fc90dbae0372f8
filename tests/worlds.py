"""Small random worlds for the laws: schedules, simulations, and an engine without any order.

Hypothesis draws the first of several values most often, so the first is one with much to see
(full slots, interruptions, several updates) and the degenerate ones come last.
"""

from collections import Counter
from dataclasses import dataclass, replace
from random import Random

from hypothesis import strategies as st

from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.core.events import Event
from sortedrl.core.loop import Loop
from sortedrl.simulate.compare import simulated_lengths, simulated_loop
from sortedrl.simulate.costs import CostSettings
from sortedrl.simulate.lengths import LengthSettings
from sortedrl.simulate.settings import Simulation
from sortedrl.types import Prompt, Segment, Step, TrainBatch, Trajectory, Weights

STRATEGIES = ("sorted", "april", "tail_batching", "ungrouped", "posthoc", "minibatch", "sync")
MODES = ("on_policy", "partial", "coupled", "redraw")


@st.composite
def schedules(draw, strategies=STRATEGIES, modes=MODES):
    interrupting = [name for name in strategies if name not in ("sync", "minibatch", "posthoc")]
    strategy = draw(st.sampled_from([*interrupting, *strategies]))
    mode = draw(st.sampled_from(modes))
    samples_per_prompt = draw(st.sampled_from((2, 1, 3)))
    group_prompts = draw(st.sampled_from((5, 4, 3, 6, 8, 2, 1)))
    trajectories = group_prompts * samples_per_prompt
    batches = [size for size in (2, 3, 4, 1, trajectories // 2) if 1 <= size <= trajectories]
    update_batch = draw(st.sampled_from([*batches, trajectories]))
    harvest_unit = draw(st.sampled_from(("trajectory", "prompt")))
    is_whole = strategy == "sync" or harvest_unit == "prompt"
    can_be_exact = (
        trajectories % update_batch == 0
        and update_batch % (samples_per_prompt if is_whole else 1) == 0
    )
    youngest = trajectories // update_batch - 1 if strategy in ("minibatch", "posthoc") else 0
    return Schedule(
        strategy=strategy,
        mode=mode,
        group_prompts=group_prompts,
        samples_per_prompt=samples_per_prompt,
        update_batch=update_batch,
        harvest_unit=harvest_unit,
        exact=can_be_exact and draw(st.booleans()),
        lookahead=draw(st.sampled_from((1, 0, 2, 3))) if strategy == "sorted" else 0,
        max_restarts=draw(st.none() | st.integers(1, 3)),
        max_staleness=(
            draw(st.none() | st.integers(youngest, youngest + 4)) if mode == "partial" else None
        ),
        tolerance=(draw(st.sampled_from((None, 0.1, float("inf")))) if mode == "coupled" else None),
        over_launch=draw(st.sampled_from((1.0, 1.25, 1.5, 2.0, 3.0))),
    )


@st.composite
def length_settings(draw, is_frozen=False):
    """Short answers; frozen ones do not change with the weights."""
    common = {
        "prompt_tokens": draw(st.integers(0, 5)),
        "prompt_share": draw(st.sampled_from((0.0, 0.3, 0.6, 1.0))),
        "drift": 0.0 if is_frozen else draw(st.sampled_from((0.0, 0.2, -0.2))),
        "mismatch_rate": 0.0 if is_frozen else draw(st.sampled_from((0.1, 0.02, 0.5, 0.0))),
        "after_mismatch": draw(st.sampled_from(("same", "fresh"))),
    }
    if draw(st.booleans()):
        values = draw(st.lists(st.sampled_from((5, 2, 8, 40, 3, 20, 1)), min_size=4, max_size=12))
        return LengthSettings(values=tuple(values), replay=draw(st.booleans()), **common)
    median, sigma = draw(st.sampled_from((10, 20, 2))), draw(st.sampled_from((1.0, 1.5, 0.7, 0.0)))
    return LengthSettings(median=median, sigma=sigma, **common)


@st.composite
def simulations(draw, schedule=None, is_frozen=False):
    return Simulation(
        groups=draw(st.sampled_from((3, 2, 4, 5, 1))),
        prompts=draw(st.sampled_from((None, 23, 31, 40, 7, 1))),
        seed=draw(st.integers(0, 2**32)),
        schedule=draw(schedules() if schedule is None else schedule),
        engine=EngineSettings(
            slots=draw(st.sampled_from((4, 3, 2, 6, 8, 10, 1))),
            max_tokens=draw(st.sampled_from((60, 30, 40, 50, 15, 1))),
        ),
        lengths=draw(length_settings(is_frozen=is_frozen)),
        costs=CostSettings(hardware=draw(st.sampled_from(("ticks", "h100x8-llama-3.1-8b")))),
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that came to its end."""

    loop: Loop
    events: list[Event]
    batches: list[TrainBatch]

    def of_kind(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]

    def answers(self) -> dict:
        return {t.key: t.tokens for batch in self.batches for t in batch.trajectories}


def make_loop(simulation: Simulation) -> tuple[Loop, list[Event]]:
    events: list[Event] = []
    lengths = simulated_lengths(simulation)
    return simulated_loop(simulation, lengths=lengths, record=events.append), events


def run(simulation: Simulation) -> Run:
    loop, events = make_loop(simulation)
    return Run(loop=loop, events=events, batches=list(loop.run()))


def rescheduled(simulation: Simulation, **changes: object) -> Simulation:
    return replace(simulation, schedule=replace(simulation.schedule, **changes))


def written(trajectory: Trajectory, tokens: int, *, version: int) -> Trajectory:
    """The trajectory with that many more tokens, written under a version."""
    if not tokens:
        return trajectory
    start = trajectory.num_tokens
    segment = Segment(range(start, start + tokens), [0.0] * tokens, version)
    return replace(
        trajectory,
        segments=(*trajectory.segments, segment),
        decoded_tokens=trajectory.decoded_tokens + tokens,
    )


def verified(trajectory: Trajectory, kept: int, *, version: int) -> Trajectory:
    """The trajectory cut to its first `kept` tokens, all stamped with a version."""
    segments = (Segment(range(kept), [0.0] * kept, version),) if kept else ()
    return replace(trajectory, segments=segments)


class RandomEngine:
    """Finishes what runs in random order; verified work keeps a random prefix."""

    def __init__(self, *, slots: int, random: Random) -> None:
        self.slots = slots
        self.version = 0
        self._random = random
        self._running: dict[tuple[int, int], Trajectory] = {}

    def submit(self, trajectories, *, tolerance) -> None:
        for trajectory in trajectories:
            assert trajectory.key not in self._running
            if tolerance is not None:
                kept = self._random.randint(0, trajectory.num_tokens)
                trajectory = verified(trajectory, kept, version=self.version)
            self._running[trajectory.key] = trajectory
        assert len(self._running) <= self.slots

    def step(self) -> Step:
        before = sum(t.decoded_tokens for t in self._running.values())
        for key, trajectory in self._running.items():
            tokens = self._random.randint(0, 3)
            self._running[key] = written(trajectory, tokens, version=self.version)
        chosen = self._random.choice(sorted(self._running))
        if not self._running[chosen].num_tokens:
            self._running[chosen] = written(self._running[chosen], 1, version=self.version)
        after = sum(t.decoded_tokens for t in self._running.values())
        finished = replace(self._running.pop(chosen), finish_reason="stop")
        return Step(finished=(finished,), decoded_tokens=after - before, prefilled_tokens=0)

    def interrupt(self):
        stopped = list(self._running.values())
        self._random.shuffle(stopped)
        self._running.clear()
        return stopped

    def load_weights(self, weights: Weights) -> None:
        assert not self._running
        self.version = weights.version


class CountingScorer:
    """Rewards an answer with its length, and checks that it is asked about each answer once."""

    def __init__(self) -> None:
        self.pending: dict[tuple[int, int], Trajectory] = {}
        self.collected: Counter = Counter()

    def submit(self, trajectory: Trajectory) -> None:
        assert trajectory.key not in self.pending
        self.pending[trajectory.key] = trajectory

    def cancel(self, trajectory: Trajectory) -> None:
        assert self.pending.pop(trajectory.key) == trajectory

    def collect(self, trajectories):
        for trajectory in trajectories:
            assert self.pending.pop(trajectory.key) == trajectory
            self.collected[trajectory.key] += 1
        return [replace(t, reward=float(t.num_tokens)) for t in trajectories]


def fresh(prompt: int, sample: int = 0, *, group: int = 0) -> Trajectory:
    return Trajectory(prompt=Prompt(id=prompt), sample_index=sample, group=group, seed=0)


def done(trajectory: Trajectory, tokens: int = 1, *, version: int = 0) -> Trajectory:
    return replace(written(trajectory, tokens, version=version), finish_reason="stop")
