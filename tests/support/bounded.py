"""`bounded`: little memory and time for a piece of a test."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SPARE_BYTES = 3 << 30  # address space that a hostile checkpoint may take


@contextmanager
def bounded(spare_bytes: int = SPARE_BYTES, seconds: int = 60) -> Iterator[None]:
    """No more memory than `spare_bytes`; what hangs is interrupted."""

    def give_up(*_: object) -> None:
        raise TimeoutError("a hostile checkpoint hangs")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + spare_bytes, hard))
    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
