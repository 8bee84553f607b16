"""`FAMILIES`: every family of checkpoints, by the `model_type` of its config."""

from __future__ import annotations

from collections.abc import Mapping

from gptmanager.models.families.family import Family
from gptmanager.models.families.kinds.blocks import BLOCKS
from gptmanager.models.families.kinds.cohere_moe import COHERE_MOE
from gptmanager.models.families.kinds.convolutions import CONVOLUTIONS
from gptmanager.models.families.kinds.corrected_mixtures import CORRECTED_MIXTURES
from gptmanager.models.families.kinds.gemmas import GEMMAS
from gptmanager.models.families.kinds.gpts import GPTS
from gptmanager.models.families.kinds.latents import LATENTS
from gptmanager.models.families.kinds.layer_norms import LAYER_NORMS
from gptmanager.models.families.kinds.linears import LINEARS
from gptmanager.models.families.kinds.llamas import LLAMAS
from gptmanager.models.families.kinds.mixtures import MIXTURES
from gptmanager.models.families.kinds.own_code import OWN_CODE
from gptmanager.models.families.kinds.sinks import SINKS
from gptmanager.models.families.kinds.state_spaces import STATE_SPACES

FAMILIES: Mapping[str, Family] = {
    **LLAMAS,
    **GEMMAS,
    **LAYER_NORMS,
    **GPTS,
    **OWN_CODE,
    **MIXTURES,
    "cohere2_moe": COHERE_MOE,
    **SINKS,
    **CORRECTED_MIXTURES,
    **LATENTS,
    **LINEARS,
    **CONVOLUTIONS,
    **STATE_SPACES,
    **BLOCKS,
}
