"""`TrtGptModelOptionalParams` and its enums, and their translation to gptmanager's options."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any

import gptmanager
from gptmanager import (
    CapacitySchedulerPolicy,
    ModelType,
    OptionalParams,
    PeftCacheManagerConfig,
    SchedulerConfig,
)
from gptmanager.errors import ConfigError


class TrtGptModelType(IntEnum):
    """`gptmanager.ModelType` with the names of `tensorrt_llm.bindings`."""

    V1 = ModelType.V1
    InflightBatching = ModelType.INFLIGHT_BATCHING
    InflightFusedBatching = ModelType.INFLIGHT_FUSED_BATCHING


class SchedulerPolicy(IntEnum):
    """`gptmanager.CapacitySchedulerPolicy` with the names of older TensorRT-LLM releases."""

    MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
    GUARANTEED_NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    GUARANTEED_COMPLETION = GUARANTEED_NO_EVICT


@dataclass(slots=True)
class KvCacheConfig(gptmanager.KvCacheConfig):
    """A `gptmanager.KvCacheConfig`; `max_attention_window` may also be a list of equal values."""

    max_attention_window: Any = None


class TrtGptModelOptionalParams(OptionalParams):
    """A `gptmanager.OptionalParams` with the argument order of older TensorRT-LLM releases.

    `keywords` are the other fields.
    """

    __slots__ = ()

    def __init__(
        self,
        kv_cache_config: gptmanager.KvCacheConfig | None = None,
        enable_trt_overlap: bool = False,
        device_ids: list[int] | None = None,
        normalize_log_probs: bool = True,
        enable_chunked_context: bool | None = None,
        peft_cache_manager_config: PeftCacheManagerConfig | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(
            kv_cache_config=kv_cache_config or KvCacheConfig(),
            enable_trt_overlap=enable_trt_overlap,
            device_ids=device_ids,
            normalize_log_probs=normalize_log_probs,
            enable_chunked_context=enable_chunked_context,
            peft_cache_manager_config=peft_cache_manager_config or PeftCacheManagerConfig(),
            **{"scheduler_config": SchedulerConfig(), **keywords},
        )


def translated(params: OptionalParams) -> tuple[int, SchedulerConfig, OptionalParams]:
    """Return the maximum beam width, the scheduler and the other options, for GptManager.

    Raise ConfigError if `params` is not an OptionalParams, or if its KV cache config has a list of
    different attention windows.
    """
    if not isinstance(params, OptionalParams):
        raise ConfigError(
            "optional_params must be a TrtGptModelOptionalParams, got a value of type "
            f"{type(params).__name__}"
        )
    values = {field.name: getattr(params, field.name) for field in fields(OptionalParams)}
    max_beam_width = values.pop("max_beam_width")
    scheduler = values.pop("scheduler_config") or SchedulerConfig()
    values["kv_cache_config"] = _kv_cache(values["kv_cache_config"])
    return 1 if max_beam_width is None else max_beam_width, scheduler, OptionalParams(**values)


def with_policy(scheduler: SchedulerConfig, policy: Any) -> SchedulerConfig:
    """Return a copy of `scheduler` with this capacity policy.

    Raise ConfigError if `policy` is not a capacity policy.
    """
    if not isinstance(policy, (SchedulerPolicy, CapacitySchedulerPolicy)):
        raise ConfigError(f"scheduler_policy must be a SchedulerPolicy, got {policy!r}")
    return replace(scheduler, capacity_scheduler_policy=CapacitySchedulerPolicy(int(policy)))


def _kv_cache(config: Any) -> Any:
    if not isinstance(config, KvCacheConfig):
        return config
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    window = values["max_attention_window"]
    if isinstance(window, (list, tuple)):
        if len(set(window)) > 1:
            raise ConfigError(
                f"KvCacheConfig.max_attention_window = {window}: all layers must have the same "
                "window; pass one length"
            )
        values["max_attention_window"] = window[0] if window else None
    return gptmanager.KvCacheConfig(**values)
