"""What a scrape says after responses and records that are known."""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from responding import METRICS as REQUEST_METRIC_VALUES
from responding import ending, streamed, whole

from gptmanager import (
    CapacitySchedulerPolicy,
    FinishReason,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    NamedTensor,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.callbacks import PrometheusSink, fan_out
from gptmanager.callbacks.sinks.metric_counts import Histogram, RequestCounts
from gptmanager.callbacks.sinks.metric_names import METRICS, TRITON
from gptmanager.errors import ConfigError
from gptmanager.testing import RecordingCallbacks, ScriptedModel

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def registry():
    return CollectorRegistry()


def samples(registry):
    """Name -> {labels as "a=1,b=2" without those of the sink: value}."""
    found = {}
    for family in parse_text(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = {
                name: value
                for name, value in sample.labels.items()
                if name not in ("model_name", "rank", "engine", "model", "version")
            }
            key = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
            found.setdefault(sample.name, {})[key] = sample.value
    return found


def run(sink, requests, *, model_type=ModelType.INFLIGHT_FUSED_BATCHING, scheduler=None, **options):
    """A whole run of a manager that `sink` watches; the host."""
    host = RecordingCallbacks(requests)
    host.keywords()
    with GptManager(
        ScriptedModel(lambda history: len(history) % 50),
        model_type,
        1,
        scheduler or SchedulerConfig(),
        sink.fetching(host.get_inference_requests),
        fan_out(host.send_response, sink.send_response),
        host.poll_stop_signal,
        fan_out(host.return_batch_manager_stats, sink.return_batch_manager_stats),
        OptionalParams(**options),
    ) as manager:
        sink.attach(manager)
        manager.wait_idle()
    return host


def test_a_run_is_counted_whole(registry):
    sink = PrometheusSink(model_name="tiny", registry=registry)
    requests = [
        InferenceRequest.from_tokens(1, [1, 2, 3], 20, is_streaming=True),
        InferenceRequest.from_tokens(2, [1, 2, 3, 4], 10, end_id=7),
        InferenceRequest.from_tokens(3, [1], 0),  # refused
    ]

    host = run(sink, requests)

    found = samples(registry)
    last = json.loads(host.statistics[-1])
    assert found["gptmanager_num_requests_running"] == {"": 0}
    assert found["gptmanager_num_requests_waiting"] == {"": 0}
    assert found["gptmanager_requests_finished_total"] == {
        "finish_reason=stop": 1,
        "finish_reason=length": 1,
        "finish_reason=cancelled": 0,
        "finish_reason=error": 1,
    }
    assert found["gptmanager_prompt_tokens_total"] == {"": 7}
    assert found["gptmanager_context_tokens_total"] == {"": 7}
    # 20 of the first; the second generates 4, 5, 6, and the end token
    assert found["gptmanager_generation_tokens_total"] == {"": 24}
    assert found["gptmanager_request_generation_tokens_sum"] == {"": 24}
    assert found["gptmanager_time_per_output_token_seconds_count"] == {"": 19 + 3}
    assert found["gptmanager_request_time_per_output_token_seconds_count"] == {"": 2}
    assert found["gptmanager_time_to_first_token_seconds_count"] == {"": 2}
    assert found["gptmanager_iterations_total"] == {"": len(host.statistics)}
    assert found["gptmanager_iteration_tokens_sum"] == {"": 7 + 19 + 3}
    assert found["gptmanager_kv_cache_blocks"]["state=max"] == last["Max KV cache blocks"]
    assert found["gptmanager_callback_seconds_total"]["callback=PollStopSignal"] == (
        last["gptmanager"]["callback_us"]["PollStopSignal"] / 1e6
    )
    assert sink.requests.num_open == 0
    nothing = {"Max KV cache blocks": 0, "Used KV cache blocks": 0}  # as of a model without pages
    sink.return_batch_manager_stats(json.dumps(last | nothing))
    assert samples(registry)["gptmanager_kv_cache_usage_ratio"] == {"": 0}
    now = SimpleNamespace(num_active=2, total_blocks=10, free_blocks=7)
    sink.attach(SimpleNamespace(health=lambda: now))  # another manager, which runs
    record = sink.record()
    assert (record["Active Request Count"], record["Used KV cache blocks"]) == (2, 3)


def test_tokens_of_a_stream_are_counted_as_they_come_and_once(registry):
    sink = PrometheusSink(model_name="tiny", registry=registry)

    sink.send_response(1, streamed([5, 6]), False, "")
    while_it_runs = samples(registry)["gptmanager_generation_tokens_total"]
    ending = whole([1, 2, 3])  # its metrics: 2 tokens
    sink.send_response(1, ending, True, "")

    assert REQUEST_METRIC_VALUES[6] == 2
    assert while_it_runs == {"": 2} == samples(registry)["gptmanager_generation_tokens_total"]


def test_a_refused_duplicate_leaves_the_request_with_its_id_open(registry):
    sink = PrometheusSink(model_name="tiny", registry=registry)

    sink.send_response(1, streamed([5, 6]), False, "")
    sink.send_response(1, [], True, "DuplicateRequestIdError: request id 1 belongs to another")
    sink.send_response(1, whole([1, 2, 3]), True, "")

    found = samples(registry)
    assert found["gptmanager_generation_tokens_total"] == {"": 2}
    ends = found["gptmanager_requests_finished_total"]
    assert (ends["finish_reason=error"], ends["finish_reason=length"]) == (1, 1)


def test_times_of_a_request_are_those_of_its_metrics(registry):
    sink = PrometheusSink(model_name="tiny", registry=registry)

    sink.send_response(1, whole([1, 2]), True, "")  # 0.25, 0.5, 0.75 s, and 2 tokens

    found = samples(registry)
    assert found["gptmanager_request_queue_time_seconds_sum"] == {"": 0.25}
    assert found["gptmanager_time_to_first_token_seconds_sum"] == {"": 0.5}
    assert found["gptmanager_e2e_request_latency_seconds_sum"] == {"": 0.75}
    assert found["gptmanager_request_prefill_time_seconds_sum"] == {"": 0.25}
    assert found["gptmanager_request_decode_time_seconds_sum"] == {"": 0.25}
    assert found["gptmanager_request_inference_time_seconds_sum"] == {"": 0.5}
    assert found["gptmanager_time_per_output_token_seconds_sum"] == {"": 0.25}
    buckets = found["gptmanager_time_to_first_token_seconds_bucket"]
    assert (buckets["le=0.25"], buckets["le=0.5"], buckets["le=+Inf"]) == (0, 1, 1)


def test_latencies_begin_when_the_request_arrived():
    clock = itertools.chain([100.0, 103.0])
    counts = RequestCounts(lambda: next(clock))
    counts.arrive(1)
    counts.fetch(1)

    counts.respond(1, whole([1, 2]), True, "")

    assert counts.histograms["request_queue_time_seconds"].sum == 3.25
    assert counts.histograms["time_to_first_token_seconds"].sum == 3.5
    assert counts.histograms["e2e_request_latency_seconds"].sum == 3.75
    assert counts.histograms["request_decode_time_seconds"].sum == 0.25


@pytest.mark.parametrize("wrong", ["raises", "is no request"])
def test_requests_that_get_yields_with_something_wrong_are_passed_on(registry, wrong):
    def get(room):
        yield InferenceRequest.from_tokens(1, [1], 2)
        if wrong == "raises":
            raise LookupError("no queue")
        yield "no request"
        yield InferenceRequest.from_tokens(2, [1], 2)

    sink = PrometheusSink(model_name="tiny", registry=registry)
    found = []
    with suppress(LookupError):
        found.extend(sink.fetching(get)(4))
    assert [getattr(it, "request_id", it) for it in found] == (
        [1] if wrong == "raises" else [1, "no request", 2]
    )
    assert sink.requests.num_open == (1 if wrong == "raises" else 2)


def test_an_application_may_decide_late_what_counts():
    counts = RequestCounts()
    for request_id in (1, 2, 3, 4):
        counts.arrive(request_id, is_ended_by_caller=True)
    for length in (30, 10):
        counts.respond(1, streamed([0] * length), False, "")
    assert counts.generation_tokens == 8, "the last 32 may lie behind an end"
    counts.respond(1, whole([0] * 41), True, "")
    assert counts.num_open == 4 and not any(counts.finished.values())
    counts.end_as(1, "stop", 37)
    counts.end_as(1, "cancelled")
    counts.end_as(2, "stop", 1)
    counts.respond(2, whole([0, 0]), True, "")
    assert counts.generation_tokens == 38 and counts.finished["stop"] == 2
    counts.respond(3, [], True, "StepError: no")
    counts.respond(4, whole([0, 0]), True, "")
    counts.end_as(4, None)
    assert counts.generation_tokens == 40 and counts.num_open == 0
    assert counts.finished == {"stop": 2, "length": 1, "cancelled": 0, "error": 1}
    assert counts.histograms["request_generation_tokens"].sum == 40


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        (FinishReason.END_ID, "stop"),
        (FinishReason.STOP_WORDS, "stop"),
        (FinishReason.LENGTH, "length"),
        (FinishReason.CANCELLED, "cancelled"),
        (FinishReason.TIMED_OUT, "timeout"),
    ],
)
def test_every_finish_reason_has_a_label(registry, reason, label):
    sink = PrometheusSink(model_name="tiny", registry=registry)

    sink.send_response(1, [*streamed([]), *ending(reason)], True, "")

    found = samples(registry)["gptmanager_requests_finished_total"]
    assert {key for key, value in found.items() if value} == {f"finish_reason={label}"}


