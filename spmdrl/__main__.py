"""`python -m spmdrl COMMAND ...`: the same as the console script."""

import sys

from spmdrl.cli import main

sys.exit(main())
