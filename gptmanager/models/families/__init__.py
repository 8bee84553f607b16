"""A table of checkpoint families: their config fields and tensors, by name, and their meaning."""

from gptmanager.models.families.family import Family
from gptmanager.models.families.places import place_tensors
from gptmanager.models.families.table import FAMILIES

__all__ = ["FAMILIES", "Family", "place_tensors"]