def test_the_application_knows_better_why_a_request_ended(registry):
    sink = PrometheusSink(model_name="tiny", registry=registry)
    for request_id in (1, 2, 3, 4):
        sink.arrived(request_id)

    sink.ends_as(1, "stop")
    sink.send_response(1, [*streamed([]), *ending(FinishReason.CANCELLED)], True, "")
    sink.withdraw(2, "cancelled")
    sink.withdraw(3)
    sink.ends_as(4, "timeout")
    sink.send_response(4, [], True, "StepError: no")
    sink.ends_as(5, "stop")  # it has ended before
    sink.withdraw(5, "cancelled")

    found = samples(registry)["gptmanager_requests_finished_total"]
    assert found == {
        "finish_reason=stop": 1,
        "finish_reason=length": 0,
        "finish_reason=cancelled": 1,
        "finish_reason=error": 1,
    }
    assert sink.requests.num_open == 0


def test_a_request_that_never_ran_has_no_latency(registry):
    sink = PrometheusSink(model_name="tiny", registry=registry)
    nan = float("nan")
    metrics = NamedTensor(
        "request_metrics", torch.tensor([nan, nan, nan, 0, 0, 5, 0, 1, 1], dtype=torch.float64)
    )

    sink.send_response(1, [*streamed([]), ending(FinishReason.CANCELLED)[0], metrics], True, "")

    found = samples(registry)
    assert found["gptmanager_prompt_tokens_total"] == {"": 5}
    assert found["gptmanager_prefix_cache_queries_total"] == {"": 0}
    assert found["gptmanager_time_to_first_token_seconds_count"] == {"": 0}
    assert found["gptmanager_e2e_request_latency_seconds_sum"] == {"": 0}


