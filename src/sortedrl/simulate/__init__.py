"""Simulated runs: lengths, costs, presets, engines on a virtual clock, constants fitted to runs.

The controller, the buffer and the loop are the real ones; only engine, trainer and clock are not.
"""
