"""The self-test of a rollout engine: with a tiny model it must do what a run relies on.

launcher      runs it in a process of its own, with a time limit; the only part without torch
__main__      that process: python -m sortedrl.engines.self_test vllm
tiny_engines  the engine, as small as possible
scenario      answers, an interruption, new weights: what must hold
"""
