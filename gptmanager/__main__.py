"""The program `gptmanager`, also as `python -m gptmanager`."""

import atexit
import signal
import sys
from typing import Any

from gptmanager.environment.lazy_names import named
from gptmanager.terminal.signals import end_by, ending_signals, leave, leave_server


def main() -> int:
    """Run the command line and return its exit status.

    Signals are handled before the modules of the command are imported, and ignored while Python
    exits: they would show a traceback, or replace the exit status. If a signal has ended the
    command, the process ends by this signal when Python exits, after the `atexit` functions of
    everything that the command has imported.
    """
    ended_by: list[int] = []
    atexit.register(_end, ended_by)
    _handle(leave_server if sys.argv[1:2] == ["serve"] else leave)
    status: int = named("gptmanager.cli:main")()
    if status - 128 in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        ended_by.append(status - 128)
    return status


def _end(ended_by: list[int]) -> None:
    _handle(signal.SIG_IGN)
    for number in ended_by:
        end_by(number)


def _handle(handler: Any) -> None:
    for number in ending_signals():
        signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
