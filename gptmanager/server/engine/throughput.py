"""Logs the throughput and the load of a busy server, one line every ten seconds."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from gptmanager.server.engine.engine import Engine
from gptmanager.server.http.request_log import as_text

_EVERY_S = 10.0
_logger = logging.getLogger("gptmanager.throughput")


class Throughput:
    """Computes a log line from the changes of an engine's counters between calls of `fields`."""

    def __init__(self, engine: Engine, now: float) -> None:
        self._engine = engine
        self._last = self._counts()
        self._then = now

    def fields(self, now: float) -> dict[str, Any] | None:
        """Return the fields of a log line, or None if the server is idle.

        Rates and the hit rate of the prefix cache are averages since the last call. The server is
        idle if no tokens were computed since the last call, and no request runs or waits.
        """
        metrics, counts = self._engine.metrics, self._counts()
        prompt, generated, queries, hits = (
            after - before for before, after in zip(self._last, counts, strict=True)
        )
        elapsed = max(now - self._then, 1e-9)
        self._last, self._then = counts, now
        running, waiting = self._engine.counts
        if not (prompt or generated or running or waiting):
            return None
        record = metrics.record() or {}
        blocks = record.get("Max KV cache blocks") or 1
        return {
            "prompt_tokens_per_s": round(prompt / elapsed, 1),
            "generated_tokens_per_s": round(generated / elapsed, 1),
            "running": running,
            "waiting": waiting,
            "kv_cache_usage": round(record.get("Used KV cache blocks", 0) / blocks, 3),
            "prefix_cache_hits": round(hits / queries, 3) if queries else 0.0,
        }

    def _counts(self) -> tuple[int, int, int, int]:
        requests = self._engine.metrics.requests
        computed = self._engine.metrics.iterations.context_tokens
        return computed, requests.generation_tokens, requests.cache_queries, requests.cache_hits


async def log_throughput(engine: Engine) -> None:
    """Write a log line every ten seconds until cancelled, except while the server is idle."""
    throughput = Throughput(engine, time.monotonic())
    while True:
        await asyncio.sleep(_EVERY_S)
        fields = throughput.fields(time.monotonic())
        if fields is not None:
            line = {"event": "throughput", **fields}
            _logger.info("%s", as_text(fields), extra={"fields": line})
