"""The world a simulated run lives in: lengths, costs, presets, and constants fitted to real runs.

The controller, the buffer and the loop are the real ones; only engine, trainer and clock are not.
"""
