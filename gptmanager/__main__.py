"""The program `gptmanager`, also as `python -m gptmanager`."""

import atexit
import signal
import sys
from typing import Any

from gptmanager.environment.lazy_names import named
from gptmanager.terminal.signals import ending_signals, leave, leave_server


def main() -> int:
    """Run the command line and return its exit status.

    Signals are handled before the modules of the command are imported, and ignored while Python
    exits: they would show a traceback, or replace the exit status.
    """
    atexit.register(_handle, signal.SIG_IGN)
    _handle(leave_server if sys.argv[1:2] == ["serve"] else leave)
    status: int = named("gptmanager.cli:main")()
    return status


def _handle(handler: Any) -> None:
    for number in ending_signals():
        signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
