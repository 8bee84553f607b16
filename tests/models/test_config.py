"""Options: refused by name with the value and the limit, never ignored."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gptmanager import (
    CapacitySchedulerPolicy,
    KvCacheConfig,
    OptionalParams,
    ParallelConfig,
    PeftCacheManagerConfig,
    SchedulerConfig,
)
from gptmanager.assembly.options import checked_optional_params, checked_scheduler_config
from gptmanager.errors import ConfigError


def test_the_documented_defaults_are_taken():
    params = checked_optional_params(OptionalParams())
    assert (params.max_batch_size, params.max_num_tokens, params.idle_poll_s) == (256, 8192, 0.01)
    assert params.kv_cache_config.tokens_per_block == 64
    peft = params.peft_cache_manager_config
    assert (peft.max_pages_per_block_device, peft.device_cache_percent) == (24, 0.05)
    policy = checked_scheduler_config(SchedulerConfig()).capacity_scheduler_policy
    assert policy is CapacitySchedulerPolicy.GUARANTEED_NO_EVICT


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_batch_size": 0}, "max_batch_size = 0 must be an integer from 1"),
        (
            {"max_batch_size": 2**31},
            "max_batch_size = 2147483648 must be an integer from 1 to 2147",
        ),
        ({"max_batch_size": 2.5}, "max_batch_size = 2.5 must be an integer"),
        ({"max_batch_size": True}, "max_batch_size = True must be an integer"),
        ({"max_batch_size": 256.0}, "max_batch_size = 256.0 must be an integer"),
        ({"seed": False}, "seed = False must be an integer"),
        ({"enable_chunked_context": 1}, "enable_chunked_context = 1 must be None, True"),
        ({"max_num_tokens": None}, "max_num_tokens = None must be an integer"),
        (
            {"max_active_requests": "all"},
            "max_active_requests = 'all' must be an integer from 1 to 2147483647, or 'auto' or Non",
        ),
        ({"journal_sync": "all"}, "must be a number from 1.0 to 60000.0, or 'always' or 'never'"),
        ({"device_ids": [0]}, "refused: it has no effect in this library: a manager has one dev"),
        (
            {"kv_cache_config": KvCacheConfig(enable_block_reuse="on")},
            "KvCacheConfig.enable_block_reuse = 'on' must be None, True or False",
        ),
        ({"run_ahead": 2}, "run_ahead = 2 must be an integer from 0 to 1"),
        ({"idle_poll_s": -1.0}, "idle_poll_s = -1.0 must be a number from 0.0 to 1000000.0, or N"),
        ({"idle_poll_s": float("nan")}, "idle_poll_s = nan"),
        ({"idle_poll_s": 1e12}, "idle_poll_s = 1000000000000.0"),
        ({"seed": 2**64}, "seed = 18446744073709551616"),
        ({"dtype": "int8"}, "dtype = 'int8' must be one of"),
        ({"deterministic": "no"}, "deterministic = 'no' must be True or False"),
        ({"enable_chunked_context": "off"}, "enable_chunked_context = 'off'"),
        ({"enable_trt_overlap": True, "run_ahead": 1}, "set only one of them"),
        ({"gpu_weights_percent": 0.5}, "gpu_weights_percent = 0.5 is refused: it has no effect"),
        ({"debug_config": np.zeros(2)}, "debug_config"),
        ({"gather_context_logits": 1}, "gather_context_logits = 1 must be True"),
        (
            {"kv_cache_config": None},
            "OptionalParams.kv_cache_config = None, expected KvCacheConfig",
        ),
        ({"kv_cache_config": KvCacheConfig(max_tokens=0)}, "KvCacheConfig.max_tokens = 0"),
        ({"kv_cache_config": KvCacheConfig(use_uvm=True)}, "KvCacheConfig.use_uvm = True"),
        (
            {"kv_cache_config": KvCacheConfig(dtype="int8"), "device": "cuda"},
            "KvCacheConfig.dtype = 'int8' must be one of",
        ),
        (
            {"kv_cache_config": KvCacheConfig(dtype="fp8")},
            "KvCacheConfig.dtype = 'fp8' is refused with OptionalParams.device = None",
        ),
        (
            {"kv_cache_config": KvCacheConfig(host_cache_size=1)},
            "host_cache_size = 1 needs enable_",
        ),
        (
            {"kv_cache_config": KvCacheConfig(onboard_blocks=False)},
            "onboard_blocks = False needs host_cache_size",
        ),
        (
            {"kv_cache_config": KvCacheConfig(secondary_offload_min_priority=3)},
            "secondary_offload_min_priority = 3 needs host_cache_size",
        ),
        (
            {"kv_cache_config": KvCacheConfig(secondary_offload_min_priority=101)},
            "secondary_offload_min_priority = 101 must be an integer from 0 to 100",
        ),
        (
            {"kv_cache_config": KvCacheConfig(free_gpu_memory_fraction=1.0)},
            "free_gpu_memory_fraction = 1.0 must be a float above 0 and below 1",
        ),
        (
            {"kv_cache_config": KvCacheConfig(free_gpu_memory_fraction="0.5")},
            "free_gpu_memory_fraction = '0.5'",
        ),
        ({"on_progress": "weights"}, "OptionalParams.on_progress = 'weights' is not callable"),
        (
            {"peft_cache_manager_config": PeftCacheManagerConfig(num_put_workers=0)},
            "PeftCacheManagerConfig.num_put_workers = 0 must be an integer from 1 to 256",
        ),
        (
            {"parallel_config": ParallelConfig(tensor_parallel_size=0)},
            "ParallelConfig.tensor_parallel_size = 0 must be an integer from 1 to 1024",
        ),
        (
            {"parallel_config": ParallelConfig(timeout_s="30")},
            "ParallelConfig.timeout_s = '30' must be a number",
        ),
        (
            {"parallel_config": ParallelConfig(pipeline_parallel_size=2), "run_ahead": 1},
            "run_ahead = 1 is refused with ParallelConfig.pipeline_parallel_size = 2",
        ),
        ({"parallel_config": 2}, "OptionalParams.parallel_config = 2, expected ParallelConfig"),
    ],
)
def test_what_cannot_be_is_named(options, text):
    with pytest.raises(ConfigError, match=text):
        checked_optional_params(OptionalParams(**options))


class Unwritable:
    def __repr__(self):
        raise RuntimeError("no text")


WORDS = {
    "weights_dtype": "int8",
    "head_dtype": "int8",
    "model_backend": "auto",
    "on_hang": "log",
    "journal_on_full": "refuse",
    "journal_sync": "never",
    "attention_provider": "own",
}


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("array", [lambda word: [word], lambda word: [word, word], lambda word: []])
def test_an_array_of_words_is_not_a_word(name, array):
    """NumPy finds that an array of one word equals the word."""
    value = np.array(array(WORDS[name]))
    needed = {"weights_dtype": "int4"} if name == "head_dtype" else {}
    with pytest.raises(ConfigError, match=rf"OptionalParams.{name} .*array\(\["):
        checked_optional_params(OptionalParams(**{name: value, **needed}))


@pytest.mark.parametrize("field", ["host_swap", "dtype"])
def test_an_array_of_words_is_not_a_word_for_the_cache(field):
    cache = KvCacheConfig(**{field: np.array(["auto", "fp8"])})
    with pytest.raises(ConfigError, match=rf"KvCacheConfig.{field} = array\(\["):
        checked_optional_params(OptionalParams(cache, device="emulator"))


@pytest.mark.parametrize(
    "name", ["weights_dtype", "dtype", "device", "cuda_graphs", "max_batch_size", "debug_config"]
)
def test_values_that_cannot_be_written_out_and_long_ones_are_refused_in_short(name):
    for value in (Unwritable(), "x" * 10**6):
        with pytest.raises(ConfigError) as error:
            checked_optional_params(OptionalParams(**{name: value}))
        assert f"OptionalParams.{name} = " in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("name", ["enableChunkedContext", "max_batchsize"])
def test_an_unknown_field_raises_where_it_is_set(name):
    with pytest.raises(AttributeError):
        setattr(OptionalParams(), name, 3)


def test_equal_values_of_other_types_are_taken():
    params = OptionalParams(
        max_batch_size=np.int64(8), dtype=torch.float32, device=torch.device("cpu"), idle_poll_s=1
    )
    params = checked_optional_params(params)
    assert params.dtype == "float32" and params.device == "cpu"


def test_a_scheduler_config_is_checked():
    with pytest.raises(ConfigError, match=r"pass SchedulerConfig\(CapacitySchedulerPolicy\.STATIC"):
        checked_scheduler_config(CapacitySchedulerPolicy.STATIC_BATCH)
    with pytest.raises(ConfigError, match="capacity_scheduler_policy must be a Cap"):
        checked_scheduler_config(SchedulerConfig(1))
    with pytest.raises(ConfigError, match="create_scheduler = 3 is not callable"):
        checked_scheduler_config(SchedulerConfig(create_scheduler=3))
