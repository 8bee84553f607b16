"""Hosts of `tensorrt_llm.bindings` run here by one changed import:

    import gptmanager.bindings as tb

A translation of names and of the order of arguments, for the releases 0.9 to 0.14; a model is a
checkpoint folder instead of an engine. docs/porting.md has the table, and what differs.
"""

from __future__ import annotations

from typing import Any, NoReturn

from gptmanager import PeftCacheManagerConfig
from gptmanager.bindings import executor, tensor_names
from gptmanager.bindings.gpt_manager import GptManager
from gptmanager.bindings.memory_counters import MemoryCounters
from gptmanager.bindings.requests import InferenceRequest, NamedTensor
from gptmanager.bindings.trt_gpt_model import (
    KvCacheConfig,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)

__all__ = [
    "GptManager",
    "InferenceRequest",
    "KvCacheConfig",
    "MemoryCounters",
    "NamedTensor",
    "PeftCacheManagerConfig",
    "SchedulerPolicy",
    "TrtGptModelOptionalParams",
    "TrtGptModelType",
    "executor",
    "tensor_names",
]

_SESSION = "there is no GptSession here: requests go through GptManager"
_ENGINE = "there is no engine here: GptManager takes a Hugging Face folder"
_DTYPE = f"{_ENGINE}, whose dtype is OptionalParams.dtype"
_RANKS = "ranks are told by OptionalParams.parallel_config: see docs/ranks.md"
_REFUSED = {
    **dict.fromkeys(("GptSession", "GptSessionConfig", "PromptTuningParams"), _SESSION),
    **dict.fromkeys(("GenerationInput", "GenerationOutput"), _SESSION),
    **dict.fromkeys(("GptJsonConfig", "ModelConfig", "GptModelConfig", "GptModelVariant"), _ENGINE),
    **dict.fromkeys(("DataType", "QuantMode", "KVCacheType"), _DTYPE),
    **dict.fromkeys(("MpiComm", "WorldConfig"), _RANKS),
    "SamplingConfig": "sampling is told by tensors of the request, as request.temperature",
    "LlmRequest": "it is gptmanager.scheduler.LlmRequest",
    "LlmRequestState": "it is gptmanager.scheduler.LlmRequestState",
    "internal": "what is inside an engine differs: see gptmanager.scheduler",
    "DecodingMode": "a request's beam_width and sampling tensors decide",
}


def __getattr__(name: str) -> NoReturn:
    why = _REFUSED.get(name)
    text = f"gptmanager.bindings has no {name}"
    raise AttributeError(f"{text}: {why}" if why else text)


def __dir__() -> list[Any]:
    return sorted(__all__)
