"""`PrometheusSink`: the metrics of a manager for Prometheus.

The callbacks only add numbers. A scrape makes the text, on its own thread.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import gptmanager
from gptmanager import GptManager, InferenceRequest, NamedTensor
from gptmanager.arguments import able, at_least, function
from gptmanager.callbacks.sinks.metric_counts import Histogram, IterationCounts, RequestCounts
from gptmanager.callbacks.sinks.metric_names import checked_prefix
from gptmanager.callbacks.sinks.registry_collector import Labels, join, leave
from gptmanager.environment.distribution import install_command, too_old
from gptmanager.errors import ConfigError, quoted
from gptmanager.lifecycle.callables import passed_on

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

# keys of a record that are 0 while no request is active
_OF_ITERATION = (
    *("Scheduled Requests", "Context Requests", "Generation Requests", "Paused Requests"),
)
_Get = Callable[[int], Iterable[InferenceRequest]]


class PrometheusSink:
    """A ReturnBatchManagerStats callback, and an observer of SendResponse.

        with PrometheusSink(model_name="tiny") as sink, GptManager(
            folder, ModelType.INFLIGHT_FUSED_BATCHING, 1, SchedulerConfig(),
            get, fan_out(send, sink.send_response), poll, sink.return_batch_manager_stats,
        ) as manager:
            sink.attach(manager)
            prometheus_client.start_http_server(9400, "127.0.0.1")

    `prefix="vllm"` selects vLLM's names. The default `registry` is that of prometheus_client. One
    sink serves one manager; sinks of one registry must differ in `model_name` or `rank`, which are
    labels. If `counts` is given, it returns the numbers of running and of waiting requests in the
    application. Otherwise these numbers are from the attached manager and the last record. `info`
    has additional labels for `config_info`.

    The constructor raises ConfigError if prometheus_client is not installed, if `prefix` is
    invalid, and if the registry has a sink with the same labels, or another collector with the same
    metric names.
    """

    def __init__(
        self,
        *,
        model_name: str,
        prefix: str = "gptmanager",
        registry: CollectorRegistry | None = None,
        rank: int = 0,
        counts: Callable[[], tuple[int, int]] | None = None,
        info: Mapping[str, str] | None = None,
    ) -> None:
        self.prefix = checked_prefix(prefix)
        if not isinstance(model_name, str) or not model_name:
            raise ConfigError(f"model_name = {quoted(model_name)} must be a name")
        self.labels = {"model_name": model_name, "rank": str(at_least(0, "rank", rank))}
        self.registry: CollectorRegistry = (
            _prometheus_client().REGISTRY
            if registry is None
            else able("registry", registry, "register", "registry")
        )
        self.info = {"version": gptmanager.__version__, **(info or {})}
        self.iterations = IterationCounts()
        self.requests = RequestCounts()
        self._counts = None if counts is None else function("counts", counts)
        self._manager: GptManager | None = None
        self._audit_failures = 0
        join(self)

    # On the loop's thread -------------------------------------------------------------------

    def return_batch_manager_stats(self, record: str) -> None:
        """Add a record. This method is the ReturnBatchManagerStats callback; it never raises."""
        self.iterations.add(record)

    def send_response(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        """Observe SendResponse: use `fan_out(send, sink.send_response)`."""
        self.requests.respond(request_id, tensors, is_final, error)

    def fetching(self, get: _Get) -> _Get:
        """Return a callback that calls `get` and notes the requests that it returns.

        Their latencies then include the wait since `arrived`.
        """

        def fetch(max_num_requests: int) -> Any:
            requests: Any = get(max_num_requests)
            if not isinstance(requests, Iterable):  # the manager refuses it
                return requests
            return passed_on(requests, self._noting(requests))

        return fetch

    def _noting(self, requests: Iterable[InferenceRequest]) -> Iterator[InferenceRequest]:
        for request in requests:  # one by one: `get` may yield requests and then raise
            if isinstance(request, InferenceRequest):
                self.requests.fetch(request.request_id)
            yield request

    # From any thread ------------------------------------------------------------------------

    def arrived(
        self, request_id: int, *, is_scoring: bool = False, is_ended_by_caller: bool = False
    ) -> bool:
        """Report that a client's request begins to wait, before GetInferenceRequests can return it.

        If an earlier request with this id has arrived and not ended, nothing changes, and the
        result is False.

        With `is_scoring`, the request scores its prompt, and its generated tokens do not count.
        With `is_ended_by_caller`, the application may end the request for reasons that the manager
        does not know. Unless it fails, the request then counts as ended only after `ends_as`.
        """
        return self.requests.arrive(
            request_id, is_scoring=is_scoring, is_ended_by_caller=is_ended_by_caller
        )

    def withdraw(self, request_id: int, finish_reason: str | None = None) -> None:
        """Report that GetInferenceRequests will never return a request that has arrived.

        The request counts as ended with `finish_reason`; with None it is not counted at all.
        """
        self.requests.withdraw(request_id, finish_reason)

    def ends_as(
        self, request_id: int, finish_reason: str | None, num_tokens: int | None = None
    ) -> None:
        """Report that the application ends a request that has arrived.

        `finish_reason` is "stop" for a stop string, "timeout", or None for the manager's reason.
        Call this before the final response, or at any time for a request with `is_ended_by_caller`.
        `num_tokens` is the number of generated tokens that count, by default all.
        """
        self.requests.end_as(request_id, finish_reason, num_tokens)

    def observe_audit(self, is_ok: bool) -> None:
        """Count a failed audit in `audit_failures_total`. `is_ok` is `manager.audit().ok`."""
        self._audit_failures += not is_ok

    def attach(self, manager: GptManager) -> None:
        """Ask `manager` for its current numbers at each scrape.

        Without this call, the numbers are from the last record, and become outdated while the
        manager is idle, because an idle manager writes no records.
        """
        self._manager = able("manager", manager, "health", "GptManager")

    def close(self) -> None:
        """Remove the sink's metrics from the registry. Idempotent."""
        leave(self)

    def __enter__(self) -> PrometheusSink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # At a scrape ----------------------------------------------------------------------------

    def values(self) -> Iterator[tuple[str, Labels, float | Histogram]]:
        """Yield (name in METRICS, values of the metric's own labels, number or histogram)."""
        iterations, requests = self.iterations, self.requests
        record = self.record()
        running, waiting = self._running_and_waiting(record)
        yield "num_requests_running", (), running
        yield "num_requests_waiting", (), waiting
        if record is None:
            yield "kv_cache_usage_ratio", (), 0
        else:
            yield from _gauges(record)
        yield "iterations", (), iterations.iterations
        yield "context_tokens", (), iterations.context_tokens
        yield "preemptions", (), iterations.pauses
        yield "recomputed_tokens", (), iterations.recomputed_tokens
        yield "gil_wait_seconds", (), iterations.gil_wait_us / 1e6
        yield "iteration_tokens", (), iterations.tokens
        yield "iteration_latency_seconds", (), iterations.latency
        for (name, labels), total in iterations.totals().items():
            yield name, labels, total
        yield "prompt_tokens", (), requests.prompt_tokens
        yield "generation_tokens", (), requests.generation_tokens
        yield "prefix_cache_queries", (), requests.cache_queries
        yield "prefix_cache_hits", (), requests.cache_hits
        yield "audit_failures", (), self._audit_failures
        for reason, number in list(requests.finished.items()):
            yield "requests_finished", (reason,), number
        for name, histogram in requests.histograms.items():
            yield name, (), histogram

    def record(self) -> dict[str, Any] | None:
        """Return the last record, updated with the current numbers of the attached manager."""
        record = self.iterations.last
        if record is None or self._manager is None:
            return record
        health = self._manager.health()
        now = {
            "Active Request Count": health.num_active,
            "Used KV cache blocks": health.total_blocks - health.free_blocks,
            "Free KV cache blocks": health.free_blocks,
        }
        if health.num_active == 0:
            now |= {key: 0 for key in _OF_ITERATION if key in record}
        return {**record, **now}

    def _running_and_waiting(self, record: dict[str, Any] | None) -> tuple[int, int]:
        if self._counts is not None:
            return self._counts()
        if record is None:
            return 0, 0
        active, scheduled = record["Active Request Count"], record["Scheduled Requests"]
        running = min(active, scheduled)
        return running, active - running


