"""The metrics of all sinks of a registry of prometheus_client, as families with samples."""

from __future__ import annotations

import importlib
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, cast

from gptmanager.callbacks.sinks.metric_counts import Histogram
from gptmanager.callbacks.sinks.metric_names import METRIC, METRICS, TRITON, VLLM
from gptmanager.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.registry import CollectorRegistry

Labels = tuple[str, ...]


class Sink(Protocol):
    """The part of a `PrometheusSink` that a scrape reads. Its `labels` differ from all others'."""

    prefix: str
    labels: dict[str, str]
    info: dict[str, str]
    registry: CollectorRegistry

    def values(self) -> Iterator[tuple[str, Labels, float | Histogram]]:
        """Yield (name in METRICS, values of the metric's own labels, number or histogram)."""

    def record(self) -> dict[str, Any] | None:
        """Return the statistics record with the current numbers, or None without a record."""


def _triton_values(record: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Yield (family of TRITON, value of its label, number)."""
    used, most = record["Used KV cache blocks"], record["Max KV cache blocks"]
    when = time.strptime(record["Timestamp"], "%m-%d-%Y %H:%M:%S")
    numbers = {
        **record,
        "reused blocks": record["gptmanager"]["block_reuse"]["reused_blocks"],
        "used fraction": used / max(most, 1),
        "seconds": time.mktime(when),
    }
    absent = "v1" if "Generation Requests" in record else "inflight_batcher"
    for family, (_, keys) in TRITON.items():
        if family != absent:
            for value, key in keys.items():
                yield family, value, numbers[key]


class _Collector:
    """The collector of all sinks of one registry, which merges their families by name."""

    def __init__(self) -> None:
        self.sinks: tuple[Sink, ...] = ()

    def describe(self) -> Iterable[Family]:
        return self._families().values()

    def collect(self) -> Iterable[Family]:
        families = self._families()
        for sink in self.sinks:
            _add(families, sink)
        return families.values()

    def _families(self) -> dict[str, Family]:
        """Return name -> family, without samples."""
        core = importlib.import_module("prometheus_client.core")
        found = {}
        for prefix in dict.fromkeys(sink.prefix for sink in self.sinks):
            for metric in METRICS:
                for name in metric.names(prefix):
                    found[name] = core.Metric(name, metric.help, metric.kind)
        for family in TRITON if self.sinks else ():
            name = f"nv_trt_llm_{family}_metrics"
            found[name] = core.Metric(name, "As in Triton's TensorRT-LLM backend.", "gauge")
        return found


def _add(families: dict[str, Family], sink: Sink) -> None:
    common = dict(sink.labels)
    if sink.prefix == VLLM:
        common["engine"] = common.pop("rank")
    for metric_name, values, number in sink.values():
        metric = METRIC[metric_name]
        labels = {**common, **dict(zip(metric.labels, values, strict=True))}
        for name in metric.names(sink.prefix):
            if name.startswith("vllm:") and "finish_reason" in labels:
                labels["finished_reason"] = labels.pop("finish_reason")
            family = families[name]
            if isinstance(number, Histogram):
                _add_histogram(family, labels, number)
            else:
                suffix = "_total" if metric.kind == "counter" else ""
                family.add_sample(name + suffix, labels, number)
    record = sink.record()
    if record is not None:
        for name in METRIC["config"].names(sink.prefix):
            families[name].add_sample(f"{name}_info", {**common, **_config(sink, record)}, 1)
        # Triton's own labels, and the labels that distinguish managers
        labels = {"model": "tensorrt_llm", "version": "1", **sink.labels}
        for group, value, number in _triton_values(record):
            name = f"nv_trt_llm_{group}_metrics"
            families[name].add_sample(name, {TRITON[group][0]: value, **labels}, number)


def _add_histogram(family: Family, labels: dict[str, str], histogram: Histogram) -> None:
    buckets = histogram.buckets()
    for bound, number in buckets:
        family.add_sample(f"{family.name}_bucket", {**labels, "le": bound}, number)
    family.add_sample(f"{family.name}_count", labels, buckets[-1][1])
    family.add_sample(f"{family.name}_sum", labels, histogram.sum)


def _config(sink: Sink, record: dict[str, Any]) -> dict[str, str]:
    names = ("tokens_per_block", "num_blocks", "max_active_requests")
    if sink.prefix == VLLM:
        names = ("block_size", "num_gpu_blocks", "max_active_requests")
    keys = ("Tokens per KV cache block", "Max KV cache blocks", "Max Request Count")
    return {**sink.info, **{name: str(record[key]) for name, key in zip(names, keys, strict=True)}}


_collectors: weakref.WeakKeyDictionary[CollectorRegistry, _Collector] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # guards _collectors and their sinks


def join(sink: Sink) -> None:
    """Add a sink's metrics to its registry. Raise ConfigError if labels or names are taken."""
    with _lock:
        collector = _collectors.setdefault(sink.registry, _Collector())
        if any(other.labels == sink.labels for other in collector.sinks):
            raise ConfigError(
                f"model_name = {sink.labels['model_name']!r}, rank = {sink.labels['rank']}: the "
                "registry has a sink with these labels already; close it, or choose another "
                "model_name"
            )
        _replace_sinks(sink.registry, collector, (*collector.sinks, sink))


def leave(sink: Sink) -> None:
    """Remove a sink's metrics from its registry, if they are there."""
    with _lock:
        collector = _collectors[sink.registry]
        if sink in collector.sinks:
            left = tuple(other for other in collector.sinks if other is not sink)
            _replace_sinks(sink.registry, collector, left)


def _replace_sinks(
    registry: CollectorRegistry, collector: _Collector, sinks: tuple[Sink, ...]
) -> None:
    before = collector.sinks
    if before:
        registry.unregister(cast(Any, collector))
    collector.sinks = sinks
    try:
        if sinks:
            registry.register(cast(Any, collector))
    except ValueError as error:
        collector.sinks = before
        if before:
            registry.register(cast(Any, collector))
        raise ConfigError(f"the registry has metrics with these names already: {error}") from error
