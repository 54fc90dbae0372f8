"""The parts of engine.py: settings, workload, model, and a file for each family of peers."""
