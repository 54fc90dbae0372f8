"""SortedRL: reinforcement learning of language models, made fast by scheduling rollouts by length.

      tasks        what the rows are, and the reward that belongs to them
    1 data         data set -> Prompt
    2 buffer       Prompt -> waiting, running, ready
    3 controller   buffer -> decisions: start which? stop now? train on which?
    4 engines      decisions -> tokens
    5 rewards      tokens -> reward
    6 controller   rewarded answers -> TrainBatch, sorted by length
    7 training     TrainBatch -> new weights
    8 engines      weights with a version -> the next tokens
      loop         1 to 8 in order, on one page
      runs         the loop with evaluations, checkpoints and logs around it
      report       its events -> pages, pictures, traces; `live` and `watching` while it goes on
      diagnosis    its events -> what to change, with the gain that the simulator predicts

`sortedrl.runs.start` has a whole run in one call; the names below are those of the loop.
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
