"""Models: read checkpoints, map their families to a `ModelSpec`, and run the forward pass."""

from gptmanager.models.batch import Batch
from gptmanager.models.decoder.network import CheckpointModel
from gptmanager.models.model import Model, load_model
from gptmanager.models.rope_scaling import Rope
from gptmanager.models.spec import ModelSpec

__all__ = ["Batch", "CheckpointModel", "Model", "ModelSpec", "Rope", "load_model"]
