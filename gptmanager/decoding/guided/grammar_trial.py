"""`GrammarTrials`: a grammar is compiled in a process of its own first, which may be ended.

What takes too long, too much memory, or the parser with it, does so there and not in the manager.
Knows nothing of requests, nor of what is right about a grammar.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import orjson

from gptmanager.decoding.guided.grammar_matcher import GrammarSource
from gptmanager.lifecycle.child_process import ChildProcess

MAX_BYTES = 1 << 30  # that a grammar may take


class GrammarTrials:
    """Processes for trials: as many as threads try at once. `tokenizer`: its text.

    A grammar may take `timeout_s` seconds and `max_bytes` of memory (where there is Linux).
    """

    def __init__(
        self,
        tokenizer: str,
        end_ids: Sequence[int],
        timeout_s: float,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._given = {"tokenizer": tokenizer, "end_ids": list(end_ids)}
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._idle: deque[ChildProcess] = deque()

    def run(
        self, source: GrammarSource, is_wanted: Callable[[], bool] = lambda: True
    ) -> tuple[str, list[str]]:
        """Compile a grammar; return what `read_source` returns.

        Raises RefusedError for one that is wrong, NoAnswerError for one that does not compile in
        time and memory or that nobody wants any more, and NotStartedError without a process.
        """
        try:
            child = self._idle.pop()
        except IndexError:
            child = ChildProcess(GrammarSource.__module__, self._given, self._max_bytes)
        try:
            text, unenforced = child.ask(orjson.dumps(list(source)), self._timeout_s, is_wanted)
        finally:
            self._idle.append(child)
        return text, unenforced
