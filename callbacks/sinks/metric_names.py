"""The names of metrics, their kinds, labels and buckets, in one table for all prefixes.

`METRICS` also has the names by which vLLM exports the same numbers, so that vLLM's dashboards work.
`TRITON` has the metrics of Triton's TensorRT-LLM backend. docs/metrics.md shows both tables.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from gptmanager.errors import ConfigError

VLLM = "vllm"
OWN = "gptmanager"

_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
REQUEST_BUCKETS = (*_SECONDS, 7680)
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
OUTPUT_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
TOKENS_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
ITERATION_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ITERATION_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)

Kind = Literal["gauge", "counter", "histogram", "info"]


class Metric(NamedTuple):
    """The description of one metric.

    `name` has neither the prefix nor the suffix of the exported name (`_total` for a counter,
    `_info` for an info). `labels` are the labels besides model_name and rank. `vllm` has vLLM's
    names of the metric, the current name first. If vLLM does not have the metric, `vllm` is empty.
    `buckets` has the upper bounds of a histogram's buckets.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    vllm: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def names(self, prefix: str) -> tuple[str, ...]:
        """Return the metric's names, beginning with `prefix`.

        If `prefix` is "vllm" but vLLM lacks the metric, the name begins with "gptmanager" instead.
        """
        if prefix == VLLM:
            return tuple(f"vllm:{name}" for name in self.vllm) or (f"{OWN}_{self.name}",)
        return (f"{prefix}_{self.name}",)


def _gauge(name: str, text: str, *vllm: str, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name, "gauge", text, labels, vllm)


def _counter(name: str, text: str, *vllm: str, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name, "counter", text, labels, vllm)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *vllm: str) -> Metric:
    return Metric(name, "histogram", text, (), vllm, buckets)