def _gauges(record: dict[str, Any]) -> Iterator[tuple[str, Labels, float]]:
    most, used = record["Max KV cache blocks"], record["Used KV cache blocks"]
    reuse, adapters = record["gptmanager"]["block_reuse"], record["gptmanager"]["adapters"]
    yield "num_requests_active", (), record["Active Request Count"]
    yield "num_requests_max", (), record["Max Request Count"]
    yield "num_requests_context", (), record["Context Requests"]
    yield "num_requests_paused", (), record["Paused Requests"]
    if "Generation Requests" in record:
        yield "num_requests_generation", (), record["Generation Requests"]
    yield "kv_cache_usage_ratio", (), used / max(most, 1)
    yield "kv_cache_tokens_per_block", (), record["Tokens per KV cache block"]
    blocks = {"max": most, "free": most - used, "used": used}
    blocks |= {"reused": reuse["reused_blocks"], "cached": reuse["cached_blocks"]}
    for state, number in blocks.items():
        yield "kv_cache_blocks", (state,), number
    yield "kv_cache_host_blocks", ("max",), reuse["host_blocks"]
    yield "kv_cache_host_blocks", ("cached",), reuse["cached_host_blocks"]
    for memory in ("CPU", "GPU", "Pinned"):
        yield "memory_bytes", (memory.lower(),), record[f"Runtime {memory} Memory Usage"]
    yield "weights_version", (), record["gptmanager"]["weights_version"]
    for cache in ("host", "device"):
        for state in ("total", "used", "free"):
            yield "adapter_cache_pages", (cache, state), adapters[f"{cache}_{state}_pages"]


def _prometheus_client() -> Any:
    if (old := too_old("metrics")) is not None:
        raise ConfigError(f"PrometheusSink needs {old}")
    try:
        return importlib.import_module("prometheus_client")
    except ImportError as error:
        raise ConfigError(
            f"PrometheusSink needs prometheus_client: {install_command('metrics')}"
        ) from error
