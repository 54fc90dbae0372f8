"""Runs evaluations: scored answers, estimates with intervals, comparisons."""
