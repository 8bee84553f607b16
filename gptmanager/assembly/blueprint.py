"""`Blueprint`: what a loop is built of, but for its model and its world.

With it a recorded run can be built once more. Decides nothing: every default is resolved already.
"""

from __future__ import annotations

from dataclasses import dataclass

from gptmanager.assembly.sizing import Sizes
from gptmanager.config import ModelType, OptionalParams, SchedulerConfig
from gptmanager.kv_cache import KvCacheManager
from gptmanager.loop.allocation import Allocator


@dataclass(frozen=True, slots=True)
class Blueprint:
    """All that decides how a loop schedules: it can be built of this without the model.

    `custom_scheduler`: the name of `SchedulerConfig.create_scheduler`, which only code can hold.
    """

    params: OptionalParams
    scheduler: SchedulerConfig
    sizes: Sizes
    vocab_size: int
    custom_scheduler: str = ""
    model_type: ModelType = ModelType.INFLIGHT_FUSED_BATCHING
    max_beam_width: int = 1
    hidden_size: int = 0  # of the embeddings that a request may bring; 0: none

    @property
    def num_micro_batches(self) -> int:
        return 2 if self.params.enable_trt_overlap else 1

    @property
    def max_num_requests(self) -> int:
        """How many requests may be started at the same time."""
        return self.params.max_batch_size * self.num_micro_batches

    @property
    def max_active(self) -> int | None:
        """How many requests may be active; None: Get is never short of room."""
        most = self.params.max_active_requests
        return self.max_num_requests if most == "auto" else most

    @property
    def num_slots(self) -> int:
        # under run-ahead a request whose last token is launched keeps its slot for one more step
        return self.max_num_requests * (1 + (self.params.run_ahead or 0))

    def allocator(self) -> Allocator:
        """Empty accounts: nothing is held."""
        # the sink's blocks are whole, so its tokens need no padding
        window = self.sizes.window
        config = self.params.kv_cache_config
        kv_cache = KvCacheManager(
            self.sizes.num_blocks,
            self.sizes.tokens_per_block,
            enable_block_reuse=config.enable_block_reuse,
            enable_partial_reuse=config.enable_partial_reuse,
            copy_on_partial_reuse=config.copy_on_partial_reuse,
            num_host_blocks=self.sizes.num_host_blocks,
            onboard_blocks=config.onboard_blocks,
            secondary_offload_min_priority=config.secondary_offload_min_priority,
            max_attention_window=None if window is None else window.num_tokens,
        )
        return Allocator(kv_cache, self.num_slots, window)
