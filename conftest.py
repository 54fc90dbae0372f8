"""What is collected: modules that need Triton or Ray only where these are installed."""

from importlib.util import find_spec

_NEEDS = {
    "triton": [
        f"src/sortedrl/engines/native/{name}.py"
        for name in ("attention_kernels", "sampling_kernels", "cuda")
    ],
    "ray": [f"src/sortedrl/cluster/{name}.py" for name in ("check", "fleet", "remote_engine")],
    "trl": ["experiments/peer_trl.py"],
}

collect_ignore = [path for name, paths in _NEEDS.items() if not find_spec(name) for path in paths]
