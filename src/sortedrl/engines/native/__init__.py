"""The native engine: continuous batching in PyTorch with its own random numbers.

native_engine      submit, step, interrupt, load_weights, score
native_request     one trajectory while it is generated
planner            requests -> the rows of the next pass
kv_cache           the blocks of the KV cache, and its size
hf_model           the Hugging Face module, unmodified
cpu_runner         rows -> tokens, on the CPU
cuda_runner        rows -> tokens, on a GPU
matmul             batch-invariant matrix products
attention_kernels  Triton: write keys and values, attend to them
sampler            logits and keyed noise -> tokens
sampler_kernels    Triton: the same in one pass over the logits
"""

try:
    from sortedrl.engines.native.native_engine import NativeEngine
    from sortedrl.engines.sampling import Sampling
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the native engine needs {error.name}; pip install 'sortedrl[native]'", name=error.name
    ) from error

__all__ = ["NativeEngine", "Sampling"]
