"""Random operations on a `KvCacheManager` beside a plain model of it, proved after each.

Decides what is tried; what must come of it is `kv_cache_model`'s. Uses the public contract alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from gptmanager.errors import CapacityError, DuplicateRequestIdError
from gptmanager.kv_cache import KvCacheManager
from gptmanager.request import LlmRequest, LlmRequestState
from gptmanager.testing.kv_cache_model import (
    REUSES,
    Divergence,
    KvCacheModel,
    Life,
    Match,
    Options,
    Reuse,
)

_CONTEXT_INIT = LlmRequestState.CONTEXT_INIT
_IN_PROGRESS = LlmRequestState.GENERATION_IN_PROGRESS
_TO_COMPLETE = LlmRequestState.GENERATION_TO_COMPLETE
_NO_LIMIT = 10**6


def random_options(chance: random.Random) -> Options:
    """Small enough that everything is short often."""
    size = chance.randint(1, 6)
    window = chance.randint(2, 24) if chance.random() < 0.4 else None
    sink = chance.randint(0, min(7, window - 1)) if window and chance.random() < 0.5 else 0
    reuse: Reuse = chance.choice(REUSES)
    if reuse != "off":
        sink -= sink % size
    options = Options(chance.randint(2, 20), size, window, sink, reuse)
    chance = random.Random(repr(options))  # what is done is the same, with a host tier or without
    if reuse == "off" or chance.random() < 0.4:
        return options
    return options._replace(
        num_host_blocks=chance.randint(1, 12),
        onboard_blocks=chance.random() < 0.8,
        min_offload_tokens=chance.randint(1, size),
        secondary_offload_min_priority=chance.choice([None, None, 0, 35, 36]),
    )


class Trial:
    """One KV cache and its model. `operations` counts what was done and proved, by kind."""

    def __init__(self, options: Options, chance: random.Random) -> None:
        self.model = KvCacheModel(options)
        self.chance = chance
        self.operations: Counter[str] = Counter()
        self.priorities = chance.choice([(None,), (None, None, 0, 34, 36, 100)])
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

    def operate(self) -> None:
        """A random operation, or a few of one kind."""
        lives = self.model.lives
        act = self.chance.choices(
            [self.add, self.step, self.fork, self.rewind, self.remove, self.what_if, self.mistake],
            [4, 12, 1, 2, 2, 1, 1],
        )[0]
        if act in (self.add, self.mistake):
            act()
        elif lives:
            act(lives[self.chance.choice(sorted(lives))])  # type: ignore[operator]

    def end(self) -> None:
        """Everything ends: nothing must be left."""
        for life in [*self.model.lives.values()]:
            self._remove(life, store=self.chance.random() < 0.5)
        self._expect("free blocks in the end", self.kv.get_num_free_blocks(), self.kv.num_blocks)

    # What happens -------------------------------------------------------------------------------

    def add(self) -> None:
        chance, window = self.chance, self.model.window
        beams = chance.choice([1, 1, 1, 1, 2, 3])
        prompt_len, max_new_tokens = chance.randint(1, 24), chance.randint(1, 16)
        if beams > 1:  # who executes must not let beams pass the window
            prompt_len = min(prompt_len, window)
            max_new_tokens = min(max_new_tokens, window - prompt_len + 1)
        request = LlmRequest(
            chance.randrange(9),
            chance.choices([1, 2], [15, 1], k=prompt_len),
            max_new_tokens,
            beam_width=beams,
            cache_salt=chance.choice([None, None, None, "salt"]),
            lora_task_id=chance.choice([None, None, None, 3]),
            retention_priority=chance.choice(self.priorities),
        )
        if chance.random() < 0.4:
            request.context_chunk_size = chance.randint(1, prompt_len)
        if request.request_id in self.model.lives:
            self._refused("add", DuplicateRequestIdError, lambda: self.kv.add_sequence(request))
        else:
            self._start(request)

    def step(self, life: Life) -> None:
        """A chunk of the context, or some tokens."""
        request = life.request
        if request.state is _CONTEXT_INIT:
            request.context_chunk_size = self.chance.randint(1, request.context_remaining_length)
            self._run_context(life)
            return
        if not life.is_forked:
            self._fork(life, [0] * len(life.tables))
        for _ in range(self.chance.randint(1, 8)):
            if request.num_generated >= request.max_new_tokens:
                return
            need = self.model.growth(life, 1)
            self._expect_needs(life)
            if need > len(self.model.freed):
                self._refused(
                    "add token", CapacityError, lambda: self.kv.add_token(request.request_id)
                )
                return
            new = self.kv.add_token(request.request_id)
            self._expect("new blocks", len(new), need)
            self._told(self.kv.take_moves())
            for table, block in zip(life.tables, new, strict=bool(new)):
                self.model.hand_out(block)
                table.append(block)
            self._expect("copies", [*self.model.due], [])
            self.model.write(life, life.stored + 1)
            self._generate(life)
            self._prove("add token")

    def fork(self, life: Life) -> None:
        kv, request_id, beams = self.kv, life.request.request_id, len(life.tables)
        parents = [self.chance.randrange(beams) for _ in range(beams)]
        if life.stored > self.model.window:
            self._refused("fork", ValueError, lambda: kv.fork(request_id, parents))
            return
        if life.request.state is not _CONTEXT_INIT:
            self._fork(life, parents if life.is_forked else [0] * beams)

    def _fork(self, life: Life, parents: list[int]) -> None:
        kv, request_id = self.kv, life.request.request_id
        copies = list(kv.fork(request_id, parents))
        old, new = life.tables, kv.block_ids(request_id)
        whole = (life.stored + self.model.padding) // self.model.size
        for beam, parent in enumerate(parents):
            if new[beam][:whole] != old[parent][:whole] or (
                beam == parent and new[beam] != old[beam]
            ):
                raise Divergence(f"a fork to parents {parents} made {new} of {old}")
        tails = [block for table in new for block in table[whole:]]
        own = {block for table in old for block in table[whole:]}
        if len(set(tails)) != len(tails) or not own.issuperset(tails):
            raise Divergence(f"a fork to parents {parents} gave the tails {tails} of {own}")
        self.chance.shuffle(copies)
        self.model.copy(copies)
        life.tables = new
        life.values = [life.values[parent][:] for parent in parents]
        life.tokens = [life.tokens[parent][:] for parent in parents]
        self.model.free(block for table in old for block in table)
        self._prove("fork")

    def rewind(self, life: Life) -> None:
        request, model = life.request, self.model
        if request.state is _CONTEXT_INIT:
            return
        count = self.chance.randint(0, min(10, life.stored - request.prompt_len))
        life.peak = max(life.peak, life.stored)
        is_lost = life.peak > model.window and life.stored - count < life.peak - 1
        if len(life.tables) > 1 or is_lost:
            self._refused("rewind", ValueError, lambda: self.kv.rewind(request.request_id, count))
            return
        self.kv.rewind(request.request_id, count)
        end = life.stored - count
        block, used = divmod(end + model.padding, model.size)
        if used and block < len(life.tables[0]):
            model.forget(life.tables[0][block])
        del life.values[0][end:], life.tokens[0][end + 1 :], request.tokens[end + 1 :]
        freed = life.tables[0][model.num_blocks_of(end) :]
        del life.tables[0][model.num_blocks_of(end) :]
        model.free(freed)
        request.num_tokens = end + 1
        if request.state is _TO_COMPLETE and count:
            request.state = _IN_PROGRESS
        self._prove("rewind")

    def remove(self, life: Life) -> None:
        request = life.request
        self._remove(life, store=self.chance.random() < 0.7)
        if self.chance.random() < 0.4 and request.num_generated < request.max_new_tokens:
            request.pause(_NO_LIMIT)
            self._start(request)

    def what_if(self, life: Life) -> None:
        """Also for sequences that are removed twice, and for those that are none."""
        gone = [*self.chance.choices(sorted(self.model.lives), k=2), life.request.request_id, 99]
        self.kv.start_scheduling()
        for request_id in gone:
            self.kv.scheduling_remove_sequence(request_id)
        stay = [i for i in self.model.lives if i not in gone]
        free = self.kv.num_blocks - len(self.model.held(stay))
        has = [self.kv.scheduling_has_free_blocks(n) for n in (free, free + 1)]
        self._expect(f"{free} and one more blocks free without {gone}", has, [True, False])
        self._prove("what if")

    def mistake(self) -> None:
        """An id that holds nothing."""
        kv = self.kv
        calls: list[Callable[[], object]] = [
            lambda: kv.add_token(99),
            lambda: kv.rewind(99, 1),
            lambda: kv.fork(99, [0]),
            lambda: kv.remove(99),
            lambda: kv.block_ids(99),
        ]
        self._refused("mistake", ValueError, self.chance.choice(calls))

    # How ----------------------------------------------------------------------------------------

    def _start(self, request: LlmRequest) -> None:
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
        self._expect("blocks for the context and in its life", needs, (need - leading, whole_life))
        remaining = kv.get_remaining_blocks_to_completion(request)
        self._expect("blocks until its end", remaining, whole_life - leading)
        if need - len(held) > len(model.freed):
            self._refused("add", CapacityError, lambda: kv.add_sequence(request))
            self._expect("context position", request.context_current_position, 0)
            return
        chunk = request.context_chunk_size
        copies = kv.add_sequence(request)
        life.tables = kv.block_ids(request.request_id)
        num_cached = len(match.whole) * model.size + match.num_partial
        self._expect("tokens found", request.context_current_position, num_cached)
        self._expect("chunk", request.context_chunk_size, _moved(request, chunk, model.size))
        self._told(copies)
        self._give(life, match)
        life.values = [model.values_of(life, 0, num_cached)]
        model.lives[request.request_id] = life
        onboarded = any(model.is_far(block) for block in match.whole)
        kind = "add onboarding" if onboarded else "add reusing" if num_cached else "add"
        self._prove(kind if len(life.tables) == 1 else f"{kind} with beams")
        self._run_context(life)

    def _give(self, life: Life, match: Match) -> None:
        """The blocks of a new sequence: were they its to have, and do they hold what it found?"""
        model, table = self.model, life.tables[0]
        near = [block for block in match.whole if not model.is_far(block)]
        far = [block for block in match.whole if model.is_far(block)]
        self._expect("shared blocks", table[: len(near)], near)
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
        self._expect("copies", [*model.due], [])

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

    def _told(self, copies: Sequence[Any]) -> None:
        """The device makes them at once."""
        self.model.copy(copies)
        self.model.due.extend(copies)

    def _run_context(self, life: Life) -> None:
        request = life.request
        request.move_to_next_context_chunk()
        self.model.write(life, request.context_current_position)
        if request.state is not _CONTEXT_INIT:
            self.kv.store_context(request)
            self.model.store(life, request.prompt_len - request.prompt_len % self.model.size)
            self._generate(life)
        self._prove("context")

    def _generate(self, life: Life) -> None:
        for tokens in life.tokens:
            tokens.append(self.chance.choices([1, 2], [15, 1])[0])
        life.request.add_token(life.tokens[0][-1])

    def _remove(self, life: Life, *, store: bool) -> None:
        request_id = life.request.request_id
        self.kv.remove(request_id, store)
        del self.model.lives[request_id]
        if store:
            end = min(life.stored, len(life.tokens[0]) - 1)
            if len(life.tables) > 1:  # what is common to all
                end = min(end, life.request.prompt_len)
            self.model.store(life, end)
        self.model.free(block for table in life.tables for block in table)
        self._prove("remove")

    def _refused(self, kind: str, error: type[Exception], act: Callable[[], object]) -> None:
        before = self.kv.audit()
        try:
            act()
        except error:
            self._expect("accounts after an error", self.kv.audit(), before)
            self._prove(f"{kind} refused")
            return
        raise Divergence(f"{kind} did not raise {error.__name__}")

    # Proof --------------------------------------------------------------------------------------

    def _prove(self, kind: str) -> None:
        model, kv = self.model, self.kv
        kv.check()
        for request_id, life in model.lives.items():
            if kv.block_ids(request_id) != life.tables:
                self._expect(f"tables of {request_id}", kv.block_ids(request_id), life.tables)
            for table in life.tables:
                self._expect("table length", len(table), model.num_blocks_of(self._allotted(life)))
            misread = model.misread(life)
            if misread is not None:
                raise Divergence(f"request {request_id}: {misread}")
        held = model.held(model.lives)
        if len(held) + len(model.freed) != kv.num_blocks or not held.isdisjoint(model.freed):
            raise Divergence(f"blocks {held} are held and {[*model.freed]} are free")
        self._expect("free blocks", kv.get_num_free_blocks(), len(model.freed))
        counts = kv.host_counts
        host = counts.total_blocks - counts.free_blocks, counts.free_blocks
        self._expect("host blocks", host, (len(model.host_used), len(model.host_free)))
        model.now += 1
        self.operations[kind] += 1

    def _allotted(self, life: Life) -> int:
        """The whole prompt's blocks are taken when its context begins."""
        return max(life.stored, life.request.prompt_len)

    def _expect_needs(self, life: Life) -> None:
        kv, request, model = self.kv, life.request, self.model
        needs = [kv.get_needed_blocks_one_step(request, lookahead) for lookahead in (False, True)]
        self._expect("blocks for one step and two", needs, [model.growth(life, n) for n in (1, 2)])
        if len(life.tables) == 1:
            remaining = model.life_blocks(request) - len(life.tables[0])
            self._expect(
                "blocks until its end", kv.get_remaining_blocks_to_completion(request), remaining
            )

    def _expect(self, what: str, actual: object, expected: object) -> None:
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
