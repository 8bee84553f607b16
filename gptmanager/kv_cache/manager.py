"""`KvCacheManager`: whether there are blocks for what a scheduler wants to run.

Decides nothing: it answers, from the accounts of the sequences and from what requests need.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import takewhile

from gptmanager.arguments import at_least, flag
from gptmanager.errors import ConfigError
from gptmanager.kv_cache.block import KvCacheReport, LedgerError, WhatIf, audit
from gptmanager.kv_cache.needs import BlockNeeds, CrossBlockNeeds
from gptmanager.kv_cache.reuse import BlockReuse, ReuseCounts
from gptmanager.kv_cache.sequences import KvSequences
from gptmanager.kv_cache.tiers import HostCounts
from gptmanager.request.llm_request import RETENTION_PRIORITIES, LlmRequest, LlmRequestState

_IN_PROGRESS = LlmRequestState.GENERATION_IN_PROGRESS


class KvCacheManager(KvSequences):
    """Counts blocks of `tokens_per_block` positions; ids are request ids.

    *For capacity schedulers.* Who promises completion compares the remaining blocks
    (`get_remaining_blocks_to_completion`, `sum_remaining_blocks_to_completion`) with the free
    ones, or the needed resource, which includes what is held, with `get_max_resource_count`;
    never across. Who may pause calls `start_scheduling`, adds up `get_needed_blocks_one_step` of
    what it takes, asks `scheduling_has_free_blocks(sum)`, and `scheduling_remove_sequence` for a
    victim; none of these touches the real accounts. A request whose needed resource exceeds
    `get_max_resource_count` could not run even alone.

    *Block reuse.* Blocks found in the cache need not be taken if a live sequence holds their
    beginning: they are not in the needs of a request that has not started. Who may pause says
    `scheduling_add_sequence` for such a request, so that a later victim does not free them.

    *Priorities.* Of the cached blocks that are free those of the lowest priority go first. What a
    request stores has its `retention_priority`, from 0 to 100, 35 unless something else is said.

    *Host tier.* With `num_host_blocks`, whose ids begin at `num_blocks`, what a cached block holds
    moves to one of those when the block is handed out, if it has `min_offload_tokens` and its
    priority is at least `secondary_offload_min_priority`. With `onboard_blocks` it is found there,
    and takes a block of the pool again, as if it were not found, when a request that shares it
    starts. Only blocks that nobody holds move. The copies are returned by what hands out blocks;
    see `take_moves`.

    *Attention window.* A sequence of more than `max_attention_window` tokens is cyclic: a new
    token lies where the oldest one lay, and nothing grows. Beams share their prompt's blocks
    there too, so who executes must not let beams pass the window; `fork` refuses them. A request
    that may become cyclic neither reuses nor is reused.

    *Sink tokens.* The first `sink_token_length` tokens stay for ever. They are padded to whole
    blocks at the front, so that position = token + padding and the others begin on a block.

    *Cross.* `cross=True` counts a cross attention cache: a request needs `encoder_len` positions
    from its first context chunk on, shared by all beams, and never more.
    """

    __slots__ = ("_what_if",)

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int = 64,
        *,
        max_attention_window: int | None = None,
        sink_token_length: int = 0,
        enable_block_reuse: bool = False,
        enable_partial_reuse: bool = True,
        copy_on_partial_reuse: bool = True,
        cross: bool = False,
        num_host_blocks: int = 0,
        onboard_blocks: bool = True,
        min_offload_tokens: int = 1,
        secondary_offload_min_priority: int | None = None,
    ) -> None:
        num_blocks = at_least(1, "num_blocks", num_blocks)
        flags = {
            "enable_block_reuse": enable_block_reuse,
            "enable_partial_reuse": enable_partial_reuse,
            "copy_on_partial_reuse": copy_on_partial_reuse,
            "cross": cross,
            "onboard_blocks": onboard_blocks,
        }
        for name, value in flags.items():
            flag(name, value)
        num_host_blocks = at_least(0, "num_host_blocks", num_host_blocks)
        min_offload_tokens = at_least(0, "min_offload_tokens", min_offload_tokens)
        if num_host_blocks and not enable_block_reuse:
            raise ConfigError(f"num_host_blocks = {num_host_blocks} needs enable_block_reuse")
        least = secondary_offload_min_priority
        if least is not None:
            least = at_least(0, "secondary_offload_min_priority", least, RETENTION_PRIORITIES[1])
        needs = (CrossBlockNeeds if cross else BlockNeeds)(
            tokens_per_block, max_attention_window, sink_token_length
        )
        reuse = None
        if enable_block_reuse:
            _check_reuse(needs, sink_token_length)
            reuse = BlockReuse(
                num_blocks,
                needs.tokens_per_block,
                max_tokens=needs.window,
                enable_partial_reuse=enable_partial_reuse,
                copy_on_partial_reuse=copy_on_partial_reuse,
                num_host_blocks=num_host_blocks,
                onboard_blocks=onboard_blocks,
                min_offload_tokens=min_offload_tokens,
                min_offload_priority=least or 0,
            )
        super().__init__(num_blocks, needs.tokens_per_block, needs, reuse)
        self.start_scheduling()

    def reset(self) -> None:
        super().reset()
        self.start_scheduling()

    # Proof ------------------------------------------------------------------------------------

    def audit(self) -> KvCacheReport:
        """Everything counted anew, each held block with its owners."""
        report = audit(
            self._pool,
            self._sequences.values(),
            tokens_per_block=self.tokens_per_block,
            max_slots=self._needs.max_slots,
            private_tails=self._needs.grows,
        )
        if self._reuse is None:
            return report
        problem = report.problem or self._reuse.problem(self._sequences.values())
        host = self._reuse.host_counts
        return replace(
            report,
            problem=problem,
            cached=self._reuse.counts.cached_blocks,
            host_total=host.total_blocks,
            host_free=host.free_blocks,
            host_used=host.total_blocks - host.free_blocks,
        )

    def check(self) -> None:
        """Raises LedgerError, naming block and owner, unless every count agrees with the tables."""
        problem = self.audit().problem
        if problem is not None:
            raise LedgerError(problem)

    # What requests need ---------------------------------------------------------------------

    def get_max_resource_count(self) -> int:
        """Blocks of the pool, free or not."""
        return self.num_blocks

    @property
    def max_kept_tokens(self) -> int:
        """Tokens of a sequence that have a place: from there on a new one takes no block."""
        return self._needs.window

    def get_num_free_blocks(self) -> int:
        return len(self._pool.free)

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """Blocks that the request fills in its whole life, INCLUDING what it holds already."""
        return self._needs.whole_life(request)

    def get_remaining_blocks_to_completion(self, request: LlmRequest) -> int:
        """Blocks that the request must still take to come to its end: whole life minus held."""
        held = self._sequences.get(request.request_id)
        if held is None:
            needed = self._needs.remaining(request, 0)
            if self._reuse is None or request.state >= _IN_PROGRESS:
                return needed
            return needed - len(self._held_prefix(request, self._pool.ref_counts.__getitem__))
        if held.life_tokens == request.prompt_len + request.max_new_tokens:
            return held.remaining_blocks
        return self._needs.remaining(request, len(held.tables[0]))

    def sum_remaining_blocks_to_completion(self, requests: Iterable[LlmRequest]) -> int:
        """The sum of `get_remaining_blocks_to_completion` over `requests`, in one go."""
        find = self._sequences.get
        total = 0
        for request in requests:
            held = find(request.request_id)
            if held and held.life_tokens == request.prompt_len + request.max_new_tokens:
                total += held.remaining_blocks
            else:
                total += self.get_remaining_blocks_to_completion(request)
        return total

    def get_needed_blocks_one_step(
        self, request: LlmRequest, two_step_lookahead: bool = False
    ) -> int:
        """Blocks that the request takes if it runs now: one step, or two with the lookahead."""
        needed = self._needs.one_step(request, two_step_lookahead)
        if needed and self._reuse is not None and request.state < _IN_PROGRESS:
            needed -= len(self._held_prefix(request, self._what_if.is_held))
        return needed

    def sum_needed_blocks_one_step(
        self, requests: Iterable[LlmRequest], two_step_lookahead: bool = False
    ) -> int:
        """The sum of `get_needed_blocks_one_step` over generating `requests`, in one go."""
        return self._needs.sum_one_step(requests, two_step_lookahead)

    def most_blocks_to_completion(self, requests: Iterable[LlmRequest]) -> int:
        """No less than `get_remaining_blocks_to_completion` of all of `requests`; much faster."""
        return self._needs.most_to_completion(requests)

    def most_blocks_one_step(
        self, requests: Iterable[LlmRequest], two_step_lookahead: bool = False
    ) -> int:
        """No less than `get_needed_blocks_one_step` of all of `requests`; much faster."""
        return self._needs.most_in_one_step(requests, two_step_lookahead)

    # What if --------------------------------------------------------------------------------

    def start_scheduling(self) -> None:
        """Begin a what-if from the present accounts; the one before it is forgotten."""
        self._what_if = WhatIf(self._pool)

    def scheduling_remove_sequence(self, request_id: int) -> None:
        """As if it were removed: what only it held is free. Who holds nothing frees nothing."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._what_if.remove(sequence)

    def scheduling_has_free_blocks(self, num_required: int = 1) -> bool:
        return num_required <= self._what_if.num_free

    @property
    def scheduling_num_free_blocks(self) -> int:
        return self._what_if.num_free

    def scheduling_add_sequence(self, request: LlmRequest) -> None:
        """As if it had started, as far as it shares what a live sequence holds."""
        if self._reuse is not None:
            self._what_if.share(self._held_prefix(request, self._what_if.is_held))

    # Block reuse ----------------------------------------------------------------------------

    @property
    def enable_block_reuse(self) -> bool:
        return self._reuse is not None

    @property
    def reuse_counts(self) -> ReuseCounts:
        return ReuseCounts() if self._reuse is None else self._reuse.counts

    @property
    def host_counts(self) -> HostCounts:
        return HostCounts() if self._reuse is None else self._reuse.host_counts

    def get_reusable_tokens(self, request: LlmRequest) -> int:
        """Tokens of the full cached blocks that the request would find if it started now."""
        if self._reuse is None or not self._reuse.applies_to(request):
            return 0
        return len(self._reuse.cached_blocks(request)) * self.tokens_per_block

    def get_all_reusable_tokens(self, requests: Sequence[LlmRequest]) -> list[int]:
        """`get_reusable_tokens` of each, in one go."""
        if self._reuse is None:
            return [0] * len(requests)
        return [count * self.tokens_per_block for count in self._reuse.all_cached(requests)]

    def find_new_context_block(self, request: LlmRequest) -> Hashable | None:
        """The prompt up to and including its first full block that is not cached; None: all are.

        An opaque key, to be compared with those of other requests before anything changes. None
        also for a request that takes no part in reuse.
        """
        if self._reuse is None or not self._reuse.applies_to(request):
            return None
        return self._reuse.first_missing(request)

    def find_new_context_blocks(self, requests: Sequence[LlmRequest]) -> Sequence[Hashable | None]:
        """`find_new_context_block` of each, in one go."""
        return [None] * len(requests) if self._reuse is None else self._reuse.all_missing(requests)

    def holding_cached(self, requests: Iterable[LlmRequest]) -> AbstractContextManager[None]:
        """While one of `requests` starts, what `get_reusable_tokens` said of the others holds."""
        return nullcontext() if self._reuse is None else self._reuse.holding(requests)

    def forget_waiting(self, request_id: int) -> None:
        """A request that was asked about has ended, started or not."""
        if self._reuse is not None:
            self._reuse.forget_waiting(request_id)

    def _held_prefix(self, request: LlmRequest, is_held: Callable[[int], int | bool]) -> list[int]:
        """The blocks that the request would share with live sequences from its beginning on."""
        reuse = self._reuse
        if reuse is None or request.request_id in self._sequences or not reuse.applies_to(request):
            return []
        blocks = reuse.cached_blocks(request)
        return blocks and list(takewhile(is_held, blocks))


def _check_reuse(needs: BlockNeeds, sink_token_length: int) -> None:
    if not needs.grows:
        raise ConfigError("enable_block_reuse: a cross KV cache is not reused")
    if needs.bubble:
        raise ConfigError(
            f"enable_block_reuse: sink_token_length = {sink_token_length} must be a multiple of "
            f"tokens_per_block = {needs.tokens_per_block}"
        )
