"""Run GPT-style models behind four callbacks: see `GptManager`."""

from pathlib import Path as _Path
from typing import TYPE_CHECKING

_root = _Path(__file__).resolve().parent.parent
if (_root / "setup.cfg").exists():  # a checkout: callbacks/ and cuda/ are next to this folder
    __path__.append(str(_root))

from gptmanager.environment.distribution import VERSION  # noqa: E402
from gptmanager.environment.interpreter import require_main_interpreter  # noqa: E402
from gptmanager.environment.lazy_names import lazy_names  # noqa: E402

require_main_interpreter()

if TYPE_CHECKING:
    from gptmanager.config import (
        CapacitySchedulerPolicy,
        ContextChunkingPolicy,
        Delivered,
        FinishReason,
        KvCacheConfig,
        ModelType,
        OptionalParams,
        ParallelConfig,
        PeftCacheManagerConfig,
        PromptLookup,
        SchedulerConfig,
    )
    from gptmanager.decoding.guided.guided import GuidedDecoding
    from gptmanager.decoding.processors.raw_kernel import RawKernelLogitsPostProcessor
    from gptmanager.lifecycle.state import Health, ManagerState
    from gptmanager.loop.responses import REQUEST_METRICS
    from gptmanager.manager.gpt_manager import GptManager
    from gptmanager.request.inference_request import InferenceRequest, NamedTensor, word_list

__version__ = VERSION

__all__ = [
    "REQUEST_METRICS",
    "CapacitySchedulerPolicy",
    "ContextChunkingPolicy",
    "Delivered",
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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "gptmanager.config": (
            "CapacitySchedulerPolicy",
            "ContextChunkingPolicy",
            "Delivered",
            "FinishReason",
            "KvCacheConfig",
            "ModelType",
            "OptionalParams",
            "ParallelConfig",
            "PeftCacheManagerConfig",
            "PromptLookup",
            "SchedulerConfig",
        ),
        "gptmanager.decoding.guided.guided": ("GuidedDecoding",),
        "gptmanager.decoding.processors.raw_kernel": ("RawKernelLogitsPostProcessor",),
        "gptmanager.lifecycle.state": (
            "Health",
            "ManagerState",
        ),
        "gptmanager.loop.responses": ("REQUEST_METRICS",),
        "gptmanager.manager.gpt_manager": ("GptManager",),
        "gptmanager.request.inference_request": (
            "InferenceRequest",
            "NamedTensor",
            "word_list",
        ),
    },
    (
        *("assembly", "bench", "bindings", "callbacks", "config", "cuda", "decoding", "errors"),
        *("kernels", "loop", "manager", "memory", "models", "picture", "recorder", "replay"),
        *("scheduler", "simulator", "statistics", "step", "testing"),
    ),
)
