"""`python -m pagewise.cuda.simt`: the checker from a shell."""

import sys

from pagewise.cuda.simt.command_line import main

sys.exit(main())
