"""Words for the person whose run ends without any: its process was killed, or Ray has ended it.

Ray ends every process that uses it when its own processes on this machine are gone, and no code of
ours runs then. So another process, which has the words, waits for this one to end.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Who leaves the block writes something; the end of a process only ends its pipe.
_WATCH = "import sys; sys.stdin.read() or sys.stderr.write(sys.argv[1] + chr(10))"


@contextmanager
def last_words(words: str) -> Iterator[None]:
    """Have these words said on standard error if this process ends within the block."""
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _WATCH, words],
        stdin=subprocess.PIPE,
        # Ctrl-C is meant for the run alone.
        start_new_session=True,
    )
    try:
        yield
    finally:
        watcher.communicate(b"it lives")
