"""Runs with adapters, recorded: replayed, simulated, and small whatever the weights are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CONFIGS, checkpoint, random_model

from gptmanager import (
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    PeftCacheManagerConfig,
)
from gptmanager.recorder.recording_file import Recording, read_recording
from gptmanager.replay import replay
from gptmanager.simulator import simulate
from gptmanager.simulator.cost_model import CostModel
from gptmanager.simulator.load import RecordedLoad
from gptmanager.testing import RecordingCallbacks

RANK, PADDING = 8, 20_000  # elements of a row that nobody reads
SMALL = PeftCacheManagerConfig(num_host_module_layer=400, num_device_module_layer=20)


def adapter(seed: int) -> dict[str, torch.Tensor]:
    """For attn_q of both layers, 40 wide."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "lora_weights": torch.randn(2, RANK * 80 + PADDING, generator=generator),
        "lora_config": torch.tensor([[1, layer, RANK] for layer in range(2)]),
    }


def request(number: int, task: int | None = None, brings: bool = False) -> InferenceRequest:
    tensors: dict[str, Any] = {
        "input_ids": torch.arange(3, 9 + number % 5)[None],
        "request_output_len": 4 + number % 3,
    }
    if task is not None:
        tensors["lora_task_id"] = task
    if brings and task is not None:
        tensors |= adapter(task)
    return InferenceRequest(number, tensors)


def run(path: Path, **options: Any) -> tuple[Recording, RecordingCallbacks]:
    """Three tasks, one of which is replaced; an id that nobody knows, and weights that differ."""
    host = RecordingCallbacks()
    params = OptionalParams(
        recording_path=path,
        max_batch_size=4,
        max_seq_len=32,
        kv_cache_config=KvCacheConfig(max_tokens=96, tokens_per_block=4, enable_block_reuse=True),
        peft_cache_manager_config=SMALL,
        **options,
    )
    source = checkpoint(random_model(CONFIGS["llama"]))
    kind = ModelType.INFLIGHT_FUSED_BATCHING
    with GptManager(source, kind, optional_params=params, **host.keywords()) as manager:
        host.manager = manager
        host.submit(*(request(i, (None, 1, 2, 3)[i % 4], brings=i < 4) for i in range(12)))
        assert manager.wait_idle(60)
        wrong = request(20, 2)
        wrong.tensors.update(adapter(9))
        host.submit(wrong, request(21, 77), request(22, 3))
        assert manager.wait_idle(60)
        manager.forget_adapter(2)
        host.submit(request(30, 2), request(31, 1))
        assert manager.wait_idle(60)
        report = manager.audit()
        assert report.ok and report.adapters is not None
        assert report.adapters.counts.device_evictions > 0
    return read_recording(path), host


@pytest.mark.parametrize(
    "options",
    [{}, {"run_ahead": 1}, {"enable_trt_overlap": True}, {"enable_chunked_context": True}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_a_run_replays_and_is_simulated(tmp_path: Path, options: dict[str, Any]) -> None:
    path = tmp_path / "run.jsonl"
    recording, host = run(path, **options)
    # of adapters their digests: no line is as long as the numbers of one would be
    assert max(map(len, path.read_text().splitlines())) < PADDING
    errors = {i: host.final(i).error for i in (20, 21, 22, 30, 31)}
    assert "differ from those cached" in errors[20]
    assert "lora_task_id 77 is not cached" in errors[21]
    assert "lora_task_id 2 is not cached" in errors[30]
    assert not errors[22] and not errors[31]

    report = replay(recording)
    assert report.divergence is None and report.compared > 10
    figures = simulate(
        recording.header.blueprint, RecordedLoad(recording, "iterations"), CostModel()
    )
    assert (figures.requests, figures.failed) == (17, 2)  # 21 and 30
