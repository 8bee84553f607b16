"""Makes some lines of the tests and of the library late, so that another thread goes first.

make marathon-delays SEED=1

A plugin of pytest. `SEED` chooses for each test which lines are late: of a test, one in ten while
other threads run, by longer than most things that go on meanwhile; of the library and of Python's
threads and queues, one in fifty, on any thread. A test that fails depends on which thread goes
first, or the library has a race. The same seed makes the same lines late.
"""

from __future__ import annotations

import re
import sys
import threading
import time
import zlib
from os import environ
from types import FrameType
from typing import Any, NamedTuple

import pytest

SEED = environ.get("SEED", "1")


class Kind(NamedTuple):
    """Lines of files, which of them are late, and for how long."""

    files: re.Pattern[str]
    share: float
    seconds: float


KINDS = (
    Kind(re.compile(r"/tests/"), 0.1, 0.7),
    Kind(re.compile(r"/gptmanager/(kernels|models|decoding|kv_cache|scheduler|executor)/"), 0, 0),
    Kind(re.compile(r"/(gptmanager|callbacks)/(?!.*site-packages)"), 0.02, 0.2),
    Kind(re.compile(r"/python3[^/]*/(threading|queue|socket|subprocess)\.py$"), 0.02, 0.2),
)


class Delays:
    """The late lines of one test."""

    def __init__(self, test: str) -> None:
        self._test = test
        self._num_threads = threading.active_count()
        self._kinds: dict[str, Kind | None] = {}
        self._done: set[tuple[str, int]] = set()  # a line is late once: it may be in a loop

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Trace a call: `sys.settrace` calls this."""
        name = frame.f_code.co_filename
        if name not in self._kinds:
            found = next((kind for kind in KINDS if kind.files.search(name)), None)
            self._kinds[name] = found if found is not None and found.share else None
        return None if self._kinds[name] is None else self._trace_lines

    def _trace_lines(self, frame: FrameType, event: str, argument: Any) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and place not in self._done:
            kind = self._kinds[place[0]]
            drawn = zlib.crc32(repr((SEED, self._test, place[0][-60:], place[1])).encode()) / 2**32
            if kind is None or drawn >= kind.share:
                self._done.add(place)
            elif threading.active_count() > self._num_threads:
                self._done.add(place)
                time.sleep(kind.seconds)
        return self._trace_lines


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Delay lines in the test and its fixtures."""
    delays = Delays(item.nodeid)
    sys.settrace(delays.trace)
    threading.settrace(delays.trace)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
