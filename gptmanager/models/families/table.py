"""`FAMILIES`: every family of checkpoints, by the `model_type` of its config."""

from __future__ import annotations

from collections.abc import Mapping

from gptmanager.models.families.family import Family
from gptmanager.models.families.gemmas import GEMMAS
from gptmanager.models.families.latents import LATENTS
from gptmanager.models.families.layer_norms import LAYER_NORMS
from gptmanager.models.families.linears import LINEARS
from gptmanager.models.families.llamas import LLAMAS
from gptmanager.models.families.mixtures import MIXTURES

FAMILIES: Mapping[str, Family] = {
    **LLAMAS,
    **GEMMAS,
    **LAYER_NORMS,
    **MIXTURES,
    **LATENTS,
    **LINEARS,
}
