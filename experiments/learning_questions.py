"""Table 3c: SmolLM2-135M on small questions, with lengths of its own."""

from __future__ import annotations

from experiments.learning import pieces
from experiments.learning_seeds import section

__all__ = ["pieces", "section"]
