"""transformers without its progress bars: a run has its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)


@contextmanager
def without_bars() -> Iterator[None]:
    """No bars inside the block; as it was, afterwards."""
    had_bars = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            enable_progress_bar()
