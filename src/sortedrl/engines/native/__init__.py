"""The native engine: continuous batching in PyTorch that owns its randomness.

request    one trajectory while it is written
blocks     who holds which block of the cache
planner    requests -> the rows of the next pass
driver     the Hugging Face module, driven as it is
cpu, cuda  rows -> tokens, on their device
sampling   logits and keyed noise -> tokens
engine     submit, step, interrupt, load_weights
"""

try:
    from sortedrl.engines.native.engine import NativeEngine
    from sortedrl.engines.sampling import Sampling
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the native engine needs {error.name}; pip install 'sortedrl[native]'", name=error.name
    ) from error

__all__ = ["NativeEngine", "Sampling"]