def test_a_pause_and_a_found_prefix_are_counted(registry):
    sink = PrometheusSink(model_name="tiny", registry=registry)
    prompt = list(range(32))
    config = KvCacheConfig(max_tokens=160, tokens_per_block=16, enable_block_reuse=True)

    run(
        sink,
        [InferenceRequest.from_tokens(i, prompt, 60) for i in range(4)],
        scheduler=SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION),
        kv_cache_config=config,
        max_seq_len=128,
    )

    found = samples(registry)
    pauses = found["gptmanager_preemptions_total"][""]
    assert pauses > 0
    # each computes its whole prompt again, but for the blocks that it finds
    recomputed = found["gptmanager_recomputed_tokens_total"][""]
    assert pauses <= recomputed < found["gptmanager_context_tokens_total"][""]
    assert found["gptmanager_prefix_cache_queries_total"] == {"": 128}
    assert 0 < found["gptmanager_prefix_cache_hits_total"][""] < 128
    assert found["gptmanager_requests_finished_total"]["finish_reason=length"] == 4
    assert found["nv_trt_llm_kv_cache_block_metrics"]["kv_cache_block_type=reused"] > 0


def test_static_batches_have_triton_s_other_family(registry):
    sink = PrometheusSink(model_name="tiny", registry=registry)
    static = SchedulerConfig(CapacitySchedulerPolicy.STATIC_BATCH)

    run(
        sink,
        [InferenceRequest.from_tokens(1, [1, 2], 4)],
        model_type=ModelType.V1,
        scheduler=static,
        max_batch_size=2,
        max_seq_len=64,
    )

    found = samples(registry)
    assert found["nv_trt_llm_v1_metrics"]["v1_specific_metric=total_generation_tokens"] == 1
    assert "nv_trt_llm_inflight_batcher_metrics" not in found
    assert found["gptmanager_iteration_tokens_sum"] == {"": 2 + 4}


