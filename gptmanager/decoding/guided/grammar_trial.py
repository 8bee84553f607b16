"""`GrammarTrials`: compiles a grammar in a child process first, which can be killed.

A grammar that takes too long or too much memory, or crashes the parser, then does not harm the
manager. Knows nothing of requests, nor of grammars.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import orjson

from gptmanager.decoding.guided.grammar_matcher import GrammarSource
from gptmanager.lifecycle.child_process import ChildProcess

MAX_BYTES = 1 << 30  # memory for one grammar


class GrammarTrials:
    """Child processes for trials, one for each concurrent thread. `tokenizer`: its JSON text.

    A grammar may take `timeout_s` seconds and, on Linux, `max_bytes` of memory.
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

        Raises RefusedError for an invalid grammar, NoAnswerError for one that exceeds time or
        memory or is not wanted any more, and NotStartedError if no process can be started.
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
