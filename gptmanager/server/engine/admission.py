"""`Admission`: the server's limits on the requests that run and wait."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from gptmanager.callbacks import AsyncRequestQueue
from gptmanager.server.engine.call import EngineRequest
from gptmanager.server.errors import ApiError
from gptmanager.server.http.keys import ServerKeys
from gptmanager.server.settings import ServerSettings


class Admission:
    """Refuses requests that exceed the limits of `settings`, next to those in `queue`.

    `num_preparing` requests have a logits post-processor that is being prepared. They count as
    requests of the server, and of their API key.
    """

    def __init__(
        self, queue: AsyncRequestQueue, keys: ServerKeys, settings: ServerSettings
    ) -> None:
        self.num_preparing = 0
        self._queue = queue
        self._keys = keys
        self._settings = settings

    def check_number(self, number: int) -> None:
        """Raise ApiError if `number` requests of a single call exceed the limits of an idle server.

        The status is 400, because after a 429 clients would retry forever.
        """
        settings = self._settings
        most = settings.concurrency + settings.max_queued_requests
        if number > most:
            raise ApiError(
                400,
                f"the call makes {number} requests; at most {most} may run and wait at once "
                f"(--max-concurrency {settings.concurrency}, --max-queued-requests "
                f"{settings.max_queued_requests})",
                code="too_many_requests_at_once",
            )

    def check_room(self, requests: Sequence[EngineRequest]) -> None:
        """Raise ApiError if too many requests or prompt tokens would wait.

        The status is 400 if `requests` alone exceed the limits, else 429.
        """
        settings, limit = self._settings, self._settings.max_queued_tokens
        if self._check_number_waiting(len(requests)) <= 0:
            return
        tokens = sum(len(request.tokens) for request in requests)
        if limit is not None and len(requests) > settings.concurrency and tokens > limit:
            raise ApiError(
                400,
                f"the {len(requests)} prompts have {tokens} tokens, more than "
                f"--max-queued-tokens = {limit}, and only {settings.concurrency} run at once",
                code="too_many_requests_at_once",
            )
        if limit is not None and self._queue.num_pending_tokens + tokens > limit:
            raise ApiError(
                429,
                f"{self._queue.num_pending_tokens} prompt tokens wait; {tokens} more would exceed "
                f"--max-queued-tokens = {limit}",
                code="queue_full",
            )

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Count a request while its logits post-processor is prepared.

        Raises ApiError (429) if too many requests wait or use the same API key.
        """
        self._check_number_waiting(1)
        key = self._keys.reserve(1)
        self.num_preparing += 1
        try:
            yield
        finally:
            self.num_preparing -= 1
            self._keys.release(key, 1)

    def _check_number_waiting(self, number: int) -> int:
        """Return how many requests would wait if `number` more came; at most 0 if all would run.

        Raises ApiError if too many would wait: 400 if `number` alone exceeds the limits, else 429.
        """
        settings = self._settings
        running = self._queue.num_open + self.num_preparing
        waiting = running + number - settings.concurrency
        if waiting > 0:
            self.check_number(number)
        if waiting > settings.max_queued_requests:
            raise ApiError(
                429,
                f"{running} requests run or wait; {number} more would make {waiting} wait: "
                f"--max-queued-requests allows {settings.max_queued_requests}",
                code="queue_full",
            )
        return waiting
