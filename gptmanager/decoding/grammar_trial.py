"""`GrammarTrial`: a grammar is compiled in a process of its own first, which may be ended.

What takes too long, too much memory, or the parser with it, does so there and not in the manager.
Knows nothing of requests, nor of what is right about a grammar.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from gptmanager.decoding import grammar_matcher

logger = logging.getLogger("gptmanager")

MAX_BYTES = 1 << 30  # that a grammar may take


class GrammarTrial:
    """For one thread. `tokenizer`: its text. The process starts with the first grammar.

    A grammar may take `timeout_s` seconds and `max_bytes` of memory (where there is Linux).
    """

    def __init__(
        self,
        tokenizer: str,
        end_ids: Sequence[int],
        timeout_s: float,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._given = {"tokenizer": tokenizer, "end_ids": list(end_ids), "max_bytes": max_bytes}
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[str] | None = None
        self._end: weakref.finalize[..., GrammarTrial] | None = None

    def run(self, kind: str, text: str) -> None:
        """Raises ValueError for a grammar that does not compile, in time and memory."""
        process = self._running()
        if process is None:
            return
        is_late = threading.Event()
        timer = threading.Timer(self._timeout_s, _end_late, (process, is_late))
        timer.start()
        answer = _ask(process, json.dumps([kind, text]))
        timer.cancel()
        if is_late.is_set() or not answer:
            self._stop()
        if not answer:
            limit = f"{self._given['max_bytes']} bytes"
            if is_late.is_set():
                limit = f"{self._timeout_s:g} s (compile_timeout_s)"
            raise ValueError(f"it takes more than {limit} to compile")
        fault = json.loads(answer)
        if fault:
            raise ValueError(fault)

    def _running(self) -> subprocess.Popen[str] | None:
        if self._process is not None and self._process.poll() is not None:
            self._stop()
        return self._process or self._start()

    def _start(self) -> subprocess.Popen[str] | None:
        """None where no process can be started: then grammars go untried."""
        command = [sys.executable or "python", "-I", "-S", str(Path(grammar_matcher.__file__))]
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
            )
        except OSError as error:
            logger.warning("grammars are compiled without a trial: %s: %s", command, error)
            return None
        self._process = process
        self._end = weakref.finalize(self, _end, process)
        if not _ask(process, json.dumps({"path": sys.path, **self._given})):
            logger.warning("grammars are compiled without a trial: %s ends at once", command)
            self._stop()
            return None
        return process

    def _stop(self) -> None:
        self._process = None
        if self._end is not None:
            self._end()


def _end_late(process: subprocess.Popen[str], is_late: threading.Event) -> None:
    is_late.set()
    process.kill()


def _ask(process: subprocess.Popen[str], line: str) -> str:
    """The answer, empty if the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    except OSError:  # it has ended, and its answer tells
        pass
    return process.stdout.readline()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except OSError:
            pass
