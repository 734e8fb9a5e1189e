"""`python -m linvit_cli`, the same as the command `linvit`."""

import sys

from linvit_cli import main

sys.exit(main())
