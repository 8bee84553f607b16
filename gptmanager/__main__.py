"""`python -m gptmanager`."""

import sys

from gptmanager.cli import main

sys.exit(main())
