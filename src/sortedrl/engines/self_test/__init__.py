"""The self-test of a rollout engine: with a tiny model it must do what a run relies on.

process   runs it in a process of its own, within a time limit; the only part without torch
__main__  that process: python -m sortedrl.engines.self_test vllm
opening   the engine, as small as it gets
checks    answers, an interruption, new weights: what must hold
"""
