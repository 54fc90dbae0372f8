"""The parts of benchmarks/coupling.py."""
