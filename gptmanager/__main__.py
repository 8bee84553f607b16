"""The program `gptmanager`, also as `python -m gptmanager`."""

import signal
import sys

from gptmanager.environment.lazy_names import named
from gptmanager.terminal.early_signals import leave_at_once, leaving_signals


def main() -> int:
    """Run the command line and return its exit status.

    A server handles signals before the modules of its command are imported.
    """
    if sys.argv[1:2] == ["serve"]:
        for number in leaving_signals():
            signal.signal(number, leave_at_once)
    status: int = named("gptmanager.cli:main")()
    return status


if __name__ == "__main__":
    sys.exit(main())
