"""What is collected: modules that need Triton only where Triton is installed (Linux)."""

from importlib.util import find_spec

collect_ignore = (
    []
    if find_spec("triton")
    else [
        f"src/sortedrl/engines/native/{name}.py"
        for name in ("attention_kernels", "sampling_kernels", "cuda")
    ]
)
