"""The signal handler of a server before it starts to serve, and after it has stopped.

No request depends on the process at these times, so the handler exits at once. It does not raise an
exception, because some imports would swallow it. A handler is needed because the first process of a
container ignores SIGTERM without one. This module imports little, because the handler is set before
anything else is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any


def leave_at_once(number: int, _: Any) -> None:
    """Exit with status 130 for SIGINT, and with 0 for other signals."""
    text = b"interrupted" if number == signal.SIGINT else b"terminated"
    with contextlib.suppress(OSError):
        os.write(2, b"gptmanager: %b\n" % text)
    os._exit(130 if number == signal.SIGINT else 0)


def leaving_signals() -> list[signal.Signals]:
    """Return the signals that end a server: without SIGHUP if it is ignored, as under nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *(() if is_ignored else (signal.SIGHUP,))]
