"""/metrics: the metrics of the manager and of the server, in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gptmanager import NamedTensor
from gptmanager.callbacks import AsyncRequestQueue, Generation, PrometheusSink
from gptmanager.errors import AdapterError, error_class
from gptmanager.server.engine.restored_responses import RestoredResponses
from gptmanager.server.http.request_log import RequestLog
from gptmanager.server.settings import ServerSettings

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # that `generate_latest` writes


class ServerMetrics(PrometheusSink):
    """The metrics of one server and of its process, in a registry of their own."""

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
        self.request_log = RequestLog()
        registry.register(_Refusals(self.request_log, self.labels))
        self._queue = queue
        self.restored = RestoredResponses()
        self._tries: set[int] = set()
        self.get_inference_requests = self.fetching(queue.get_inference_requests)

    def respond(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        """Count a response, and pass it to the queue afterwards.

        In this order every request is counted before its client gets the answer. A response to a
        restored request that no client has joined is neither counted nor passed on, but held.
        """
        if self.restored.hold(request_id, tensors, is_final, error):
            return
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
        """Count the request as waiting, and call `submit`.

        If `submit` raises, the count is undone. If another request with this id waits or runs,
        nothing changes, because the count belongs to that request.

        With `is_try`, the request names an adapter that the cache may have evicted. If the adapter
        is missing, this try is not counted, because the caller resubmits the request with the
        adapter's weights. For `is_scoring` and `is_ended_by_caller`, see `PrometheusSink.arrived`.
        """
        flags = {"is_scoring": is_scoring, "is_ended_by_caller": is_ended_by_caller}
        is_new = self.arrived(request_id, **flags)
        if is_new and is_try:
            self._tries.add(request_id)
        try:
            return submit()
        except BaseException:
            if is_new:  # otherwise another request with this id waits or runs
                self._tries.discard(request_id)
                self.withdraw(request_id)
            raise

    def cancel(
        self, generation: Generation, finish_reason: str | None, num_tokens: int | None = None
    ) -> None:
        """End a request if it still runs.

        The metrics count the request with `finish_reason` (None: the manager's reason) and with
        `num_tokens` generated tokens (None: all that the manager has generated).
        """
        self.ends_as(generation.request_id, finish_reason, num_tokens)
        if generation.done():
            return  # another request may already have this id
        generation.cancel()
        if generation.done():  # the manager will never see the request, or has ended it
            self._tries.discard(generation.request_id)
            self.withdraw(generation.request_id, finish_reason)

    def _ends_try(self, request_id: int, error: str) -> bool:
        """Return whether this response ends a try because the adapter is not cached."""
        if request_id not in self._tries:
            return False
        self._tries.discard(request_id)
        return error_class(error) == AdapterError.__name__


class _Refusals(Collector):
    """Counts refused requests and connections by status and code.

    `--metrics-prefix` does not change the name of this metric.
    """

    def __init__(self, log: RequestLog, labels: Mapping[str, str]) -> None:
        self._log = log
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        names = [*self._labels, "status", "code"]
        metric = CounterMetricFamily(
            "gptmanager_requests_refused",
            "Requests that were answered with an error.",
            labels=names,
        )
        for labels, number in list(self._log.refusals.items()):
            metric.add_metric([*self._labels.values(), *labels], number)
        yield metric


class RequestCounts(NamedTuple):
    """The number of requests in the manager, and the number that wait for the manager."""

    running: int
    waiting: int


def counts_of(queue: AsyncRequestQueue) -> RequestCounts:
    """Return the numbers of running and waiting requests."""
    waiting = queue.num_pending
    return RequestCounts(max(queue.num_open - waiting, 0), waiting)


def routes(engine: Any, settings: ServerSettings) -> list[BaseRoute]:
    """Return the route of /metrics."""
    registry = engine.metrics.registry

    def metrics(request: Request) -> Response:
        # This is not a coroutine, so Starlette runs it on a worker thread. It always answers in the
        # plain format, which all scrapers read. In the OpenMetrics format, prometheus_client would
        # write underscores for the colons in vLLM's names.
        return Response(generate_latest(registry), headers={"content-type": _CONTENT_TYPE})

    return [Route("/metrics", metrics)]
