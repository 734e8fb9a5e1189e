"""`python -m linvit.cli`, where the linvit command is not installed."""

import sys

from linvit.cli import main

sys.exit(main())
