"""Set or refuse options of a manager if the model keeps a recurrent state for each sequence.

A recurrent state cannot go back to an earlier token, and cached blocks do not contain the state.
"""

from __future__ import annotations

from dataclasses import replace

from gptmanager.assembly.sizing import MemoryBudget, num_slots
from gptmanager.config import ModelType, OptionalParams
from gptmanager.errors import ConfigError
from gptmanager.lifecycle.log import logger
from gptmanager.memory.slot_states import state_bytes
from gptmanager.models.model import Dimensions, state_shapes

_MIB = 1 << 20


def settle_reuse(params: OptionalParams, spec: Dimensions, model_type: ModelType) -> OptionalParams:
    """Return the params with `enable_block_reuse` True or False.

    If it is None, block reuse is on, except for ModelType.V1 and for a model that keeps a state.
    """
    has_states = bool(state_shapes(spec))
    cache = params.kv_cache_config
    if cache.enable_block_reuse is not None:
        return params
    is_reused = not has_states and model_type is not ModelType.V1
    if has_states:
        logger.info(
            "block reuse is off: the model keeps a state for each sequence, which cached blocks do "
            "not contain"
        )
    cache = replace(cache, enable_block_reuse=is_reused)
    return replace(params, kv_cache_config=cache)


def without_states(budget: MemoryBudget, spec: Dimensions, params: OptionalParams) -> MemoryBudget:
    """Return the memory budget that is left for KV cache blocks after the states of all slots.

    Raise ConfigError if nothing is left.
    """
    shapes = state_shapes(spec)
    if not shapes:
        return budget
    count, each = num_slots(params), state_bytes(shapes)
    logger.info(
        "the model keeps a state of %d bytes for each sequence: %.2f MiB for %d sequences",
        *(each, count * each / _MIB, count),
    )
    if count * each >= budget.free_bytes:
        raise ConfigError(
            f"OptionalParams.max_batch_size = {params.max_batch_size}: the states of {count} "
            f"sequences need {count * each} bytes, and {budget.free_bytes:.0f} bytes are free for "
            "them and for the KV cache"
        )
    return budget._replace(free_bytes=budget.free_bytes - count * each)


def refuse_for_states(params: OptionalParams, max_beam_width: int, spec: Dimensions) -> None:
    """If the model keeps a state, raise ConfigError for the options that a state rules out."""
    if not state_shapes(spec):
        return
    cache, shared = params.kv_cache_config, "it cannot be shared by sequences"
    back = "it cannot go back to the token before a rejected draft"
    missing = "cached blocks do not contain it"
    for name, value, reason in (
        ("max_beam_width", max_beam_width if max_beam_width > 1 else None, shared),
        ("KvCacheConfig.enable_block_reuse", cache.enable_block_reuse or None, missing),
        ("KvCacheConfig.host_cache_size", cache.host_cache_size or None, missing),
        ("OptionalParams.speculative_decoding_config", params.speculative_decoding_config, back),
        ("OptionalParams.parallel_config", params.parallel_config, "ranks do not split it"),
    ):
        if value is not None:
            raise ConfigError(
                f"{name} = {value!r} is refused: the model keeps a state for each sequence, and "
                f"{reason}"
            )
