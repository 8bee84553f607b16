"""`KeptCalls`: calls with an `Idempotency-Key`, which go on when their client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from gptmanager.server.engine.call import Call, EngineRequest
from gptmanager.server.engine.restored_responses import KEEP_S, MAX_BYTES
from gptmanager.server.errors import ApiError
from gptmanager.server.http.idempotency import CallKey, reused

MAX_KEYS = 1024
_TOKEN_BYTES = 64  # estimated size of a token and its log probability in lists


@dataclass(slots=True)
class _Kept:
    body: bytes
    call: Call
    num_bytes: int

    @property
    def has_failed_for_now(self) -> bool:
        """Whether a request has failed with a transient error."""
        failure = self.call.failure
        return failure is not None and failure.is_transient


class KeptCalls:
    """The kept calls by key. `current` has the key of the call that the running task answers.

    At most MAX_KEYS calls are kept, with at most MAX_BYTES in total by estimate. A call is kept
    until KEEP_S seconds after its end, but not after a transient error or a timeout: clients repeat
    the call because it may succeed then. If a new call does not fit, ended calls are removed, the
    oldest first.
    """

    def __init__(self) -> None:
        self.current: ContextVar[CallKey | None] = ContextVar("idempotency_key", default=None)
        self._kept: dict[bytes, _Kept] = {}
        self._num_bytes = 0

    def find(self, key: CallKey) -> Call | None:
        """Return a new reader of the call with this key, or None.

        Raises ApiError: 422 if that call has another body, 503 if one of its requests has failed
        with a transient error and the others are ending.
        """
        kept = self._kept.get(key.name)
        if kept is None:
            return None
        if kept.body != key.body:
            raise reused()
        if kept.has_failed_for_now:
            raise ApiError(
                503,
                "a request of the call with this Idempotency-Key has failed, and the others are "
                "ending: send the call again",
                code="idempotency_key_in_use",
            )
        return kept.call.joined()

    def require_room(self, requests: Sequence[EngineRequest]) -> int:
        """Remove ended calls until a call with `requests` fits, and return its estimated bytes.
        Raises ApiError: 400 if the call alone exceeds MAX_BYTES, 429 if it does not fit now.
        """
        num_bytes = sum(map(_bytes_of, requests))
        if num_bytes > MAX_BYTES:  # not 429: clients would retry forever
            raise ApiError(
                400,
                f"the prompts and outputs of this call may take {num_bytes} bytes; with an "
                f"Idempotency-Key at most {MAX_BYTES} are allowed: lower the maximum number of "
                "new tokens, or send the call without the header",
                code="too_large_for_idempotency_key",
            )
        for name, kept in list(self._kept.items()):
            if self._fits(num_bytes):
                break
            if kept.call.has_ended:
                self._remove(name, kept)
        if not self._fits(num_bytes):
            raise ApiError(
                429,
                f"calls with an Idempotency-Key take {self._num_bytes} bytes ({len(self._kept)} "
                f"calls), and this one needs {num_bytes}; at most {MAX_BYTES} and {MAX_KEYS} calls "
                "are kept",
                code="too_many_idempotency_keys",
            )
        return num_bytes

    def _fits(self, num_bytes: int) -> bool:
        return len(self._kept) < MAX_KEYS and self._num_bytes + num_bytes <= MAX_BYTES

    def add(self, key: CallKey, call: Call, num_bytes: int) -> None:
        """Keep a call until KEEP_S seconds after its end, or to its end if it fails for now."""
        kept = self._kept[key.name] = _Kept(key.body, call, num_bytes)
        self._num_bytes += num_bytes
        loop = asyncio.get_running_loop()

        def end() -> None:
            call.end()
            if kept.has_failed_for_now or (call.failure is None and call.is_late):
                self._remove(key.name, kept)
            else:
                loop.call_later(KEEP_S, self._remove, key.name, kept)

        call.on_last_end(end)

    def _remove(self, name: bytes, kept: _Kept) -> None:
        if self._kept.get(name) is kept:
            del self._kept[name]
            self._num_bytes -= kept.num_bytes


def _bytes_of(request: EngineRequest) -> int:
    """Estimate the bytes that the prompt and the longest output of a request take."""
    listed: int = request.by_name.get("num_top_log_probs", 0)
    outputs: int = request.by_name.get("beam_width", 1)
    return (len(request.tokens) + outputs * request.max_new_tokens) * (_TOKEN_BYTES + 8 * listed)
