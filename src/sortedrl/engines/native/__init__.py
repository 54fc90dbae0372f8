"""The native engine: continuous batching in PyTorch that owns its randomness.

engine             submit, step, interrupt, load_weights
request            one trajectory while it is generated
planner            requests -> the rows of the next pass
cache              the blocks of the KV cache, and how many there are
hf_model             the Hugging Face module, used as it is
cpu, cuda          rows -> tokens, on their device
products           matrix products with the same bits in any batch
attention_kernels  Triton: write keys and values, attend to them
sampling, noise    logits and keyed noise -> tokens
sampling_kernels   Triton: the same in one pass over the logits
slot_state         what the GPU knows of each slot
weights            checks new weights and copies them in
"""

try:
    from sortedrl.engines.native.native_engine import NativeEngine
    from sortedrl.engines.sampling import Sampling
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the native engine needs {error.name}; pip install 'sortedrl[native]'", name=error.name
    ) from error

__all__ = ["NativeEngine", "Sampling"]
