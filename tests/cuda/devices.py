"""Where managers run in these tests, what they answer there, and a model of CUDA kernels' heads."""

from __future__ import annotations

import functools

import pytest
import torch
from checkpoints import CONFIGS, random_state
from requirements import skip

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    PeftCacheManagerConfig,
    SchedulerConfig,
)
from gptmanager.cuda import emulator
from gptmanager.cuda.device.streams import DeviceStream, EmulatedStream
from gptmanager.errors import ConfigError
from gptmanager.testing import ContractChecker, RecordingCallbacks

NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
NO_ADAPTERS = PeftCacheManagerConfig(host_cache_size=0)
"""Steps are not captured with adapters, too, which takes as long again."""

WIDE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
LLAMA = {**CONFIGS["llama"], **WIDE}
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def there_is(device):
    """`device`, or no test where there is none."""
    try:
        if device == "cuda":
            DeviceStream("cuda")
        elif device == "emulator":
            emulator.Toolchain()
    except ConfigError as error:
        skip(str(error))
    return device


def set_token_sizes(monkeypatch, *sizes):
    """Steps with contexts are captured in these sizes, if a manager captures any."""
    for stream in (DeviceStream, EmulatedStream):
        monkeypatch.setattr(stream, "token_sizes", sizes)


def finals(
    requests,
    device,
    config=LLAMA,
    max_beam_width=1,
    policy=NO_EVICT,
    model_type=ModelType.INFLIGHT_FUSED_BATCHING,
    cache=None,
    source=None,
    **options,
):
    """The last responses, in the order of the requests, of a manager under a tight pool."""
    host = RecordingCallbacks(requests)
    checker = ContractChecker(host.get_inference_requests, host.send_response)
    with GptManager(
        source or (config, checkpoint(tuple(sorted(config.items(), key=str)))),
        model_type,
        max_beam_width,
        SchedulerConfig(policy),
        checker.get_inference_requests,
        checker.send_response,
        host.poll_stop_signal,
        host.return_batch_manager_stats,
        OptionalParams(
            cache or KvCacheConfig(max_tokens=256, tokens_per_block=16),
            device=device,
            **{"max_batch_size": 4, "peft_cache_manager_config": NO_ADAPTERS, **options},
        ),
    ) as manager:
        assert manager.wait_idle(120), manager.exception
        assert manager.audit().ok
    checker.check()
    return [host.final(request.request_id) for request in requests]


@functools.cache
def checkpoint(config):
    return random_state(dict(config))


def check_same(device, requests, **options):
    """Both give the same tokens, and numbers that differ by rounding; returns the device's."""
    found, expected = (finals(requests(), where, **options) for where in (device, "cpu"))
    for one, other in zip(found, expected, strict=True):
        assert not one.error and not other.error, (one.error, other.error)
        assert one.tensors.keys() == other.tensors.keys()
        for name, tensor in other.tensors.items():
            assert one.tensors[name].device.type == "cpu"
            if name == "request_metrics":
                continue
            torch.testing.assert_close(one.tensors[name], tensor, atol=2e-4, rtol=2e-4, msg=name)
    return found


def prompt(start, length):
    return [(start + 7 * i) % 90 for i in range(length)]
