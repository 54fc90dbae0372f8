"""Several engines of any kind as one.

member     what an engine must offer to be in a pool, and the work it is handed
thread     drives one member, and reports what it did
seat       what one member was handed, and the count of its tokens
placement  which member takes a trajectory
crew       all seats: reports, deaths, and what came back
engine     submit, step, interrupt, load_weights
"""

from sortedrl.engines.pool.members import Member
from sortedrl.engines.pool.pool import EnginePool

__all__ = ["EnginePool", "Member"]
