"""Whole runs: the loop with its evaluations, checkpoints, logs and the ways it ends."""
