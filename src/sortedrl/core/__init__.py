"""The scheduler: buffer, controller, strategies, modes and loop, with events and metrics.

Plain Python: no torch, no numpy, and no I/O except logs.
"""
