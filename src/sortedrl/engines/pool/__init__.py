"""Several engines as one.

engine_pool  the engine over all of them: routing, reports, lost engines
replica      one of them: the work assigned to it, and the thread that drives it
"""

from sortedrl.engines.pool.engine_pool import EnginePool

__all__ = ["EnginePool"]
