"""The laws are asserted in a module that is no test itself; its words are shown all the same."""

import pytest

pytest.register_assert_rewrite("conformance")
