"""Simulated runs: lengths, costs, presets, engines on a virtual clock, constants fitted to runs.

Controller, buffer and loop are those of a real run; engine, trainer and clock are simulated.
"""
