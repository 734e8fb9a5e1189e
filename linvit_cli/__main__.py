"""`python -m linvit_cli`, where the linvit command is not installed."""

import sys

from linvit_cli import main

sys.exit(main())
