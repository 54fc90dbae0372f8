"""The parts of engine.py: settings, workload, model, and one file per family of peers."""
