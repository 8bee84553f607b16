"""The network: packed inputs, decoder families as a table, checkpoints."""

from gptmanager.models.batch import Batch
from gptmanager.models.layers import ModelSpec
from gptmanager.models.model import CheckpointModel, Model, load_model
from gptmanager.models.rope import Rope

__all__ = ["Batch", "CheckpointModel", "Model", "ModelSpec", "Rope", "load_model"]
