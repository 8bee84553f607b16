"""Tensors that outlive a step: the KV pool and the weights."""

from gptmanager.memory.kv_pool import KvPool
from gptmanager.memory.tensor_sources import SafetensorsFolder, StateDict, TensorInfo, TensorSource
from gptmanager.memory.weights import Place, Weights

__all__ = [
    "KvPool",
    "Place",
    "SafetensorsFolder",
    "StateDict",
    "TensorInfo",
    "TensorSource",
    "Weights",
]
