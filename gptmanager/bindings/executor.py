"""The names of `tensorrt_llm.bindings.executor` that programs with a GptManager use."""

from __future__ import annotations

from typing import NoReturn

from gptmanager import CapacitySchedulerPolicy, ContextChunkingPolicy, SchedulerConfig

__all__ = ["CapacitySchedulerPolicy", "ContextChunkingPolicy", "SchedulerConfig"]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"gptmanager.bindings.executor has no {name}: in place of an Executor, use a GptManager "
        "with a gptmanager.callbacks.RequestQueue"
    )
