"""How much of the tests to run: `FUZZ` and `ALL_CASES`."""

import os

FUZZ = int(os.environ.get("GPTMANAGER_FUZZ", "1"))
"""How many times as many random runs as usual: `make marathon` sets it."""

ALL_CASES = FUZZ > 1 or "GPTMANAGER_ALL_CASES" in os.environ
"""Whether to run all cases of tests that are marked `every(k)`: `make mutants` sets it."""

STRIDE = 1 if ALL_CASES else 3
"""From one moment of a call to the next one at which a test interrupts it, or forks."""
