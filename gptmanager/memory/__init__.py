"""Tensors that outlive a step (the KV pool, adapter pages, weights), and checkpoint files."""

from gptmanager.memory.adapter_pool import AdapterPool, adapter_table
from gptmanager.memory.checkpoint.safetensors_reader import SafetensorsFolder
from gptmanager.memory.kv_pool import KvPool, PageShape
from gptmanager.memory.places import Place
from gptmanager.memory.slot_states import StateShape
from gptmanager.memory.weights import Weights

__all__ = [
    "AdapterPool",
    "KvPool",
    "PageShape",
    "Place",
    "SafetensorsFolder",
    "StateShape",
    "Weights",
    "adapter_table",
]
