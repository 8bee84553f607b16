"""A table of checkpoint families: the names and meaning of their config fields and tensors."""

from gptmanager.models.families.family import Family
from gptmanager.models.families.places import place_tensors
from gptmanager.models.families.table import FAMILIES

__all__ = ["FAMILIES", "Family", "place_tensors"]
