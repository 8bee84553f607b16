"""/metrics: what the manager and the server count, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gptmanager import NamedTensor
from gptmanager.callbacks import AsyncRequestQueue, Generation, PrometheusSink
from gptmanager.errors import AdapterError, DuplicateRequestIdError
from gptmanager.server.settings import ServerSettings


class ServerMetrics(PrometheusSink):
    """The sink of one server, with a registry of its own that also has the process's numbers."""

    def __init__(self, settings: ServerSettings, queue: AsyncRequestQueue) -> None:
        registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        super().__init__(
            model_name=settings.name,
            prefix=settings.metrics_prefix,
            registry=registry,
            counts=lambda: counts_of(queue),
            info={"model_type": settings.manager.model_type.name},
        )
        self._queue = queue
        self._tries: set[int] = set()
        self.get_inference_requests = self.fetching(queue.get_inference_requests)

    def respond(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        """The queue's SendResponse, observed: who has an answer finds it counted."""
        if is_final and self._ends_try(request_id, error):
            self.withdraw(request_id)
        else:
            self.send_response(request_id, tensors, is_final, error)
        self._queue.send_response(request_id, tensors, is_final, error)

    def submit(
        self,
        request_id: int,
        submit: Callable[[], Generation],
        *,
        is_try: bool = False,
        is_scoring: bool = False,
        is_ended_by_caller: bool = False,
    ) -> Generation:
        """A request that waits from now on, unless `submit` raises.

        `is_try`: it names an adapter that may have left the cache. Where it has, this does not
        count: it will be sent again with the weights. `is_scoring`, `is_ended_by_caller`: as of
        `arrived`.
        """
        self.arrived(request_id, is_scoring=is_scoring, is_ended_by_caller=is_ended_by_caller)
        if is_try:
            self._tries.add(request_id)
        try:
            return submit()
        except DuplicateRequestIdError:
            raise  # the other request of this id waits or runs
        except BaseException:
            self._tries.discard(request_id)
            self.withdraw(request_id)
            raise

    def cancel(
        self, generation: Generation, finish_reason: str | None, num_tokens: int | None = None
    ) -> None:
        """End a request, if it still runs; it counts as one that ended with `finish_reason`, None:
        as the manager says, after `num_tokens`, None: all.
        """
        self.ends_as(generation.request_id, finish_reason, num_tokens)
        if generation.done():
            return  # another request may have its id by now
        generation.cancel()
        if generation.done():  # the manager will never see it, or has ended it
            self._tries.discard(generation.request_id)
            self.withdraw(generation.request_id, finish_reason)

    def _ends_try(self, request_id: int, error: str) -> bool:
        """This ends a try, in vain."""
        if request_id not in self._tries:
            return False
        self._tries.discard(request_id)
        return error.startswith(f"{AdapterError.__name__}: ")


def counts_of(queue: AsyncRequestQueue) -> tuple[int, int]:
    """Requests that the manager has, and requests that wait for it to take them."""
    waiting = queue.num_pending
    return max(queue.num_open - waiting, 0), waiting


def routes(engine: Any, settings: ServerSettings) -> list[BaseRoute]:
    """/metrics."""
    registry = engine.metrics.registry

    def metrics(request: Request) -> Response:  # no coroutine: it runs on a worker's thread
        # always the plain format, which all scrapers read: prometheus_client's OpenMetrics has
        # underscores where vLLM's names have colons
        return Response(
            generate_latest(registry), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4}
        )

    return [Route("/metrics", metrics)]
