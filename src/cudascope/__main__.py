"""`python -m cudascope`: the command line."""

import sys

from cudascope.command_line import main

sys.exit(main())
