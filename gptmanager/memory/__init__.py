"""Tensors that outlive a step: the KV pool and the weights."""

from gptmanager.memory.kv_pool import KvPool
from gptmanager.memory.tensor_sources import SafetensorsFolder
from gptmanager.memory.weights import Place, Weights

__all__ = ["KvPool", "Place", "SafetensorsFolder", "Weights"]
