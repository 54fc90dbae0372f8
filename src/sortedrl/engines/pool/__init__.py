"""Several engines of any kind as one.

members    what an engine must offer to be in a pool; the thread that drives it, its share of work
pool       the engine over all of them: placement, reports, lost members
"""

from sortedrl.engines.pool.members import Member
from sortedrl.engines.pool.pool import EnginePool

__all__ = ["EnginePool", "Member"]
