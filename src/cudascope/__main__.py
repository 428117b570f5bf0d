"""`python -m cudascope`: the command line."""

import sys

from cudascope.command.line import main

sys.exit(main())