def test_the_applications_own_counts_are_exported(registry):
    PrometheusSink(model_name="tiny", registry=registry, counts=lambda: (3, 4))

    found = samples(registry)

    assert found["gptmanager_num_requests_running"] == {"": 3}
    assert found["gptmanager_num_requests_waiting"] == {"": 4}


def test_counters_never_go_down_when_another_manager_begins(registry):
    sink = PrometheusSink(model_name="tiny", registry=registry)
    seen = []
    for _ in range(2):
        run(sink, [InferenceRequest.from_tokens(1, [1, 2], 4)])
        seen.append(samples(registry))

    before, after = seen
    rising = [name for name in before if name.endswith(("_total", "_count", "_sum", "_bucket"))]
    assert len(rising) > 50
    for name in rising:
        for labels, value in before[name].items():
            assert after[name][labels] >= value, name
    assert after["gptmanager_iterations_total"] == {"": 8}
    polls = "callback=PollStopSignal"
    assert (
        after["gptmanager_callback_seconds_total"][polls]
        > (before["gptmanager_callback_seconds_total"][polls])
    )


def test_audits_are_counted_if_they_fail(registry):
    sink = PrometheusSink(model_name="tiny", registry=registry)

    sink.observe_audit(True)
    sink.observe_audit(False)

    assert samples(registry)["gptmanager_audit_failures_total"] == {"": 1}


@pytest.mark.parametrize("record", ["{", "[]", '{"Total Context Tokens": 1}'])
def test_an_invalid_record_is_logged_once(registry, record, caplog):
    sink = PrometheusSink(model_name="tiny", registry=registry)

    with caplog.at_level(logging.WARNING):
        sink.return_batch_manager_stats(record)
        sink.return_batch_manager_stats(record)

    assert len(caplog.records) == 1
    assert samples(registry)["gptmanager_iterations_total"] == {"": 0}


# Names and form ---------------------------------------------------------------------------------


@pytest.fixture(params=["gptmanager", "vllm", "other"])
def scraped(request, registry):
    sink = PrometheusSink(
        model_name='a "name"\n', prefix=request.param, registry=registry, info={"kind": "cpu"}
    )
    run(sink, [InferenceRequest.from_tokens(1, [1, 2], 4, is_streaming=True)])
    return request.param, registry


