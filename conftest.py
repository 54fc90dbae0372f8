"""How hard the laws are tried, and what is collected.

`pytest --hypothesis-profile=hunt` looks for bugs for longer.
On CI the examples are the same every time; elsewhere they are new ones.
Modules that need Triton, Ray, TRL, verl or slime are collected only where these are installed.
`--numprocesses auto` starts three test processes for every two cores: many tests wait for other
processes, the disk or a timer, and the third uses the core meanwhile. Each of them begins with
slow modules of its own, so that no process is left alone with all of Ray's tests at the end.
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

_SLOWEST_FIRST = (
    "test_cluster_faults",
    "test_cluster",
    "test_integration_trl_tools",
    "test_cluster_training",
    "test_weight_sync",
    "test_browser_report",
    "test_reward_pool",
    "test_conversation_runs",
    "test_runs_killed",
    "test_runs_faults",
    "test_sharded_training",
    "test_integration_trl",
)

collect_ignore = [path for name, paths in _NEEDS.items() if not find_spec(name) for path in paths]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """The number of test processes."""
    return (3 * (os.cpu_count() or 1) + 1) // 2


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the slow modules at the beginning of the share of each test process.

    `--dist worksteal` gives every process an equal run of the list and lets idle ones take from the
    end of another's, so what stands first in a share is done by its owner, in order.
    """
    num_processes = getattr(config, "workerinput", {}).get("workercount", 1)
    if num_processes == 1:
        return
    modules = [item.path.stem for item in items]
    lanes: list[list[pytest.Item]] = [[] for _ in range(num_processes)]
    for place, name in enumerate(_SLOWEST_FIRST):
        found = [item for item, module in zip(items, modules, strict=True) if module == name]
        lanes[place % num_processes] += found
    others = [
        item for item, module in zip(items, modules, strict=True) if module not in _SLOWEST_FIRST
    ]
    ordered: list[pytest.Item] = []
    for place, lane in enumerate(lanes):
        share = (len(items) - len(ordered)) // (num_processes - place)
        num_others = max(0, share - len(lane))
        ordered += lane + others[:num_others]
        del others[:num_others]
    items[:] = ordered + others
