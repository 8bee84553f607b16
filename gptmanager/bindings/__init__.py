"""The names of `tensorrt_llm.bindings`. A program that uses that module changes only its import:

    import gptmanager.bindings as tb

Names and argument orders of the releases 0.9 to 0.14 are translated. A model is a checkpoint folder
instead of an engine. docs/porting.md lists all names and the differences.
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

_SESSION = "GptSession does not exist here: send requests through GptManager"
_ENGINE = "engines do not exist here: GptManager loads a Hugging Face folder"
_DTYPE = f"{_ENGINE}, and OptionalParams.dtype sets its dtype"
_RANKS = "set OptionalParams.parallel_config: see docs/ranks.md"
_REFUSED = {
    **dict.fromkeys(("GptSession", "GptSessionConfig", "PromptTuningParams"), _SESSION),
    **dict.fromkeys(("GenerationInput", "GenerationOutput"), _SESSION),
    **dict.fromkeys(("GptJsonConfig", "ModelConfig", "GptModelConfig", "GptModelVariant"), _ENGINE),
    **dict.fromkeys(("DataType", "QuantMode", "KVCacheType"), _DTYPE),
    **dict.fromkeys(("MpiComm", "WorldConfig"), _RANKS),
    "SamplingConfig": "set tensors of the request instead, for example request.temperature",
    "LlmRequest": "use gptmanager.scheduler.LlmRequest",
    "LlmRequestState": "use gptmanager.scheduler.LlmRequestState",
    "internal": "the internals differ: see gptmanager.scheduler",
    "DecodingMode": "a request's beam_width and sampling tensors decide",
}


def __getattr__(name: str) -> NoReturn:
    why = _REFUSED.get(name)
    text = f"gptmanager.bindings has no {name}"
    raise AttributeError(f"{text}: {why}" if why else text)


def __dir__() -> list[Any]:
    return sorted(__all__)
