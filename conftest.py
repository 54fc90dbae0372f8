"""How hard the laws are tried, and what is collected.

`pytest --hypothesis-profile=hunt` looks for bugs for longer.
On CI the examples are the same every time; elsewhere they are new ones.
Modules that need Triton, Ray, TRL, verl or slime are collected only where these are installed.
`--numprocesses auto` starts three test processes for every two cores: many tests wait for other
processes, the disk or a timer, and the third uses the core meanwhile.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_SLOW_IS_FINE = (HealthCheck.too_slow, HealthCheck.data_too_large)

settings.register_profile(
    "modest",
    max_examples=100,
    deadline=None,
    suppress_health_check=_SLOW_IS_FINE,
    derandomize="CI" in os.environ,
)
settings.register_profile(
    "hunt", max_examples=4000, deadline=None, suppress_health_check=_SLOW_IS_FINE
)
settings.load_profile("modest")

_NEEDS = {
    "triton": [
        f"src/sortedrl/engines/native/{name}.py"
        for name in ("attention_kernels", "sampler_kernels", "cuda_runner")
    ],
    "ray": ["src/sortedrl/cluster", "src/sortedrl/runs/build_cluster.py"],
    "trl": ["experiments/peer_trl.py"],
    "verl": ["src/sortedrl/integrations/verl", "tests/verl_run"],
    "slime": ["src/sortedrl/integrations/slime", "tests/slime_run"],
}
assert all((Path(__file__).parent / path).exists() for paths in _NEEDS.values() for path in paths)

collect_ignore = [path for name, paths in _NEEDS.items() if not find_spec(name) for path in paths]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """The number of test processes."""
    return (3 * (os.cpu_count() or 1) + 1) // 2
