"""The network: packed inputs, decoder families as a table, and checkpoints."""

from gptmanager.models.batch import Batch
from gptmanager.models.decoder.network import CheckpointModel
from gptmanager.models.model import Model, load_model
from gptmanager.models.rope_scaling import Rope
from gptmanager.models.spec import ModelSpec

__all__ = ["Batch", "CheckpointModel", "Model", "ModelSpec", "Rope", "load_model"]
