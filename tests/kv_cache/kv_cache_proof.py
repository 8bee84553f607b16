"""A `KvCacheManager` and a plain model of it, kept side by side and proved after each operation.

Decides what must come of an operation, and tells where it does not; what is tried is
`kv_cache_operations`'. Uses the public contract alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kv_cache_model import Divergence, KvCacheModel, Life, Match, Options

from gptmanager.errors import CapacityError
from gptmanager.kv_cache import KvCacheManager
from gptmanager.request.llm_request import LlmRequest, LlmRequestState

_CONTEXT_INIT = LlmRequestState.CONTEXT_INIT


class KvCacheProof:
    """One KV cache and its model. `operations` counts what was done and proved, by kind.

    A difference between the two raises Divergence. `chance` gives the tokens that are generated.
    """

    def __init__(self, options: Options, chance: random.Random) -> None:
        self.model = KvCacheModel(options)
        self.chance = chance
        self.operations: Counter[str] = Counter()
        self.kv = KvCacheManager(
            options.num_blocks,
            options.tokens_per_block,
            max_attention_window=options.max_attention_window,
            sink_token_length=options.sink_token_length,
            enable_block_reuse=options.reuse != "off",
            enable_partial_reuse=options.reuse in ("part", "copy"),
            copy_on_partial_reuse=options.reuse == "copy",
            num_host_blocks=options.num_host_blocks,
            onboard_blocks=options.onboard_blocks,
            min_offload_tokens=options.min_offload_tokens,
            secondary_offload_min_priority=options.secondary_offload_min_priority,
        )

    def start(self, request: LlmRequest) -> None:
        model, kv = self.model, self.kv
        life = model.new_life(request)
        match = model.match(life)
        need, whole_life = model.context_blocks(request), model.life_blocks(request)
        live = model.held(model.lives)
        held = [block for block in match.whole if block in live]
        leading = next((i for i, b in enumerate(match.whole) if b not in live), len(match.whole))
        kv.start_scheduling()
        needs = (
            kv.get_needed_blocks_one_step(request),
            kv.get_needed_resource_to_completion(request),
        )
        self.expect("blocks for the context and in its life", needs, (need - leading, whole_life))
        remaining = kv.get_remaining_blocks_to_completion(request)
        self.expect("blocks until its end", remaining, whole_life - leading)
        if need - len(held) > len(model.freed):
            self.refused("add", CapacityError, lambda: kv.add_sequence(request))
            self.expect("context position", request.context_current_position, 0)
            return
        chunk = request.context_chunk_size
        copies = kv.add_sequence(request)
        life.tables = kv.block_ids(request.request_id)
        num_cached = len(match.whole) * model.size + match.num_partial
        self.expect("tokens found", request.context_current_position, num_cached)
        self.expect("chunk", request.context_chunk_size, _moved(request, chunk, model.size))
        self.told(copies)
        self._give(life, match)
        life.values = [model.values_of(life, 0, num_cached)]
        model.lives[request.request_id] = life
        onboarded = any(model.is_far(block) for block in match.whole)
        kind = "add onboarding" if onboarded else "add reusing" if num_cached else "add"
        self.prove(kind if len(life.tables) == 1 else f"{kind} with beams")
        self.run_context(life)

    def _give(self, life: Life, match: Match) -> None:
        """The blocks of a new sequence: were they its to have, and do they hold what it found?"""
        model, table = self.model, life.tables[0]
        near = [block for block in match.whole if not model.is_far(block)]
        far = [block for block in match.whole if model.is_far(block)]
        self.expect("shared blocks", table[: len(near)], near)
        model.take(near)
        host_used, model.host_used = model.host_used, {}  # what is about to be read stays
        model.host_used |= {block: None for block in host_used if block not in far}
        blocks = dict.fromkeys(block for beam in life.tables for block in beam[len(near) :])
        new = [block for block in blocks if block in model.freed]
        if match.candidates:
            begun = table[len(match.whole)]
            new.remove(begun)
            self._begin(begun, match)
        for block, source in zip(new, far, strict=False):
            model.hand_out(block)
            model.onboard(source, block)
        for block in new[len(far) :]:
            model.hand_out(block)
        self.expect("copies", [*model.due], [])

    def _begin(self, block: int, match: Match) -> None:
        """The block that holds the beginning of another one, and is written to behind it."""
        model = self.model
        source = next((s for s, to, _ in model.due if to == block and s in match.candidates), block)
        if source == block and block in match.candidates and model.can_take_over(block):
            model.take([block])
            model.forget(block)
            return
        if model.is_far(source):
            del model.host_used[source]  # while room is made it stays
        model.hand_out(block)
        if source != block:  # else it was the next to go itself
            model.expect_copy({source}, {block}, match.num_partial)
        elif block not in match.candidates:
            raise Divergence(f"block {block} begins as none of {sorted(match.candidates)} does")
        if model.is_far(source):
            model.host_used[source] = None

    def told(self, copies: Sequence[Any]) -> None:
        """The device makes them at once."""
        self.model.copy(copies)
        self.model.due.extend(copies)

    def run_context(self, life: Life) -> None:
        request = life.request
        request.move_to_next_context_chunk()
        self.model.write(life, request.context_current_position)
        if request.state is not _CONTEXT_INIT:
            self.kv.store_context(request)
            self.model.store(life, request.prompt_len - request.prompt_len % self.model.size)
            self.generate(life)
        self.prove("context")

    def generate(self, life: Life) -> None:
        for tokens in life.tokens:
            tokens.append(self.chance.choices([1, 2], [15, 1])[0])
        life.request.add_token(life.tokens[0][-1])

    def close(self, life: Life, *, store: bool) -> None:
        request_id = life.request.request_id
        self.kv.remove(request_id, store)
        del self.model.lives[request_id]
        if store:
            end = min(life.stored, len(life.tokens[0]) - 1)
            if len(life.tables) > 1:  # what is common to all
                end = min(end, life.request.prompt_len)
            self.model.store(life, end)
        self.model.free(block for table in life.tables for block in table)
        self.prove("remove")

    def refused(self, kind: str, error: type[Exception], act: Callable[[], object]) -> None:
        before = self.kv.audit()
        try:
            act()
        except error:
            self.expect("accounts after an error", self.kv.audit(), before)
            self.prove(f"{kind} refused")
            return
        raise Divergence(f"{kind} did not raise {error.__name__}")

    # Proof --------------------------------------------------------------------------------------

    def prove(self, kind: str) -> None:
        model, kv = self.model, self.kv
        kv.check()
        for request_id, life in model.lives.items():
            if kv.block_ids(request_id) != life.tables:
                self.expect(f"tables of {request_id}", kv.block_ids(request_id), life.tables)
            self.expect("tokens stored", kv.num_tokens(request_id), self._allotted(life))
            for table in life.tables:
                self.expect("table length", len(table), model.num_blocks_of(self._allotted(life)))
            misread = model.misread(life)
            if misread is not None:
                raise Divergence(f"request {request_id}: {misread}")
        held = model.held(model.lives)
        owners = {i: model.held([i]) for i in model.lives}
        for block, ids in kv.audit().owners.items():
            self.expect(
                f"owners of block {block}", {*ids}, {i for i in owners if block in owners[i]}
            )
        self.expect_sums()
        if len(held) + len(model.freed) != kv.num_blocks or not held.isdisjoint(model.freed):
            raise Divergence(f"blocks {held} are held and {[*model.freed]} are free")
        self.expect("free blocks", kv.get_num_free_blocks(), len(model.freed))
        counts = kv.host_counts
        host = counts.total_blocks - counts.free_blocks, counts.free_blocks
        self.expect("host blocks", host, (len(model.host_used), len(model.host_free)))
        model.now += 1
        self.operations[kind] += 1

    def _allotted(self, life: Life) -> int:
        """The whole prompt's blocks are taken when its context begins."""
        return max(life.stored, life.request.prompt_len)

    def expect_needs(self, life: Life) -> None:
        kv, request, model = self.kv, life.request, self.model
        needs = [kv.get_needed_blocks_one_step(request, lookahead) for lookahead in (False, True)]
        self.expect("blocks for one step and two", needs, [model.growth(life, n) for n in (1, 2)])
        if len(life.tables) == 1:
            remaining = model.life_blocks(request) - len(life.tables[0])
            self.expect(
                "blocks until its end", kv.get_remaining_blocks_to_completion(request), remaining
            )

    def expect_sums(self) -> None:
        kv, requests = self.kv, [life.request for life in self.model.lives.values()]
        remaining = [kv.get_remaining_blocks_to_completion(request) for request in requests]
        total = kv.sum_remaining_blocks_to_completion(requests)
        self.expect("blocks until all their ends", total, sum(remaining))
        for life, count in zip(self.model.lives.values(), remaining, strict=True):
            whole, held = (
                self.model.life_blocks(life.request),
                len(self.model.held([life.request.request_id])),
            )
            if not 0 <= held + count <= whole:  # forks share what was counted for each beam
                raise Divergence(f"{held} blocks are held, {count} are to come of {whole}")

    def expect(self, what: str, actual: object, expected: object) -> None:
        if actual != expected:
            raise Divergence(f"{what}: {actual}, expected {expected}")


def _moved(request: LlmRequest, chunk: int | None, size: int) -> int | None:
    """A first chunk that begins behind what was found ends on a block, or ends the context."""
    start = request.context_current_position
    if chunk is None or not start:
        return chunk
    end = start + chunk
    if end >= request.prompt_len:
        return request.prompt_len - start
    floored = end - end % size
    return (floored if floored > start else end) - start
