"""The names of `tensorrt_llm.bindings.executor` that programs with a GptManager use."""

from gptmanager import CapacitySchedulerPolicy, ContextChunkingPolicy, SchedulerConfig

__all__ = ["CapacitySchedulerPolicy", "ContextChunkingPolicy", "SchedulerConfig"]
