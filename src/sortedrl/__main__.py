"""`python -m sortedrl` is the command `sortedrl`."""

import sys

from sortedrl.cli import main

sys.exit(main())
