"""SortedRL: reinforcement learning of language models, made fast by scheduling rollouts by length.

    1 tasks, data       data set -> Prompt
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
      report            the events of a run -> page, pictures, trace, live view and advice

`sortedrl.runs.start` has a whole run in one call; the names below are those of the loop. The whole
tree, its layers and where to add what: docs/architecture.md.
"""

from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.core.buffer import Buffer
from sortedrl.core.controller import Controller
from sortedrl.core.loop import Loop
from sortedrl.types import Prompt, Segment, Step, TrainBatch, Trajectory, Weights

__version__ = "0.1.0"

__all__ = [
    "Prompt",
    "Segment",
    "Trajectory",
    "TrainBatch",
    "Step",
    "Weights",
    "Schedule",
    "EngineSettings",
    "Buffer",
    "Controller",
    "Loop",
]
