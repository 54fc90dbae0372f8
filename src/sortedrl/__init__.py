"""SortedRL: reinforcement learning of language models, made fast by scheduling rollouts by length.

    1 data              data set -> Prompt
    2 core.buffer       Prompt -> waiting, running, ready
    3 core.controller   buffer -> decisions: start which? stop now? train on which?
    4 engines           decisions -> tokens
    5 rewards           tokens -> reward
    6 core.controller   rewarded answers -> TrainBatch, sorted by length
    7 training          TrainBatch -> new weights
    8 engines           weights with a version -> the next tokens
      core.loop         1 to 8 in order, on one page
      runs              the loop with evaluations, checkpoints and logs around it
      cluster           4 and 7 as Ray actors on other machines
      simulate          4, 5 and 7 on a virtual clock
      report            the events of a run -> page, trace, live view and advice

A whole run is one call, `train`; `Scheduler` is the scheduler alone, for a loop of your own. The
whole tree, its layers and where to add what: docs/explanation/architecture.md. Importing this
package loads neither torch nor numpy: what needs them is imported with its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.config.train import TrainSettings
from sortedrl.core.buffer import Buffer
from sortedrl.core.controller import Controller
from sortedrl.core.loop import Loop
from sortedrl.core.scheduler import Scheduler
from sortedrl.types import Prompt, Segment, Step, TrainBatch, Trajectory, Weights

if TYPE_CHECKING:
    from sortedrl.engines.native import NativeEngine, Sampling
    from sortedrl.runs.api import Evaluated, Run, evaluate, train
    from sortedrl.simulate.calls import compare, simulate
    from sortedrl.simulate.observed import measure

__version__ = "0.2.0"

__all__ = [
    "train",
    "evaluate",
    "simulate",
    "compare",
    "measure",
    "Run",
    "Evaluated",
    "NativeEngine",
    "Sampling",
    "TrainSettings",
    "Schedule",
    "EngineSettings",
    "Scheduler",
    "Prompt",
    "Segment",
    "Trajectory",
    "TrainBatch",
    "Step",
    "Weights",
    "Buffer",
    "Controller",
    "Loop",
]

_LATER = {
    "train": "sortedrl.runs.api",
    "evaluate": "sortedrl.runs.api",
    "Run": "sortedrl.runs.api",
    "Evaluated": "sortedrl.runs.api",
    "NativeEngine": "sortedrl.engines.native",
    "Sampling": "sortedrl.engines.native",
    "compare": "sortedrl.simulate.calls",
    "measure": "sortedrl.simulate.observed",
}
"""Where the names are that are imported with their first use."""


def __getattr__(name: str) -> object:
    """A name that is imported with its first use."""
    if name == "simulate":  # a package that can be called
        return import_module("sortedrl.simulate")
    if name not in _LATER:
        raise AttributeError(f"module 'sortedrl' has no attribute {name!r}")
    value: object = vars(import_module(_LATER[name]))[name]
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, for completion."""
    return sorted({*globals(), *__all__})
