"""`FUZZ`: how many times as many random runs as usual; `make marathon` sets it."""

import os

FUZZ = int(os.environ.get("GPTMANAGER_FUZZ", "1"))
