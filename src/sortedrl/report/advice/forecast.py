"""The numbers by which a run and its remedies are compared, measured or simulated."""

from __future__ import annotations

from dataclasses import dataclass

from sortedrl.compare import simulate
from sortedrl.events import Event, Update
from sortedrl.meter import Meter
from sortedrl.metrics import Figures
from sortedrl.simulate.settings import Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a run was like, or would be like."""

    bubble: float
    goodput: float
    """Trained tokens per second of rollout."""
    trained_per_second: float
    """Trained tokens per second of everything."""
    seconds: float
    """To train as many answers as the run did; of a run, the seconds it took."""
    mean_length: float
    mean_staleness: float
    max_staleness: int
    discarded_share: float
    """Tokens thrown away over tokens written."""
    rollout_share: float
    """Share of the seconds in which answers are written."""
    updates: float
    """For as many answers as the run trained on."""


def forecast(figures: Figures, *, trajectories: int) -> Forecast:
    """These figures, with seconds and updates in proportion to so many answers."""
    scale = trajectories / figures.trajectories if figures.trajectories else 1.0
    ledger = figures.ledger
    return Forecast(
        bubble=figures.bubble,
        goodput=figures.goodput,
        trained_per_second=figures.trained_per_second,
        seconds=figures.seconds * scale,
        mean_length=figures.mean_length,
        mean_staleness=figures.mean_staleness,
        max_staleness=figures.staleness_max,
        discarded_share=ledger.discarded / ledger.decoded if ledger.decoded else 0.0,
        rollout_share=figures.rollout_seconds / figures.seconds if figures.seconds else 0.0,
        updates=figures.updates * scale,
    )


def simulated(
    simulation: Simulation, *, trajectories: int, stop_after: int | None = None
) -> Forecast:
    """What a simulation gives, by default at its end, or once `stop_after` are trained.

    Seconds and updates are in proportion to `trajectories`.
    """
    if stop_after is None:
        return forecast(simulate(simulation).metrics.run, trajectories=trajectories)
    meter = Meter()
    reached: Figures | None = None

    def record(event: Event) -> None:
        nonlocal reached
        if reached is None:
            meter(event)
            if isinstance(event, Update) and meter.run.trajectories >= stop_after:
                reached = meter.run

    simulate(simulation, record=record)
    return forecast(reached or meter.run, trajectories=trajectories)
