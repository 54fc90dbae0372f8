"""Finds problems in the numbers of a run, and predicts the gain of changes on the same machine."""
