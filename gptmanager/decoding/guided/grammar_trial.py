"""`GrammarTrials`: compiles a grammar in a child process before the manager compiles it.

The child process can be killed, so a grammar that takes too much time or memory, or that crashes
the parser, cannot harm the manager. This module does not interpret grammars, and knows nothing of
requests.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import orjson

from gptmanager.decoding.guided.grammar_matcher import GrammarSource
from gptmanager.lifecycle.child_process import ChildProcess
from gptmanager.lifecycle.clock import monotonic

MAX_BYTES = 1 << 30  # bytes of memory for one grammar
_IDLE_S = 10.0  # seconds after which an idle process may be ended


class GrammarTrials:
    """A pool of child processes that compile grammars.

    Concurrent calls of `run` use different processes. `tokenizer` is a tokenizer as JSON text. A
    grammar may take `timeout_s` seconds and, on Linux, `max_bytes` bytes of memory. When a trial
    ends, processes that have been idle for more than ten seconds are stopped. Surplus processes of
    a burst are thus stopped when later trials end.
    """

    def __init__(
        self, tokenizer: str, end_ids: Sequence[int], timeout_s: float, max_bytes: int = MAX_BYTES
    ) -> None:
        self._given = {"tokenizer": tokenizer, "end_ids": list(end_ids)}
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # (time when the process became idle, process), the longest idle process first
        self._idle: deque[tuple[float, ChildProcess]] = deque()

    def run(
        self, source: GrammarSource, is_wanted: Callable[[], bool] = lambda: True
    ) -> tuple[str, list[str]]:
        """Compile a grammar in a child process; return what `grammar_matcher.read_source` returns.

        Raise RefusedError if the grammar is invalid, NoAnswerError if it exceeds time or memory or
        if `is_wanted` returns False, and NotStartedError if no process can be started.
        """
        with self._lock:
            child = self._idle.pop()[1] if self._idle else None
        if child is None:
            child = ChildProcess(GrammarSource.__module__, self._given, self._max_bytes)
        try:
            text, unenforced = child.ask(orjson.dumps(list(source)), self._timeout_s, is_wanted)
        finally:
            for idle in self._give_back(child):
                idle.stop()
        return text, unenforced

    def _give_back(self, child: ChildProcess) -> list[ChildProcess]:
        """Put `child` back in the pool; remove and return processes that are idle for too long."""
        now = monotonic()
        with self._lock:
            self._idle.append((now, child))
            surplus = []
            while self._idle[0][0] < now - _IDLE_S:
                surplus.append(self._idle.popleft()[1])
        return surplus
