"""A rollout engine on trial: with a tiny model it must do what a run relies on.

process   the trial in a process of its own, within a time limit; the only part without torch
verdict   what comes out of it
__main__  that process: python -m sortedrl.engines.self_test vllm
opening   the engine, as small as it gets
served    the vocabulary of a server whose model we do not have
models    the tiny model, before and after an update
checks    answers, an interruption, new weights: what must hold
rollout   who was asked for what, and what came back
"""
