"""Computes and logs the size of the KV cache and the length of sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from gptmanager.config import CapacitySchedulerPolicy, ModelType, OptionalParams, SchedulerConfig
from gptmanager.environment.machine.memory import free_memory_bytes
from gptmanager.errors import ConfigError
from gptmanager.kv_cache.attention_window import AttentionWindow
from gptmanager.lifecycle.log import logger
from gptmanager.memory.kv_pool import KvPool
from gptmanager.models.model import Dimensions, page_shapes, state_shapes

_GIB = 1 << 30
_CPU_FRACTION = 0.25  # share of free CPU memory if no size is given
_DEFAULT_FRACTION = 0.9
_WINDOWED_CHUNK = 256  # the fewest tokens in a chunk with an attention window
_UNBOUNDED = 1 << 62


class MemoryBudget(NamedTuple):
    """The memory for the KV cache.

    `dtype` is the dtype of the pages. If other programs use the same memory, `shared` is True: by
    default the KV cache then gets at most a quarter of `free_bytes`, and at most the blocks that a
    full batch can fill. `most_blocks` (of the KV cache) and `most_host_blocks` (of the host cache)
    are upper limits that other ranks set.
    """

    free_bytes: float
    dtype: torch.dtype = torch.float32
    shared: bool = True
    most_blocks: int = _UNBOUNDED
    most_host_blocks: int = _UNBOUNDED


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the KV cache and of sequences; lengths are in tokens.

    `pool_limited`: the pool, not the model, limits the length of a sequence. `chunked`: a context
    may run in several steps. `contiguous`: a block holds a whole sequence. `has_states`: the model
    keeps a recurrent state for each sequence. `num_snapshots`: the number of copies of such states
    that cached blocks may have. A step runs at most `max_context_length` tokens of a context.
    """

    num_blocks: int
    tokens_per_block: int
    max_seq_len: int
    max_input_len: int
    pool_limited: bool
    chunked: bool
    max_context_length: int
    num_host_blocks: int = 0
    attention_window: int | None = None
    sink_token_length: int = 0
    contiguous: bool = False
    has_states: bool = False
    num_snapshots: int = 0

    @property
    def window(self) -> AttentionWindow | None:
        """The positions that a sequence keeps, or None without an attention window."""
        if self.attention_window is None:
            return None
        return AttentionWindow(self.attention_window, self.sink_token_length, self.tokens_per_block)

    @property
    def blocks_per_sequence(self) -> int:
        return -(-self.max_seq_len // self.tokens_per_block)

    @property
    def chunk_unit(self) -> int:
        """The unit of chunk lengths, in tokens.

        Each chunk of a context, except the last chunk, is a multiple of the unit. By default, the
        unit is one block. With an attention window below `max_input_len`, every context longer than
        the window runs in chunks: the unit is then the fewest whole blocks that hold 256 tokens.
        """
        size = self.tokens_per_block
        if self.attention_window is None or self.attention_window >= self.max_input_len:
            return size
        return -(-_WINDOWED_CHUNK // size) * size


def size(
    params: OptionalParams,
    scheduler: SchedulerConfig,
    spec: Dimensions,
    model_type: ModelType = ModelType.INFLIGHT_FUSED_BATCHING,
    max_beam_width: int = 1,
    budget: MemoryBudget | None = None,
) -> Sizes:
    """Return the sizes for a model.

    The default `budget` is the free memory of the CPU. ModelType.V1 has a contiguous KV cache: one
    block of max_seq_len tokens for each sequence of a batch. V1 gets fewer blocks if max_tokens or
    the memory does not allow them all. If an option is too small or too large, raise ConfigError.
    """
    max_seq_len = wanted_seq_len(params, spec)
    contiguous = model_type is ModelType.V1
    tokens_per_block = max_seq_len if contiguous else params.kv_cache_config.tokens_per_block
    budget = budget or MemoryBudget(free_memory_bytes())
    window = params.kv_cache_config.max_attention_window
    if window is not None and window >= max_seq_len:
        window = None
    sink = params.kv_cache_config.sink_token_length or 0
    longest = max_seq_len  # the most tokens that one sequence keeps
    if window is not None:
        longest = min(longest, AttentionWindow(window, sink, tokens_per_block).num_tokens)
    num_blocks = _num_blocks(params, spec, max_seq_len, longest, contiguous, max_beam_width, budget)
    pool_limited = -(-longest // tokens_per_block) > num_blocks
    if pool_limited:
        max_seq_len = _cut_seq_len(max_seq_len, num_blocks, tokens_per_block)
    chunked = _is_chunked(params, scheduler)
    max_input_len = max_seq_len - 1
    if not chunked:  # a context runs in one step
        max_input_len = min(max_input_len, params.max_num_tokens)
    block_bytes = _block_bytes(spec, tokens_per_block, budget.dtype)
    sizes = Sizes(
        num_blocks=num_blocks,
        tokens_per_block=tokens_per_block,
        max_seq_len=max_seq_len,
        max_input_len=max_input_len,
        pool_limited=pool_limited,
        chunked=chunked,
        max_context_length=params.max_num_tokens if chunked else max_input_len,
        num_host_blocks=min(_num_host_blocks(params, block_bytes), budget.most_host_blocks),
        attention_window=window,
        sink_token_length=sink,
        contiguous=contiguous,
        has_states=bool(state_shapes(spec)),
    )
    _check_chunks(params.max_num_tokens, sizes)
    _check_generation(params, max_beam_width)
    _log(sizes, params.kv_cache_config.onboard_blocks, block_bytes)
    return sizes


def num_micro_batches(params: OptionalParams) -> int:
    """Return how many micro batches may be in flight: at least one for each pipeline stage."""
    ranks = params.parallel_config
    num_stages = 1 if ranks is None else ranks.pipeline_parallel_size
    return max(2 if params.enable_trt_overlap else 1, num_stages)


def num_slots(params: OptionalParams) -> int:
    """Return the number of slots that started requests need."""
    # With run-ahead, a request keeps its slot for one step after the launch of its last token. A
    # request that starts in this step needs another slot.
    return params.max_batch_size * num_micro_batches(params) * (1 + (params.run_ahead or 0))


def wanted_seq_len(params: OptionalParams, spec: Dimensions) -> int:
    """Return the longest sequence that options and model allow, whatever the KV cache can hold.

    Raise ConfigError if `params.max_seq_len` exceeds the model's max_position_embeddings.
    """
    longest = spec.max_position_embeddings
    if params.max_seq_len is None:
        return longest
    if params.max_seq_len > longest:
        raise ConfigError(
            f"OptionalParams.max_seq_len = {params.max_seq_len} exceeds the checkpoint's "
            f"max_position_embeddings = {longest}"
        )
    return params.max_seq_len


def _cut_seq_len(max_seq_len: int, num_blocks: int, tokens_per_block: int) -> int:
    """Reduce `max_seq_len` for a pool that cannot hold one sequence of this length.

    Return the length of the shortest sequence that needs all blocks. Longer sequences would fit,
    but programs rely on this value.
    """
    in_pool = (num_blocks - 1) * tokens_per_block + 1
    if in_pool < 2:
        raise ConfigError(
            f"a KV cache of {num_blocks} block of {tokens_per_block} tokens cannot hold one "
            f"sequence of max_seq_len = {max_seq_len}: raise KvCacheConfig.max_tokens"
        )
    logger.warning(
        "max_seq_len is too large for one sequence to fit in the KV cache: reduced to %d", in_pool
    )
    logger.warning("max_input_len is reduced to %d", in_pool - 1)
    return in_pool


def _num_blocks(
    params: OptionalParams,
    spec: Dimensions,
    max_seq_len: int,
    longest: int,
    contiguous: bool,
    max_beam_width: int,
    budget: MemoryBudget,
) -> int:
    """Return the number of blocks. `longest` is the most tokens that a sequence keeps."""
    config, free = params.kv_cache_config, budget.free_bytes
    logger.info("free memory before sizing the KV cache: %.2f GiB", free / _GIB)
    max_tokens, default_fraction = config.max_tokens, _DEFAULT_FRACTION
    if max_tokens is None and budget.shared:
        max_tokens = params.max_batch_size * max_beam_width * longest
        default_fraction = _CPU_FRACTION
    elif max_tokens is None:
        max_tokens = _UNBOUNDED
    fraction = config.free_gpu_memory_fraction or default_fraction
    tokens_per_block = config.tokens_per_block
    num_blocks = -(-max_tokens // tokens_per_block)
    if contiguous:
        tokens_per_block = max_seq_len
        num_blocks = min(max_tokens // max_seq_len, params.max_batch_size * max_beam_width)
        if not num_blocks:
            raise ConfigError(
                f"KvCacheConfig.max_tokens = {max_tokens} is less than one sequence of "
                f"max_seq_len = {max_seq_len} tokens, and ModelType.V1 needs a block for each"
            )
    block_bytes = _block_bytes(spec, tokens_per_block, budget.dtype)
    if block_bytes:
        num_blocks = min(num_blocks, int(free * fraction) // block_bytes, budget.most_blocks)
    if num_blocks < 1:
        raise ConfigError(
            f"no KV cache block of {block_bytes} bytes fits into {fraction:g} of the "
            f"{free} free bytes (KvCacheConfig.free_gpu_memory_fraction)"
        )
    return num_blocks


def _num_host_blocks(params: OptionalParams, block_bytes: int) -> int:
    size = params.kv_cache_config.host_cache_size or 0
    if size and size < block_bytes:
        raise ConfigError(
            f"KvCacheConfig.host_cache_size = {size} bytes must hold at least one block of "
            f"{block_bytes} bytes"
        )
    if not size or not block_bytes:
        return 0
    config = params.kv_cache_config
    moving_s = 2 * block_bytes / config.host_bytes_per_s
    computing_s = config.tokens_per_block / config.recompute_tokens_per_s
    if config.host_swap == "auto" and moving_s >= computing_s:
        logger.warning(
            "host_cache_size is not used: moving a block to the host and back takes %.3g s, "
            "computing its tokens again %.3g s (KvCacheConfig.host_swap = 'auto')",
            *(moving_s, computing_s),
        )
        return 0
    return size // block_bytes


def _block_bytes(spec: Dimensions, tokens_per_block: int, dtype: torch.dtype) -> int:
    return KvPool.bytes_per_block(page_shapes(spec), tokens_per_block, dtype)


def _is_chunked(params: OptionalParams, scheduler: SchedulerConfig) -> bool:
    chunked = params.enable_chunked_context
    if chunked is None:
        policy = scheduler.capacity_scheduler_policy
        # The context of a request that a journal resumes may exceed the longest prompt.
        is_resumed = params.journal_path is not None and (
            policy is not CapacitySchedulerPolicy.STATIC_BATCH
        )
        chunked = policy is CapacitySchedulerPolicy.MAX_UTILIZATION or is_resumed
    if scheduler.context_chunking_policy is not None and not chunked:
        raise ConfigError(
            "SchedulerConfig.context_chunking_policy = "
            f"{scheduler.context_chunking_policy.name} has no effect without "
            "OptionalParams.enable_chunked_context"
        )
    return chunked


def _check_chunks(max_num_tokens: int, sizes: Sizes) -> None:
    """Raise ConfigError if a step is too small for one chunk of a context."""
    unit, size = sizes.chunk_unit, sizes.tokens_per_block
    if not sizes.chunked or max_num_tokens >= min(unit, sizes.max_input_len):
        return
    reason = f"tokens_per_block = {size} tokens"
    if unit > size:
        reason = (
            f"{unit} tokens: with KvCacheConfig.max_attention_window = {sizes.attention_window} "
            f"a chunk is a number of blocks of {size} tokens, at least {_WINDOWED_CHUNK} tokens"
        )
    raise ConfigError(
        f"OptionalParams.max_num_tokens = {max_num_tokens} is less than one context chunk of "
        f"{reason}"
    )


def _check_generation(params: OptionalParams, max_beam_width: int) -> None:
    """Raise ConfigError if a step is too small for all beams, or for all drafts, of a request."""
    given, lookup = params.max_num_tokens, params.speculative_decoding_config
    if given < max_beam_width:
        raise ConfigError(
            f"OptionalParams.max_num_tokens = {given} must be at least max_beam_width = "
            f"{max_beam_width}: an iteration computes one token of each beam"
        )
    if lookup is not None and given <= lookup.max_draft_tokens:
        raise ConfigError(
            f"OptionalParams.max_num_tokens = {given} must be above PromptLookup.max_draft_tokens "
            f"= {lookup.max_draft_tokens}: an iteration computes a request's drafts and the token "
            "before them"
        )


def _log(sizes: Sizes, onboards: bool, block_bytes: int) -> None:
    num_blocks, size = sizes.num_blocks, sizes.tokens_per_block
    longest = sizes.blocks_per_sequence
    if sizes.window is not None:
        longest = min(longest, sizes.window.num_blocks)
    logger.info("number of blocks in the KV cache primary pool: %d", num_blocks)
    logger.info(
        "number of blocks in the KV cache secondary pool: %d, onboard blocks: %s",
        *(sizes.num_host_blocks, "yes" if sizes.num_host_blocks and onboards else "no"),
    )
    logger.info("max KV cache blocks per sequence: %d", longest)
    logger.info("number of tokens per block: %d", size)
    logger.info(
        "allocated %.2f GiB for %d tokens in the %s KV cache",
        num_blocks * block_bytes / _GIB,
        num_blocks * size,
        "contiguous" if sizes.contiguous else "paged",
    )
