"""The laws are asserted in a module of the package; pytest shows the values of its asserts."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.register_assert_rewrite("sortedrl.engines.conformance")

# Stands in for kernels, and raises on every call.
collect_ignore = ["sgl_kernel_stub"]
SGL_KERNEL_STUB = Path(__file__).parent / "sgl_kernel_stub"


@pytest.fixture(params=("vllm", "sglang"))
def engine(request, monkeypatch):
    """The name of an engine that this Python has."""
    if find_spec(request.param) is None:
        pytest.skip(f"needs {request.param}, in a venv of its own")
    if request.param == "sglang":
        monkeypatch.syspath_prepend(SGL_KERNEL_STUB)
        # Its processes are started anew and look there too.
        inherited = os.environ.get("PYTHONPATH", "")
        monkeypatch.setenv("PYTHONPATH", f"{SGL_KERNEL_STUB}{os.pathsep}{inherited}")
        monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    return request.param
