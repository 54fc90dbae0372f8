"""Trains on update batches; gradients exist in this package only."""
