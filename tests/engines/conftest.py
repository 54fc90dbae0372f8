"""The laws are asserted in a module that is no test itself; its words are shown all the same."""

import pytest

pytest.register_assert_rewrite("conformance")

# Stands in for kernels, and raises whatever is asked of it.
collect_ignore = ["sgl_kernel_stub"]
