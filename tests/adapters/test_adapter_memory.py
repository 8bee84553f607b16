"""The memory that statistics report has the pages of adapters in it, when they are used."""

from __future__ import annotations

import json

import pytest
from tuned_models import cache_of, tuned

from gptmanager import (
    GptManager,
    InferenceRequest,
    ModelType,
    OptionalParams,
    PeftCacheManagerConfig,
    SchedulerConfig,
)
from gptmanager.assembly import assemble
from gptmanager.assembly.sizing import MemoryBudget
from gptmanager.models import load_model
from gptmanager.peft_cache import PeftCacheCounts
from gptmanager.statistics import Memory
from gptmanager.testing import RecordingCallbacks


def last_record(tasks, num_pages):
    host = RecordingCallbacks(
        InferenceRequest(
            number, {"input_ids": [1, 2, 3], "request_output_len": 2} | tuned("llama").lora(task)
        )
        for number, task in enumerate(tasks)
    )
    params = OptionalParams(
        device="cpu", peft_cache_manager_config=cache_of("llama", num_pages, num_pages)
    )
    kind = ModelType.INFLIGHT_FUSED_BATCHING
    with GptManager(
        tuned("llama").source, kind, optional_params=params, **host.keywords()
    ) as manager:
        assert manager.wait_idle(60)
    assert all(not host.final(number).error for number in range(len(tasks)))
    return json.loads(host.statistics[-1])


@pytest.mark.parametrize("num_pages", [30, 90])
def test_used_pages_count_on_a_cpu_and_others_do_not(num_pages):
    without, one, two = (last_record(tasks, num_pages) for tasks in ([None], [0], [0, 3]))
    used = []
    for record in (one, two):
        pages = record["gptmanager"]["adapters"]
        num_used = pages["host_used_pages"] + pages["device_used_pages"]
        memory = record["Runtime CPU Memory Usage"] - without["Runtime CPU Memory Usage"]
        assert num_used and memory == num_used * (memory // num_used)
        used.append((num_used, memory // num_used))
    (few, page_bytes), (many, same_bytes) = used
    assert few < many and page_bytes == same_bytes
    weights, _ = tuned("llama").tensors[0]
    assert page_bytes >= 4 * weights.shape[1]  # a row of an adapter is never split


@pytest.mark.parametrize(
    ("given", "free", "expected"),
    [(1 << 30, 1 << 40, 1 << 30), (1 << 30, 1 << 28, 1 << 26), (1 << 27, 1 << 28, 1 << 27)],
)
def test_the_default_size_on_the_host_is_a_quarter_of_free_memory(
    monkeypatch, given, free, expected
):
    monkeypatch.setattr(assemble, "free_memory_bytes", lambda: free)
    model = load_model(tuned("llama").source)
    params = OptionalParams(peft_cache_manager_config=PeftCacheManagerConfig(host_cache_size=given))
    wanted = params, SchedulerConfig(), model.spec, ModelType.INFLIGHT_FUSED_BATCHING, 1
    _, sizes = assemble._sizes(wanted, model, MemoryBudget(1 << 30), None)
    page_bytes = sizes.cache.page_size * sizes.cache.itemsize
    assert sizes.cache.num_host_pages == expected // page_bytes


def test_on_a_gpu_the_hosts_pages_are_pinned_and_those_of_the_device_are_there_from_the_start():
    pages = PeftCacheCounts(host_used_pages=3, device_used_pages=2)
    memory = Memory(cpu=1, gpu=100, pinned=7, adapter_page=10)
    assert memory.with_adapters(pages) == Memory(1, 100, 37, 10)
