"""Rollout engines, one package per engine."""
