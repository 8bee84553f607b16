"""`KvCacheManager`: holds the blocks of sequences, and counts blocks for schedulers.

It makes no decisions. Its counts follow from the block tables of sequences, which its base class
keeps, and from the needs of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile

from gptmanager.arguments import at_least, flag
from gptmanager.errors import ConfigError
from gptmanager.kv_cache.block import WhatIf
from gptmanager.kv_cache.block_reuse import BlockReuse, ReuseOptions
from gptmanager.kv_cache.needs import BlockNeeds, CrossBlockNeeds
from gptmanager.kv_cache.sequences import KvSequences
from gptmanager.request.llm_request import RETENTION_PRIORITIES, LlmRequest, LlmRequestState

_IN_PROGRESS = LlmRequestState.GENERATION_IN_PROGRESS


class KvCacheManager(KvSequences):
    """Holds the blocks of sequences, by request id, and counts blocks for schedulers.

    A block has `tokens_per_block` positions. A call that cannot be satisfied raises and changes
    nothing. Where a method needs the blocks of a request, an id without blocks raises ValueError.

    *For capacity schedulers.* A scheduler that guarantees completion compares
    `get_remaining_blocks_to_completion` with the free blocks. It can instead compare
    `get_needed_resource_to_completion`, which includes blocks already held, with
    `get_max_resource_count`. A request that needs more than `get_max_resource_count` could not run
    to its end even alone. A scheduler that may pause requests calls `start_scheduling`, adds up
    `get_needed_blocks_one_step` of the requests that it takes, and calls
    `scheduling_has_free_blocks(sum)`.

    *Block reuse.* If live sequences hold cached blocks of the beginning of a new request's prompt,
    the request will share these blocks, so its needs do not count them. A scheduler that may pause
    requests calls `scheduling_add_sequence` when it takes a new request. Otherwise the pause of a
    request that holds the shared blocks would count them as free.

    *Priorities.* Cached free blocks with the lowest priority are evicted first. The blocks that a
    request stores have its `retention_priority`, from 0 to 100, by default 35.

    *Host tier.* `num_host_blocks` host blocks have ids from `num_blocks` on. When a cached block is
    handed out, its content moves to a host block if it has at least `min_offload_tokens` tokens and
    a priority of at least `secondary_offload_min_priority`. With `onboard_blocks` lookups also find
    content in host blocks, and it moves back to the pool when a request that shares it starts.
    `add_sequence` and `fork` return the copies to make; `take_moves` returns those of `add_token`.

    *Recurrent states.* With `num_snapshots` above 0, the model keeps a recurrent state for each
    sequence. Then a new sequence shares full blocks up to one with a snapshot, a copy of the state
    after it. `next_stop`, `save_state` and `found_snapshot` say when states are copied. With
    `cuts_contexts`, chunks of a context may have to end early.

    *Attention window.* A sequence of more than `max_attention_window` tokens is cyclic: a new token
    replaces the oldest one, and the tables do not grow. Beams would overwrite the blocks of the
    prompt that they share, so an executor must not let beams pass the window; `fork` would
    raise. A request that may become cyclic neither reuses blocks nor stores them for reuse.

    *Sink tokens.* The first `sink_token_length` tokens always stay. Padding in front of them fills
    whole blocks: position = token + padding, and the other tokens begin at a block boundary.

    *Cross attention.* With `cross=True` the blocks are those of a cross attention cache. A request
    needs `encoder_len` positions, which all beams share, from its first context chunk on, and never
    more.
    """

    __slots__ = ("tokens_per_block", "_lookups", "_what_if")

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
        num_snapshots: int = 0,
        cuts_contexts: bool = True,
    ) -> None:
        num_blocks = at_least(1, "num_blocks", num_blocks)
        least = 0 if secondary_offload_min_priority is None else secondary_offload_min_priority
        most = RETENTION_PRIORITIES[1]
        options = ReuseOptions(
            partial=flag("enable_partial_reuse", enable_partial_reuse),
            copies=flag("copy_on_partial_reuse", copy_on_partial_reuse),
            num_host_blocks=at_least(0, "num_host_blocks", num_host_blocks),
            onboards=flag("onboard_blocks", onboard_blocks),
            min_offload_tokens=at_least(0, "min_offload_tokens", min_offload_tokens),
            min_offload_priority=at_least(0, "secondary_offload_min_priority", least, most),
            num_snapshots=at_least(0, "num_snapshots", num_snapshots),
            cuts_contexts=flag("cuts_contexts", cuts_contexts),
        )
        is_reused = flag("enable_block_reuse", enable_block_reuse)
        if options.num_host_blocks and not is_reused:
            raise ConfigError(f"num_host_blocks = {num_host_blocks} needs enable_block_reuse")
        if options.num_snapshots and (options.num_host_blocks or not is_reused):
            raise ConfigError(
                f"num_snapshots = {num_snapshots} needs enable_block_reuse and no host blocks"
            )
        kind = CrossBlockNeeds if flag("cross", cross) else BlockNeeds
        needs = kind(tokens_per_block, max_attention_window, sink_token_length)
        reuse = None
        if is_reused:
            if not needs.grows:
                raise ConfigError(
                    "enable_block_reuse must be False with cross=True: the blocks of a cross KV "
                    "cache are not reused"
                )
            if needs.bubble:
                raise ConfigError(
                    f"enable_block_reuse: sink_token_length = {sink_token_length} must be a "
                    f"multiple of tokens_per_block = {needs.tokens_per_block}"
                )
            reuse = BlockReuse(num_blocks, needs.tokens_per_block, needs.window, options)
        self.tokens_per_block = needs.tokens_per_block
        super().__init__(num_blocks, needs, reuse)

    # Needs of requests ----------------------------------------------------------------------

    @property
    def max_kept_tokens(self) -> int:
        """The largest number of tokens that a sequence keeps; later tokens take no blocks."""
        return self._needs.window

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """Return how many blocks the request needs in its whole life, INCLUDING held blocks."""
        return self._needs.whole_life(request)

    def get_remaining_blocks_to_completion(self, request: LlmRequest) -> int:
        """Return the number of blocks that the request must still take to complete."""
        held = self._live.get(request.request_id)
        if held is None:
            needed = self._needs.remaining(request, 0)
            if self._lookups is None or request.state >= _IN_PROGRESS:
                return needed
            ref_counts = self._pool.ref_counts
            return needed - len(self._held_prefix(request, ref_counts.__getitem__))
        if held.life_tokens == request.prompt_len + request.max_new_tokens:
            return held.remaining_blocks
        return self._needs.remaining(request, len(held.tables[0]))

    def sum_remaining_blocks_to_completion(self, requests: Iterable[LlmRequest]) -> int:
        """Return the sum of `get_remaining_blocks_to_completion` over `requests`, in one call."""
        find = self._live.get
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
        """Return how many blocks the request takes in its next step, or in two with lookahead."""
        needed = self._needs.one_step(request, two_step_lookahead)
        if needed and self._lookups is not None and request.state < _IN_PROGRESS:
            needed -= len(self._held_prefix(request, self._what_if.is_held))
        return needed

    def sum_needed_blocks_one_step(
        self, requests: Iterable[LlmRequest], two_step_lookahead: bool = False
    ) -> int:
        """Return the sum of `get_needed_blocks_one_step` over generating `requests`."""
        return self._needs.sum_one_step(requests, two_step_lookahead)

    def most_blocks_to_completion(self, requests: Iterable[LlmRequest]) -> int:
        """Return an upper bound of `sum_remaining_blocks_to_completion`, much faster to compute."""
        return self._needs.most_to_completion(requests)

    def most_blocks_one_step(
        self, requests: Iterable[LlmRequest], two_step_lookahead: bool = False
    ) -> int:
        """Return an upper bound of the sum of `get_needed_blocks_one_step`, faster than the sum."""
        return self._needs.most_in_one_step(requests, two_step_lookahead)

    # What if --------------------------------------------------------------------------------

    def start_scheduling(self) -> None:
        """Start a new what-if count from the current state."""
        self._what_if = WhatIf(self._pool)

    def scheduling_remove_sequence(self, request_id: int) -> None:
        """Remove a sequence in the what-if count: blocks that only it holds count as free.

        Do nothing for an id without blocks.
        """
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._what_if.remove(sequence)

    def scheduling_has_free_blocks(self, num_required: int = 1) -> bool:
        """Return whether at least `num_required` blocks would be free, see `start_scheduling`."""
        return num_required <= self._what_if.num_free

    @property
    def scheduling_num_free_blocks(self) -> int:
        """Number of blocks that would be free, see `start_scheduling`."""
        return self._what_if.num_free

    def scheduling_add_sequence(self, request: LlmRequest) -> None:
        """Count one more holder of each held block that `request` would share."""
        if self._lookups is not None:
            self._what_if.share(self._held_prefix(request, self._what_if.is_held))

    # Block reuse ----------------------------------------------------------------------------

    def get_reusable_tokens(self, request: LlmRequest) -> int:
        """Return the number of tokens in the full cached blocks that the request would find now."""
        lookups = self._lookups
        if lookups is None or not lookups.applies_to(request):
            return 0
        return len(lookups.cached_blocks(request)) * self.tokens_per_block

    def get_all_reusable_tokens(self, requests: Sequence[LlmRequest]) -> list[int]:
        """Return `get_reusable_tokens` of each request, in one call."""
        if self._lookups is None:
            return [0] * len(requests)
        return [count * self.tokens_per_block for count in self._lookups.all_cached(requests)]

    def find_new_context_block(self, request: LlmRequest) -> Hashable | None:
        """Return a key of the prompt up to and including its first full block that is not cached.

        With recurrent states, it is a key of the prompt up to its last cached block, if this block
        lacks a snapshot.

        Keys of several requests can be compared until the cache changes. The key is None if all
        full blocks are cached, and for a request that does not reuse blocks.
        """
        lookups = self._lookups
        if lookups is None or not lookups.applies_to(request):
            return None
        block = lookups.missing_snapshot(request)
        return lookups.find(request).missing if block is None else ("snapshot", block)

    def find_new_context_blocks(self, requests: Sequence[LlmRequest]) -> Sequence[Hashable | None]:
        """Return `find_new_context_block` of each request, in one call."""
        if self._lookups is None:
            return [None] * len(requests)
        if self._lookups.snapshots is not None:
            return [self.find_new_context_block(request) for request in requests]
        return self._lookups.find_all(requests).missing

    def holding_cached(self, requests: Iterable[LlmRequest]) -> AbstractContextManager[None]:
        """Evict none of the cached blocks that `requests` would reuse, in the `with` block."""
        reuse = self._reuse
        return nullcontext() if reuse is None else reuse.holding(requests)

    def forget_waiting(self, request_id: int) -> None:
        """Drop the lookup of a request that has ended, whether it had started or not."""
        if self._lookups is not None:
            self._lookups.forget(request_id)

    # Private --------------------------------------------------------------------------------

    def _begin(self, reuse: BlockReuse | None) -> None:
        super()._begin(reuse)
        self._lookups = None if reuse is None else reuse.lookups
        self.start_scheduling()

    def _held_prefix(self, request: LlmRequest, is_held: Callable[[int], int | bool]) -> list[int]:
        """Return the leading blocks that the request would share with live sequences."""
        lookups = self._lookups
        if lookups is None or request.request_id in self or not lookups.applies_to(request):
            return []
        blocks = lookups.cached_blocks(request)
        return blocks and list(takewhile(is_held, blocks))
