"""slime without GPUs: its generate functions against an HTTP server with SGLang's routes.

Real: slime's rollout functions, data source, samples, HTTP client, and its own contract tests.
Stand-ins: the SGLang servers behind the router, and the package `sglang_router`, which only starts
them.
"""

import os
import sys
import types

SOURCE = os.environ.get("SLIME_SOURCE")
"""The folder of slime's repository; the tests are left out without it."""

if SOURCE is not None:
    sys.path.append(SOURCE)
    sys.modules.setdefault("sglang_router", types.ModuleType("sglang_router"))
