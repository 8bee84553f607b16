"""Writes the log of a server to a stream, as text or as JSON, without waiting for a reader."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
from collections.abc import Iterator
from datetime import datetime, timezone
from logging.handlers import QueueHandler, QueueListener
from typing import Any

_LAST_LINES_S = 1.0
MAX_WAITING_LINES = 10_000  # further lines are dropped while the reader is stuck


class _Formatter(logging.Formatter):
    def __init__(self, *, is_json: bool) -> None:
        super().__init__()
        self._is_json = is_json

    def format(self, record: logging.LogRecord) -> str:
        now = datetime.fromtimestamp(record.created, timezone.utc)
        time = now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        message = super().format(record)
        if not self._is_json:
            return f"{time} {record.levelname.lower()} {message}"
        fields: dict[str, Any] = getattr(record, "fields", None) or {"message": message}
        line = {"time": time, "level": record.levelname.lower(), **fields}
        return json.dumps(line, default=str)


class _Queued(QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)


class _Writer(QueueListener):
    """Writes in a thread. If the stream's reader is stuck, `stop` gives up after two seconds."""

    def __init__(self, waiting: queue.Queue[Any], handler: logging.Handler) -> None:
        super().__init__(waiting, handler)
        self._waiting = waiting

    def stop(self) -> None:
        thread = self._thread
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=_LAST_LINES_S)
        if thread is not None:
            thread.join(_LAST_LINES_S)


@contextlib.contextmanager
def logging_to(stream: Any, log_format: str) -> Iterator[None]:
    """Write the library's log to `stream` during the block. A thread writes a line per record."""
    logger = logging.getLogger("gptmanager")
    waiting: queue.Queue[Any] = queue.Queue(MAX_WAITING_LINES)
    # The manager's message about a refused request is omitted: the request's own log line has it.
    handler, writer = _Queued(waiting), logging.StreamHandler(stream)
    writer.setFormatter(_Formatter(is_json=log_format == "json"))
    handler.addFilter(lambda it: not str(it.msg).startswith("Cannot process new request"))
    listener = _Writer(waiting, writer)
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    listener.start()
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates
        listener.stop()
