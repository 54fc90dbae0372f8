"""`python -m sortedrl` is the command `sortedrl`."""

import sys

from sortedrl.cli.main import main

sys.exit(main())
