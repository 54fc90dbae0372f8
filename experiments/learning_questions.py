"""Table 3c: SmolLM2-135M on small questions, with lengths of its own."""

from __future__ import annotations

from experiments.learning import pieces

__all__ = ["pieces"]
