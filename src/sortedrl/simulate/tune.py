"""Find the best settings for given lengths and hardware by simulation.

Candidates differ in update batch, group size, lookahead and mode; all run the same prompts.
The best is the least stale of those within one per cent of the fastest; speed is trained tokens per
second of the whole run, updates and weight syncs included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context

from sortedrl.config.checks import require
from sortedrl.config.schedule import ModeName, Schedule
from sortedrl.errors import ConfigError
from sortedrl.simulate.compare import SimulationResult, simulate
from sortedrl.simulate.settings import Simulation

_NEAR = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The search space and the constraints."""

    modes: tuple[ModeName, ...] = ("on_policy", "partial", "coupled")
    """Modes to try."""
    lookaheads: tuple[int, ...] = (0, 1, 2, 3)
    """Lookaheads to try."""
    group_sizes: tuple[int, ...] = ()
    """Group sizes to try, in prompts; default: half, one, two and four times the current one."""
    update_batches: tuple[int, ...] = ()
    """Update batches to try; default: a quarter, half and all of the current one, so that the
    number of updates never decreases."""
    on_policy_only: bool = False
    """Only settings that never train on stale tokens."""
    max_length_bias: float | None = None
    """Largest allowed distance of the length bias from 1: 0.05 allows 0.95 to 1.05."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The result of a search."""

    current: SimulationResult
    best: SimulationResult
    tried: tuple[SimulationResult, ...]
    allowed: tuple[SimulationResult, ...]
    front: tuple[SimulationResult, ...]
    is_current_allowed: bool
    """Whether the current settings meet the constraints themselves."""

    @property
    def gain(self) -> float:
        """Trained tokens per second of the best over those of the current settings."""
        return _speed(self.best) / _speed(self.current)


def tune(
    simulation: Simulation,
    search: Search,
    *,
    workers: int = 1,
    on_done: Callable[[int, int], None] | None = None,
) -> Tuned:
    """Simulate every candidate and choose.

    `simulation.schedule.max_staleness` is a constraint: partial candidates must meet it.
    `on_done` receives the number of finished runs and of all runs.
    """
    require(workers >= 1, f"workers must be at least 1, got {workers}")
    candidates = list(_candidates(simulation, search))
    if not candidates:
        raise ConfigError(
            "no settings are left to try; allow more modes, group sizes or update batches"
        )
    current, *tried = _simulate_all([simulation, *candidates], workers, on_done)
    allowed = [result for result in tried if _is_allowed(result, simulation, search)]
    if not allowed:
        nearest = min(tried, key=lambda result: abs(result.bias.ratio - 1))
        raise ConfigError(
            f"none of {len(tried)} settings meets the constraints; the smallest length bias was "
            f"{nearest.bias.ratio:.3f} ({nearest.name}); loosen max_length_bias or allow more modes"
        )
    fastest = max(_speed(result) for result in allowed)
    near = [result for result in allowed if _speed(result) >= _NEAR * fastest]
    best = min(near, key=lambda result: (result.metrics.run.mean_staleness, -_speed(result)))
    return Tuned(
        current=current,
        best=best,
        tried=tuple(tried),
        allowed=tuple(allowed),
        front=tuple(pareto_front(allowed)),
        is_current_allowed=simulation.schedule.mode in _modes(search)
        and _is_allowed(current, simulation, search),
    )


def pareto_front(results: Sequence[SimulationResult]) -> Iterator[SimulationResult]:
    """The results that no other beats in both speed and staleness, least stale first."""
    fastest = -math.inf
    for result in sorted(results, key=lambda o: (o.metrics.run.mean_staleness, -_speed(o))):
        if _speed(result) > fastest:
            fastest = _speed(result)
            yield result


def _candidates(simulation: Simulation, search: Search) -> Iterator[Simulation]:
    schedule = simulation.schedule
    present, batch = schedule.group_prompts, schedule.update_batch
    sizes = search.group_sizes or (max(1, present // 2), present, 2 * present, 4 * present)
    batches = search.update_batches or tuple(
        sorted({max(1, batch // 4), max(1, batch // 2), batch})
    )
    for mode, size, update_batch, lookahead in product(
        _modes(search), sizes, batches, search.lookaheads
    ):
        groups = math.ceil(simulation.num_prompts / size)
        if update_batch > size * schedule.samples_per_prompt or lookahead >= groups:
            continue
        yield replace(
            simulation,
            prompts=simulation.num_prompts,
            schedule=Schedule(
                strategy="sorted",
                mode=mode,
                tolerance=schedule.tolerance if mode == "coupled" else None,
                group_prompts=size,
                samples_per_prompt=schedule.samples_per_prompt,
                update_batch=update_batch,
                lookahead=lookahead,
                harvest_unit=schedule.harvest_unit,
                max_restarts=schedule.max_restarts,
                max_staleness=schedule.max_staleness if mode == "partial" else None,
            ),
        )


def _modes(search: Search) -> list[ModeName]:
    return [m for m in search.modes if not (search.on_policy_only and m == "partial")]


def _simulate_all(
    simulations: Sequence[Simulation],
    workers: int,
    on_done: Callable[[int, int], None] | None,
) -> list[SimulationResult]:
    results: dict[int, SimulationResult] = {}
    for place, result in _finished(simulations, workers):
        results[place] = result
        if on_done is not None:
            on_done(len(results), len(simulations))
    return [results[place] for place in range(len(simulations))]


def _finished(
    simulations: Sequence[Simulation], workers: int
) -> Iterator[tuple[int, SimulationResult]]:
    """Results as they come, each with the index of its simulation."""
    if workers == 1:
        yield from ((place, _brief(each)) for place, each in enumerate(simulations))
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        places = {pool.submit(_brief, each): place for place, each in enumerate(simulations)}
        for future in as_completed(places):
            yield places[future], future.result()


def _brief(simulation: Simulation) -> SimulationResult:
    """The result without its long lists, cheap to send between processes."""
    result = simulate(simulation)
    metrics = replace(result.metrics, rounds=(), groups=(), trained_lengths=())
    return replace(result, metrics=metrics)


def _is_allowed(result: SimulationResult, simulation: Simulation, search: Search) -> bool:
    limit = simulation.schedule.max_staleness
    if limit is not None and result.metrics.run.staleness_max > limit:
        return False
    bias = search.max_length_bias
    return bias is None or abs(result.bias.ratio - 1) <= bias


def _speed(result: SimulationResult) -> float:
    return result.metrics.run.trained_per_second