def test_a_scrape_keeps_the_rules_of_both_formats(scraped):
    _, registry = scraped
    text = generate_latest(registry).decode()

    families = list(parse_text(text))
    strict = list(
        parse_openmetrics(openmetrics.generate_latest(registry, escaping=ALLOWUTF8).decode())
    )

    assert len(strict) == len(families) > 40
    for line in text.splitlines():
        name = re.match(r"[a-zA-Z_:][a-zA-Z0-9_:]*", line)
        if name and not line.startswith("#"):
            stem = re.sub(r"_(bucket|sum|count)$", "", name.group())
            assert f"# TYPE {stem} " in text or f"# TYPE {name.group()} " in text, line
    for family in families:
        assert family.documentation.endswith("."), family.name
        seen = [(it.name, tuple(sorted(it.labels.items()))) for it in family.samples]
        assert len(seen) == len(set(seen)), family.name
        if family.type == "counter":
            assert all(it.name.endswith("_total") for it in family.samples)
        for sample in family.samples:
            assert sample.labels["model_name"] == 'a "name"\n'
            assert sample.labels.get("rank", sample.labels.get("engine")) == "0"
            assert "request_id" not in sample.labels


def test_each_metric_of_the_table_is_in_a_scrape(scraped):
    prefix, registry = scraped
    text = generate_latest(registry).decode()

    for metric in METRICS:
        for name in metric.names(prefix):
            shown = name + {"counter": "_total", "info": "_info"}.get(metric.kind, "")
            kind = "gauge" if metric.kind == "info" else metric.kind
            assert f"# TYPE {shown} {kind}\n" in text
    for family in TRITON:
        assert f"# TYPE nv_trt_llm_{family}_metrics gauge\n" in text


# what vLLM's own Grafana dashboards, and a Kubernetes gateway, ask for
VLLM_NAMES = """
vllm:cache_config_info vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_sum
vllm:e2e_request_latency_seconds_count vllm:generation_tokens_total vllm:gpu_cache_usage_perc
vllm:inter_token_latency_seconds_bucket vllm:iteration_tokens_total_bucket
vllm:kv_cache_usage_perc vllm:num_preemptions_total vllm:num_requests_running
vllm:num_requests_waiting vllm:prefix_cache_hits_total vllm:prefix_cache_queries_total
vllm:prompt_tokens_total vllm:request_decode_time_seconds_sum
vllm:request_generation_tokens_bucket vllm:request_generation_tokens_sum
vllm:request_inference_time_seconds_bucket vllm:request_max_num_generation_tokens_sum
vllm:request_prefill_time_seconds_sum vllm:request_prompt_tokens_bucket
vllm:request_queue_time_seconds_sum vllm:request_success_total
vllm:request_time_per_output_token_seconds_bucket vllm:time_per_output_token_seconds_bucket
vllm:time_to_first_token_seconds_bucket vllm:time_to_first_token_seconds_sum
""".split()


VLLM_BUCKETS = {
    "e2e_request_latency_seconds": "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 "
    "1920 7680",
    "time_to_first_token_seconds": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 "
    "7.5 10 20 40 80 160 640 2560",
    "inter_token_latency_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 "
    "7.5 10 20 40 80",
    "request_prompt_tokens": "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000 "
    "200000 500000",
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
}


def test_vllm_dashboards_find_what_they_ask_for(registry):
    sink = PrometheusSink(model_name="tiny", prefix="vllm", registry=registry)
    before = samples(registry)
    assert before["vllm:num_requests_running"][""] == before["vllm:num_requests_waiting"][""] == 0

    run(sink, [InferenceRequest.from_tokens(1, [1, 2], 4)])

    found = samples(registry)
    assert [name for name in VLLM_NAMES if name not in found] == []
    assert found["vllm:request_success_total"]["finished_reason=length"] == 1
    for name, bounds in VLLM_BUCKETS.items():
        buckets = [it.removeprefix("le=") for it in found[f"vllm:{name}_bucket"]]
        assert [*map(float, buckets)] == [*map(float, bounds.split()), math.inf], name
    for metric in METRICS:
        assert [*metric.buckets] == sorted({*metric.buckets}), metric.name


