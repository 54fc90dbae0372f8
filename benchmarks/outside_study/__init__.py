"""The parts of benchmarks/coupled_outside.py."""
