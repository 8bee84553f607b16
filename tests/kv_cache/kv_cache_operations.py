"""Random operations on a `KvCacheManager` beside a plain model of it, proved after each.

Decides what is tried; what must come of it is `kv_cache_proof`'s.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from kv_cache_model import (
    REUSES,
    Divergence,
    Life,
    Options,
    Reuse,
)
from kv_cache_proof import KvCacheProof

from gptmanager.errors import CapacityError, DuplicateRequestIdError
from gptmanager.request.llm_request import LlmRequest, LlmRequestState

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


class Trial(KvCacheProof):
    """Random operations on one KV cache."""

    def __init__(self, options: Options, chance: random.Random) -> None:
        super().__init__(options, chance)
        self.priorities = chance.choice([(None,), (None, None, 0, 34, 36, 100)])

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
            self.close(life, store=self.chance.random() < 0.5)
        self.expect("free blocks in the end", self.kv.get_num_free_blocks(), self.kv.num_blocks)

    # What happens -------------------------------------------------------------------------------

    def add(self) -> None:
        chance, window = self.chance, self.model.window
        beams = chance.choice([1, 1, 1, 1, 2, 3])
        prompt_len, max_new_tokens = chance.randint(1, 24), chance.randint(1, 16)
        if beams > 1:  # an executor must not let beams pass the window
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
            self.refused("add", DuplicateRequestIdError, lambda: self.kv.add_sequence(request))
        else:
            self.start(request)

    def step(self, life: Life) -> None:
        """A chunk of the context, or some tokens."""
        request = life.request
        if request.state is _CONTEXT_INIT:
            request.context_chunk_size = self.chance.randint(1, request.context_remaining_length)
            self.run_context(life)
            return
        if not life.is_forked:
            self._fork(life, [0] * len(life.tables))
        for _ in range(self.chance.randint(1, 8)):
            if request.num_generated >= request.max_new_tokens:
                return
            need = self.model.growth(life, 1)
            self.expect_needs(life)
            if need > len(self.model.freed):
                self.refused(
                    "add token", CapacityError, lambda: self.kv.add_token(request.request_id)
                )
                return
            new = self.kv.add_token(request.request_id)
            self.expect("new blocks", len(new), need)
            self.told(self.kv.take_moves())
            for table, block in zip(life.tables, new, strict=bool(new)):
                self.model.hand_out(block)
                table.append(block)
            self.expect("copies", [*self.model.due], [])
            self.model.write(life, life.stored + 1)
            self.generate(life)
            self.prove("add token")

    def fork(self, life: Life) -> None:
        kv, request_id, beams = self.kv, life.request.request_id, len(life.tables)
        parents = [self.chance.randrange(beams) for _ in range(beams)]
        if life.stored > self.model.window:
            self.refused("fork", ValueError, lambda: kv.fork(request_id, parents))
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
        self.prove("fork")

    def rewind(self, life: Life) -> None:
        request, model = life.request, self.model
        if request.state is _CONTEXT_INIT:
            return
        count = self.chance.randint(0, min(10, life.stored - request.prompt_len))
        life.peak = max(life.peak, life.stored)
        is_lost = life.peak > model.window and life.stored - count < life.peak - 1
        if len(life.tables) > 1 or is_lost:
            self.refused("rewind", ValueError, lambda: self.kv.rewind(request.request_id, count))
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
        self.prove("rewind")

    def remove(self, life: Life) -> None:
        request = life.request
        self.close(life, store=self.chance.random() < 0.7)
        if self.chance.random() < 0.4 and request.num_generated < request.max_new_tokens:
            request.pause(_NO_LIMIT)
            self.start(request)

    def what_if(self, life: Life) -> None:
        """Also for sequences that are removed twice, and for those that are none."""
        gone = [*self.chance.choices(sorted(self.model.lives), k=2), life.request.request_id, 99]
        self.kv.start_scheduling()
        for request_id in gone:
            self.kv.scheduling_remove_sequence(request_id)
        stay = [i for i in self.model.lives if i not in gone]
        free = self.kv.num_blocks - len(self.model.held(stay))
        has = [self.kv.scheduling_has_free_blocks(n) for n in (free, free + 1)]
        self.expect(f"{free} and one more blocks free without {gone}", has, [True, False])
        self.prove("what if")

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
        self.refused("mistake", ValueError, self.chance.choice(calls))
