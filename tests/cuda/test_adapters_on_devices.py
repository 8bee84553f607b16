"""Requests with adapters in managers on a device: the tokens are those of merged models."""

from __future__ import annotations

from devices import WIDE, set_token_sizes
from tuned_models import tuned

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.cuda.device.graphs import StepGraphs
from gptmanager.testing import ContractChecker, RecordingCallbacks

RANKS = (1, 8, 33)
TASKS = (None, 0, 1, None, 2, 1, None)  # the last comes alone, in steps without adapters


def test_recorded_steps_mix_adapters_that_come_and_go(device, monkeypatch):
    """Each step finds the adapters of its own rows, in slots that others had; some are paused."""
    set_token_sizes(monkeypatch, 16)
    made, replayed = tuned("llama", RANKS, **WIDE), []
    run = StepGraphs.run
    monkeypatch.setattr(
        StepGraphs,
        "run",
        lambda graphs, size, arrays: replayed.append(id(graphs)) or run(graphs, size, arrays),
    )
    prompts = [
        [(5 * number + 7 * i) % 90 for i in range(3 + number)] for number in range(len(TASKS))
    ]
    lengths = [3 + number % 3 for number in range(len(TASKS))]
    *together, alone = [
        InferenceRequest(
            number,
            {"input_ids": prompts[number], "request_output_len": lengths[number]} | made.lora(task),
        )
        for number, task in enumerate(TASKS)
    ]
    host = RecordingCallbacks(together)
    checker = ContractChecker(host.get_inference_requests, host.send_response)
    params = OptionalParams(
        KvCacheConfig(max_tokens=64, tokens_per_block=16, enable_block_reuse=True),
        device=device,
        max_batch_size=4,
        max_seq_len=48,
        run_ahead=1,
        exclude_input_in_output=True,
    )
    with GptManager(
        made.source,
        ModelType.INFLIGHT_FUSED_BATCHING,
        1,
        SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION),
        checker.get_inference_requests,
        checker.send_response,
        optional_params=params,
    ) as manager:
        assert manager.wait_idle(120), manager.exception
        host.submit(alone)
        manager.notify()
        assert manager.wait_idle(120), manager.exception
        report = manager.audit()
        assert report.ok and report.adapters.counts.misses == len(RANKS)
    checker.check()
    for number, task in enumerate(TASKS):
        final = host.final(number)
        assert not final.error, final.error
        text = final.tensors["output_ids"][0, 0].tolist()
        assert len(text) == lengths[number]
        assert made.is_greedy(task, prompts[number], text), (number, task, text)
    assert len(set(replayed)) == 4, "steps with adapters are recorded apart from those without"
