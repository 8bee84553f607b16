"""Set or refuse options of a manager if the model keeps a recurrent state for each sequence.

A recurrent state cannot go back to an earlier token. Cached blocks do not contain it, so they can
only be reused up to a block with a snapshot, a copy of the state after the block.
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
# If state_snapshots is None, a sequence gets two snapshots, one after its prompt and one after its
# answer. In all there are at least _FEWEST_SNAPSHOTS, and they have at most _SNAPSHOT_SHARE of the
# memory that the states leave free.
_SNAPSHOTS_PER_SLOT, _FEWEST_SNAPSHOTS = 2, 32
_SNAPSHOT_SHARE = 0.25


def settle_reuse(params: OptionalParams, spec: Dimensions, model_type: ModelType) -> OptionalParams:
    """Return the params with `enable_block_reuse` True or False.

    If it is None, block reuse is on, except for ModelType.V1, and for a model that keeps a state if
    `state_snapshots` is 0.
    """
    cache = params.kv_cache_config
    if cache.enable_block_reuse is not None:
        return params
    has_snapshots = not state_shapes(spec) or cache.state_snapshots != 0
    is_reused = has_snapshots and model_type is not ModelType.V1
    cache = replace(cache, enable_block_reuse=is_reused)
    return replace(params, kv_cache_config=cache)


def without_states(
    budget: MemoryBudget, spec: Dimensions, params: OptionalParams
) -> tuple[MemoryBudget, int]:
    """Return the memory that the states leave for KV cache blocks, and the number of snapshots.

    Raise ConfigError if nothing is left.
    """
    shapes = state_shapes(spec)
    if not shapes:
        return budget, 0
    count, each = num_slots(params), state_bytes(shapes)
    left = budget.free_bytes - count * each
    if left <= 0:
        raise ConfigError(
            f"OptionalParams.max_batch_size = {params.max_batch_size}: the states of {count} "
            f"sequences need {count * each} bytes, and {budget.free_bytes:.0f} bytes are free for "
            "them and for the KV cache"
        )
    snapshots, given = 0, params.kv_cache_config.state_snapshots
    if params.kv_cache_config.enable_block_reuse:
        useful = max(_FEWEST_SNAPSHOTS, _SNAPSHOTS_PER_SLOT * count)
        fitting = int(left * _SNAPSHOT_SHARE) // max(1, each)
        snapshots = max(1, min(useful, fitting)) if given is None else given
    logger.info(
        "the model keeps a state of %d bytes for each sequence: %.2f MiB for %d sequences and %d "
        "snapshots of them",
        *(each, (count + snapshots) * each / _MIB, count, snapshots),
    )
    if snapshots * each >= left:
        if given is None:
            raise ConfigError(
                f"KvCacheConfig.enable_block_reuse needs a snapshot of {each} bytes, and "
                f"{left:.0f} bytes are free for it and for the KV cache: switch reuse off, or "
                f"lower OptionalParams.max_batch_size = {params.max_batch_size}"
            )
        raise ConfigError(
            f"KvCacheConfig.state_snapshots = {given}: they need {given * each} bytes, and "
            f"{left:.0f} bytes are free for them and for the KV cache"
        )
    return budget._replace(free_bytes=left - snapshots * each), snapshots


def refuse_for_states(params: OptionalParams, max_beam_width: int, spec: Dimensions) -> None:
    """Raise ConfigError for the options that contradict the model's state, or its lack of one."""
    cache, shared = params.kv_cache_config, "it cannot be shared by sequences"
    if not state_shapes(spec):
        if cache.state_snapshots is not None:
            raise ConfigError(
                f"KvCacheConfig.state_snapshots = {cache.state_snapshots} is refused: the model "
                "keeps no state for each sequence"
            )
        return
    if cache.enable_block_reuse and cache.state_snapshots == 0:
        raise ConfigError(
            "KvCacheConfig.enable_block_reuse = True needs state_snapshots of at least 1: the "
            "model keeps a state for each sequence, and cached blocks do not contain it"
        )
    back = "it cannot go back to the token before a rejected draft"
    host = "the host tier has no snapshots of it"
    for name, value, reason in (
        ("max_beam_width", max_beam_width if max_beam_width > 1 else None, shared),
        ("KvCacheConfig.host_cache_size", cache.host_cache_size or None, host),
        ("OptionalParams.speculative_decoding_config", params.speculative_decoding_config, back),
        ("OptionalParams.parallel_config", params.parallel_config, "ranks do not split it"),
    ):
        if value is not None:
            raise ConfigError(
                f"{name} = {value!r} is refused: the model keeps a state for each sequence, and "
                f"{reason}"
            )
