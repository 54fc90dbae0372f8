"""The scheduler: buffer, controller, strategies, modes and the loop, with events and metrics.

Plain Python: no torch, no numpy, no I/O but logs.
"""