def test_a_value_on_a_bound_counts_as_below_it():
    histogram = Histogram((1, 2))

    for value in (1, 1.5, 2, 3):
        histogram.observe(value)

    assert histogram.buckets() == [("1.0", 1), ("2.0", 3), ("+Inf", 4)]


# Registries -------------------------------------------------------------------------------------


def test_labels_distinguish_two_managers(registry):
    with PrometheusSink(model_name="a", registry=registry) as first:
        with PrometheusSink(model_name="b", registry=registry, prefix="vllm") as second:
            first.send_response(1, whole([1, 2]), True, "")
            assert registry.get_sample_value(
                "gptmanager_prompt_tokens_total", {"model_name": "a", "rank": "0"}
            )
            assert (
                registry.get_sample_value(
                    "vllm:prompt_tokens_total", {"model_name": "b", "engine": "0"}
                )
                == 0
            )
        second.close()  # twice
        assert b"vllm:" not in generate_latest(registry)
    assert generate_latest(registry) == b""


def test_a_second_sink_of_the_same_name_is_refused(registry):
    with PrometheusSink(model_name="a", registry=registry):
        with pytest.raises(ConfigError, match="model_name = 'a', rank = 0"):
            PrometheusSink(model_name="a", registry=registry, prefix="vllm")
        PrometheusSink(model_name="a", registry=registry, rank=1)
    PrometheusSink(model_name="a", registry=registry)


def test_metrics_of_the_same_names_are_refused_and_nothing_is_lost(registry):
    own = Counter("vllm:prompt_tokens", "Of another engine.", registry=registry)
    with PrometheusSink(model_name="a", registry=registry):
        with pytest.raises(ConfigError, match="vllm:prompt_tokens"):
            PrometheusSink(model_name="b", registry=registry, prefix="vllm")

        assert b"gptmanager_prompt_tokens_total" in generate_latest(registry)
    assert own._value.get() == 0


@pytest.mark.parametrize("prefix", ["", "1a", "a:b", "a-b", None])
def test_a_prefix_must_begin_a_name(registry, prefix):
    with pytest.raises(ConfigError, match="prefix = "):
        PrometheusSink(model_name="a", prefix=prefix, registry=registry)


# Documents --------------------------------------------------------------------------------------


def test_the_page_shows_the_table():
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z0-9_]+)` \| (\w+) \| (.*?) \| (.*?) \|", page, re.MULTILINE)

    expected = []
    for metric in METRICS:
        suffix = {"counter": "_total", "info": "_info"}.get(metric.kind, "")
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        vllm = ", ".join(f"`{name}{suffix}`" for name in metric.vllm)
        expected.append((metric.name + suffix, metric.kind, labels or "-", vllm or "-"))
    assert rows == expected


def dashboard_panels():
    text = (ROOT / "examples" / "grafana_dashboard.json").read_text(encoding="utf-8")
    return json.loads(text)


@pytest.mark.parametrize("prefix", ["gptmanager"])
def test_each_query_of_the_dashboard_names_a_metric(registry, prefix):
    sink = PrometheusSink(model_name="tiny", prefix=prefix, registry=registry)
    run(sink, [InferenceRequest.from_tokens(1, [1, 2], 4)])
    scrape = {
        sample.name: set(sample.labels)
        for family in registry.collect()
        for sample in family.samples
    }
    dashboard = dashboard_panels()
    queries = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]

    assert dashboard["schemaVersion"] >= 36 and len(queries) > 25
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for query in queries:
        query = query.replace("${prefix}", prefix)
        selectors = re.findall(r"([a-zA-Z_:]\w*)\{([^}]*)\}", query)
        assert selectors, query
        for name, matchers in selectors:
            assert name in scrape, query
            assert set(re.findall(r"(\w+)=~?\"", matchers)) <= scrape[name], query
        for labels in re.findall(r"by \(([^)]*)\)", query):
            known = set().union(*(scrape[name] for name, _ in selectors))
            assert set(re.split(r",\s*", labels)) <= known, query