METRICS = (
    _gauge("num_requests_running", "Requests that run.", "num_requests_running"),
    _gauge("num_requests_waiting", "Requests that wait to run.", "num_requests_waiting"),
    _gauge("num_requests_active", "Requests accepted and not finished, in the last iteration."),
    _gauge("num_requests_max", "Most requests that may be active; -1 means no limit."),
    _gauge("num_requests_context", "Requests in the context phase, in the last iteration."),
    _gauge("num_requests_generation", "Requests in the generation phase, in the last iteration."),
    _gauge("num_requests_paused", "Requests that the last iteration paused."),
    _gauge(
        "kv_cache_usage_ratio", "Share of KV cache blocks in use, 0 to 1.",
        *("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    ),
    _gauge(
        "kv_cache_blocks",
        "KV cache blocks. reused were found for prompts since the start; cached can be found now.",
        labels=("state",),
    ),
    _gauge("kv_cache_tokens_per_block", "Tokens of a KV cache block."),
    _gauge("kv_cache_host_blocks", "Blocks of the host tier.", labels=("state",)),
    _gauge("memory_bytes", "Bytes of tensors, by kind of memory.", labels=("memory",)),
    _gauge("adapter_cache_pages", "Pages of the adapters' caches.", labels=("cache", "state")),
    _gauge("weights_version", "Number of updates of the weights, in the last iteration."),
    _counter("iterations", "Iterations that ran the model."),
    _counter("prompt_tokens", "Prompt tokens of requests that ended.", "prompt_tokens"),
    _counter("context_tokens", "Tokens that ran in the context phase."),
    _counter("generation_tokens", "Generated tokens, end tokens included.", "generation_tokens"),
    _counter(
        "prefix_cache_queries", "Tokens of prompts that were looked up in the KV cache.",
        *("prefix_cache_queries", "gpu_prefix_cache_queries"),
    ),
    _counter(
        "prefix_cache_hits", "Tokens of prompts that were found in the KV cache.",
        *("prefix_cache_hits", "gpu_prefix_cache_hits"),
    ),
    _counter("preemptions", "Pauses of requests.", "num_preemptions"),
    _counter("recomputed_tokens", "Context tokens of requests that had been paused."),
    _counter(
        "requests_finished", "Requests that ended.", "request_success", labels=("finish_reason",)
    ),
    _counter("draft_tokens", "Draft tokens that ran.", "spec_decode_num_draft_tokens"),
    _counter(
        "accepted_draft_tokens", "Draft tokens that were accepted.",
        "spec_decode_num_accepted_tokens",
    ),
    _counter("offloaded_blocks", "KV cache blocks copied to the host tier."),
    _counter("onboarded_blocks", "KV cache blocks copied back from the host tier."),
    _counter("adapter_cache_hits", "Requests with an adapter that was on the device."),
    _counter("adapter_cache_misses", "Requests with an adapter that was copied to the device."),
    _counter("logits_errors", "Requests ended by a LogitsError."),
    _counter("callback_seconds", "Seconds spent in each callback.", labels=("callback",)),
    _counter("callback_errors", "Failed calls of each callback.", labels=("callback",)),
    _counter("gil_wait_seconds", "Seconds in which a step waited for Python's lock or a core."),
    _counter("audit_failures", "Audits that found an error, such as a lost block."),
    _histogram(
        "time_to_first_token_seconds", "Seconds until the first token.",
        FIRST_TOKEN_BUCKETS, "time_to_first_token_seconds",
    ),
    _histogram(
        "time_per_output_token_seconds",
        "Mean seconds between tokens of a request, counted once per token.",
        *(OUTPUT_TOKEN_BUCKETS, "inter_token_latency_seconds", "time_per_output_token_seconds"),
    ),
    _histogram(
        "request_time_per_output_token_seconds",
        "Mean seconds between tokens of a request, counted once per request.",
        OUTPUT_TOKEN_BUCKETS, "request_time_per_output_token_seconds",
    ),
    _histogram(
        "e2e_request_latency_seconds", "Seconds until the last token.",
        REQUEST_BUCKETS, "e2e_request_latency_seconds",
    ),
    _histogram(
        "request_queue_time_seconds", "Seconds until the first computation.",
        REQUEST_BUCKETS, "request_queue_time_seconds",
    ),
    _histogram(
        "request_prefill_time_seconds", "Seconds from the first computation to the first token.",
        REQUEST_BUCKETS, "request_prefill_time_seconds",
    ),
    _histogram(
        "request_decode_time_seconds", "Seconds from the first token to the last.",
        REQUEST_BUCKETS, "request_decode_time_seconds",
    ),
    _histogram(
        "request_inference_time_seconds", "Seconds from the first computation to the last token.",
        REQUEST_BUCKETS, "request_inference_time_seconds",
    ),
    _histogram(
        "request_prompt_tokens", "Tokens of a prompt.", TOKENS_BUCKETS, "request_prompt_tokens"
    ),
    _histogram(
        "request_generation_tokens", "Generated tokens of a request.",
        *(TOKENS_BUCKETS, "request_generation_tokens", "request_max_num_generation_tokens"),
    ),
    _histogram(
        "iteration_tokens", "Context tokens and generation rows of an iteration.",
        ITERATION_TOKENS_BUCKETS, "iteration_tokens_total",
    ),
    _histogram("iteration_latency_seconds", "Seconds of an iteration.", ITERATION_BUCKETS),
    Metric("config", "info", "Configuration of the manager.", (), ("cache_config",)),
)  # fmt: skip
METRIC = {metric.name: metric for metric in METRICS}

# Each metric's name -> (its label's name, {value of the label: key of a statistics record}).
# prometheus.py adds three keys to the record: "reused blocks", "used fraction" and "seconds".
TRITON: dict[str, tuple[str, dict[str, str]]] = {
    "request": (
        "request_type",
        {
            "active": "Active Request Count",
            "max": "Max Request Count",
            "scheduled": "Scheduled Requests",
            "context": "Context Requests",
            "waiting": "Waiting Requests",
        },
    ),
    "runtime_memory": (
        "memory_type",
        {kind.lower(): f"Runtime {kind} Memory Usage" for kind in ("CPU", "GPU", "Pinned")},
    ),
    "kv_cache_block": (
        "kv_cache_block_type",
        {
            "max": "Max KV cache blocks",
            "free": "Free KV cache blocks",
            "used": "Used KV cache blocks",
            "tokens_per": "Tokens per KV cache block",
            "reused": "reused blocks",
            "fraction": "used fraction",
        },
    ),
    "inflight_batcher": (
        "inflight_batcher_specific_metric",
        {
            "total_context_tokens": "Total Context Tokens",
            "generation_requests": "Generation Requests",
            "micro_batch_id": "MicroBatch ID",
            "paused_requests": "Paused Requests",
        },
    ),
    "v1": (
        "v1_specific_metric",
        {
            "total_context_tokens": "Total Context Tokens",
            "total_generation_tokens": "Total Generation Tokens",
            "empty_generation_slots": "Empty Generation Slots",
        },
    ),
    "general": ("general_type", {"timestamp": "seconds", "iteration_counter": "Iteration Counter"}),
}


def checked_prefix(prefix: str) -> str:
    """Return `prefix`; raise ConfigError if the name of a metric cannot begin with it."""
    if not isinstance(prefix, str) or re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", prefix) is None:
        raise ConfigError(
            f"prefix = {prefix!r} must consist of letters, digits and underscores, and must not "
            "begin with a digit"
        )
    return prefix
