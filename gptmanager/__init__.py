"""Run GPT-style models behind four callbacks: see `GptManager`."""

from pathlib import Path as _Path

_root = _Path(__file__).resolve().parent.parent
if (_root / "setup.cfg").exists():  # a checkout: callbacks/ and cuda/ lie beside this folder
    __path__.append(str(_root))

from gptmanager.config import (  # noqa: E402
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    FinishReason,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    ParallelConfig,
    PeftCacheManagerConfig,
    PromptLookup,
    SchedulerConfig,
)
from gptmanager.decoding.guided import GuidedDecoding  # noqa: E402
from gptmanager.decoding.raw_kernel import RawKernelLogitsPostProcessor  # noqa: E402
from gptmanager.lifecycle.state import Health, ManagerState  # noqa: E402
from gptmanager.loop.responses import REQUEST_METRICS  # noqa: E402
from gptmanager.manager.gpt_manager import GptManager  # noqa: E402
from gptmanager.request.inference_request import (  # noqa: E402
    InferenceRequest,
    NamedTensor,
    word_list,
)

__version__ = "0.1.0"

__all__ = [
    "REQUEST_METRICS",
    "CapacitySchedulerPolicy",
    "ContextChunkingPolicy",
    "FinishReason",
    "GptManager",
    "GuidedDecoding",
    "Health",
    "InferenceRequest",
    "KvCacheConfig",
    "ManagerState",
    "ModelType",
    "NamedTensor",
    "OptionalParams",
    "ParallelConfig",
    "PeftCacheManagerConfig",
    "PromptLookup",
    "RawKernelLogitsPostProcessor",
    "SchedulerConfig",
    "word_list",
]
