"""The names of `tensorrt_llm.bindings.executor` that a host of GptManager uses."""

from gptmanager import CapacitySchedulerPolicy, ContextChunkingPolicy, SchedulerConfig

__all__ = ["CapacitySchedulerPolicy", "ContextChunkingPolicy", "SchedulerConfig"]
