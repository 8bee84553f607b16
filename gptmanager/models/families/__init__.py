"""Families of checkpoints as a table: what their configs and tensors are called, and mean."""

from gptmanager.models.families.family import Family
from gptmanager.models.families.places import place_tensors
from gptmanager.models.families.table import FAMILIES

__all__ = ["FAMILIES", "Family", "place_tensors"]
