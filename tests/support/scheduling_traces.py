"""Random traces that drive the schedulers and their oracle side by side.

A trace is a seed: requests arrive, run in chunks and generate, are paused, stop early and finish.
`run_trace` raises AssertionError at the first iteration in which the two decide differently.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import scheduling_oracle as oracle

from gptmanager.config import ContextChunkingPolicy
from gptmanager.errors import CapacityError
from gptmanager.scheduler import (
    CapacityScheduler,
    GuaranteedNoEvictScheduler,
    KvCacheManager,
    LlmRequest,
    LlmRequestState,
    MaxRequestsScheduler,
    MaxUtilizationScheduler,
    MicroBatchScheduler,
    StaticBatchScheduler,
    insert_by_priority,
)

POLICIES = ("max_requests", "guaranteed_no_evict", "static_batch", "max_utilization")
_CLASSES = {
    "guaranteed_no_evict": GuaranteedNoEvictScheduler,
    "static_batch": StaticBatchScheduler,
    "max_utilization": MaxUtilizationScheduler,
}
_CHUNKING = {
    None: None,
    oracle.FIRST_COME_FIRST_SERVED: ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
    oracle.EQUAL_PROGRESS: ContextChunkingPolicy.EQUAL_PROGRESS,
    oracle.FORCE_CHUNK: ContextChunkingPolicy.FORCE_CHUNK,
}


@dataclass(frozen=True)
class AdapterCache:
    """A cache of adapters: task 1 takes 1 page, task 2 takes 2, and so on."""

    pages: int

    def get_max_device_pages(self) -> int:
        return self.pages

    def determine_num_pages(self, lora_task_id: int) -> int:
        return lora_task_id


class ObservedMemory(oracle.Memory):
    """The oracle's memory with block reuse.

    It reads from the KV cache manager which blocks are cached, and which sequences hold them. The
    oracle derives the schedule from that by itself.
    """

    def __init__(self, kv: KvCacheManager) -> None:
        super().__init__(kv.num_blocks, kv.tokens_per_block)
        self.kv = kv
        self.claimed: set[tuple[Hashable, ...]] = set()

    def free(self) -> int:
        return self.kv.get_num_free_blocks()

    def num_cached(self, request: oracle.Request, tokens: list[int]) -> int:
        """Return the number of full cached blocks at the beginning of all `tokens`."""
        probe = LlmRequest(-1, [*tokens, 0], 1, lora_task_id=request.task, cache_salt=request.salt)
        return self.kv.get_reusable_tokens(probe) // self.block

    def first_missing(self, request: oracle.Request) -> Hashable | None:
        cached = self.num_cached(request, request.prompt)
        if (cached + 1) * self.block > request.prompt_len:
            return None
        prefix = tuple(request.prompt[: (cached + 1) * self.block])
        return request.task, request.salt, prefix

    def cached_prefix(self, request: oracle.Request) -> list[tuple[Hashable, ...]]:
        """Return the names of the first cached full blocks of prompt[:-1].

        The name of a block has the tokens of the prefix that ends with it.
        """
        # Upstream, beams do not reuse blocks. Here they share the blocks of their prompt.
        cached = self.num_cached(request, request.prompt[:-1])
        ends = range(self.block, (cached + 1) * self.block, self.block)
        return [(request.task, request.salt, *request.prompt[:end]) for end in ends]

    def holders(self, name: tuple[Hashable, ...]) -> set[int]:
        """Return the live sequences that hold the cached block of this name."""
        block = self.block_of(name)
        return {i for i in self.tables if block in self.kv.block_ids(i)[0]}

    def block_of(self, name: tuple[Hashable, ...]) -> int:
        task, salt, *tokens = name
        probe = LlmRequest(-1, [*tokens, 0], 1, lora_task_id=task, cache_salt=salt)  # type: ignore
        assert self.kv._lookups is not None
        return self.kv._lookups.cached_blocks(probe)[-1]

    def leading_held(
        self, request: oracle.Request, removed: list[oracle.Request]
    ) -> list[tuple[Hashable, ...]]:
        """Return the first cached full blocks, up to one that no live sequence holds."""
        if request.request_id in self.tables or request.state != oracle.CONTEXT:
            return []
        gone = {r.request_id for r in removed}
        held = []
        for name in self.cached_prefix(request):
            if not self.holders(name) - gone and name not in self.claimed:
                break
            held.append(name)
        return held

    def remaining(self, request: oracle.Request) -> int:
        self.claimed.clear()
        return super().remaining(request) - len(self.leading_held(request, []))

    def begin_pass(self) -> None:
        self.claimed.clear()

    def take(self, request: oracle.Request, removed: list[oracle.Request]) -> None:
        # A request that starts in this pass holds what it shares, even if the other holder pauses.
        self.claimed.update(self.leading_held(request, removed))

    def one_step_after(
        self, request: oracle.Request, lookahead: bool, removed: list[oracle.Request]
    ) -> int:
        return self.one_step(request, lookahead) - len(self.leading_held(request, removed))

    def scheduling_free(self, removed: list[oracle.Request]) -> int:
        gone = {r.request_id for r in removed}
        owners: dict[int, set[int]] = {}
        for i in self.tables:
            for table in self.kv.block_ids(i):
                for block in table:
                    owners.setdefault(block, set()).add(i)
        kept = {self.block_of(name) for name in self.claimed}
        return self.free() + sum(ids <= gone and b not in kept for b, ids in owners.items())


class Trace:
    """One random scenario, run by the schedulers and by their oracle."""

    def __init__(self, seed: int, policy: str | None = None, reuse: bool | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.policy = policy or rng.choice(POLICIES)
        self.block = rng.choice([1, 2, 4, 4, 8])
        self.reuse = rng.random() < 0.25 if reuse is None else reuse
        self.overlap = rng.random() < 0.3
        self.beams = rng.random() < 0.3
        self.drafts = rng.random() < 0.4
        self.credits = not self.reuse and rng.random() < 0.3
        self.adapters = rng.random() < 0.3
        self.priorities = rng.random() < 0.3
        self.max_input_len = rng.choice([10**6, 10**6, 20])
        self.num_blocks = max(4, rng.choice([40, 70, 100, 200, 1000]) // self.block)
        self._make_memory()
        self._make_capacity()
        self._make_micro_batch()
        self.real: dict[int, LlmRequest] = {}
        self.active: list[LlmRequest] = []
        self.shadow: list[oracle.Request] = []
        self.flying: list[list[int]] = []  # ids of each micro batch in flight
        self.flagged: set[int] = set()
        self.next_id = 0
        self.num_paused = self.num_chunks = self.num_finished = 0

    def _make_memory(self) -> None:
        rng, block = self.rng, self.block
        window = sink = None
        if not self.reuse and rng.random() < 0.25:
            window = rng.randint(2, 40)
            sink = rng.randint(0, window - 1) if rng.random() < 0.5 else None
        self.kv = KvCacheManager(
            self.num_blocks,
            block,
            max_attention_window=window,
            sink_token_length=sink or 0,
            enable_block_reuse=self.reuse,
            enable_partial_reuse=rng.random() < 0.5,
        )
        self.cross = self.cross_memory = None
        if self.reuse:
            self.memory: oracle.Memory = ObservedMemory(self.kv)
            return
        self.memory = oracle.Memory(self.num_blocks, block, window, sink or 0)
        if self.policy in ("guaranteed_no_evict", "static_batch") and rng.random() < 0.3:
            num_blocks = rng.randint(5, 40)
            self.cross = KvCacheManager(num_blocks, block, cross=True)
            self.cross_memory = oracle.Memory(num_blocks, block, cross=True)

    def _make_capacity(self) -> None:
        rng = self.rng
        max_num_requests = rng.choice([1, 3, 6, 12, 40])
        lookahead = self.overlap or rng.random() < 0.2
        peft = AdapterCache(rng.randint(3, 8)) if self.adapters else None
        self.scheduler: CapacityScheduler
        if self.policy == "max_requests":
            self.scheduler = MaxRequestsScheduler(max_num_requests)
        else:
            extra = {} if self.cross is None else {"cross_kv_cache_manager": self.cross}
            self.scheduler = _CLASSES[self.policy](
                max_num_requests,
                self.kv,
                peft_cache_manager=peft,
                two_step_lookahead=lookahead,
                **extra,
            )
        memory = self.memory
        self.capacity = oracle.Capacity(
            max_num_requests,
            memory,
            self.cross_memory,
            oracle.NO_PAGES if peft is None else oracle.Pages(peft.pages, lambda task: task),
            lookahead,
            memory.first_missing if isinstance(memory, ObservedMemory) else None,
        )

    def _make_micro_batch(self) -> None:
        rng = self.rng
        chunking = rng.choice([None, 0, 0, 1, 1, 2])
        unit = self.block * rng.choice([1, 1, 2, 3])
        max_num_tokens = rng.choice([None, 8, 16, 33, 64, 200])
        longest = rng.choice([None, None, 8, 20, 50])
        if chunking is None:
            longest = None
        if chunking == oracle.FORCE_CHUNK and longest is not None:
            longest = max(longest, unit)
        if max_num_tokens is not None:
            max_num_tokens = max(max_num_tokens, unit, 8)
        batch = rng.choice([1, 2, 4, 8, 32])
        rules: Any = rng.choice(["reserve", "kept"]), rng.choice(["prefix", "shift"])
        self.micro_batch = MicroBatchScheduler(
            batch,
            max_num_tokens,
            max_context_length=longest,
            context_chunking_policy=_CHUNKING[chunking],
            chunk_unit=None if chunking is None else unit,
            draft_rule=rules[0],
            reuse_credit_rule=rules[1],
        )
        self.micro_oracle = oracle.MicroBatch(
            batch, max_num_tokens, longest, chunking, unit, *rules
        )
        longest_prompt = 60 if chunking is not None or max_num_tokens is None else 12
        self.longest_prompt = min(longest_prompt, self.num_blocks * self.block // 2)

    # One iteration ------------------------------------------------------------------------

    def arrive(self) -> None:
        rng = self.rng
        prompt_len, max_new = rng.randint(1, self.longest_prompt), rng.randint(1, 30)
        tokens = [0] * prompt_len
        if self.reuse:  # few distinct tokens: prefixes are often shared
            shared = [7] * rng.choice([0, prompt_len // 2, prompt_len])
            tokens = (shared + [rng.randint(0, 3) for _ in range(prompt_len)])[:prompt_len]
        values: dict[str, Any] = {
            "beam_width": rng.choice([1, 1, 2, 3]) if self.beams else 1,
            "priority": rng.choice([0.1, 0.5, 0.5, 0.9]) if self.priorities else 0.5,
            "num_draft_tokens": rng.choice([0, 1, 3, 9]) if self.drafts else 0,
            "lora_task_id": rng.choice([None, 1, 2, 3]) if self.adapters else None,
            "encoder_len": rng.randint(0, 60) if self.cross else 0,
            "estimated_reusable_tokens": rng.randint(0, prompt_len) if self.credits else 0,
        }
        if values["beam_width"] > 1 and self.policy == "max_utilization":
            # The rule for one step counts the block in which the drafts end. If the prompt ends in
            # another one, beams take more blocks. Requests with beams never have drafts.
            values["num_draft_tokens"] = 0
        salt = rng.choice([None, "salt"]) if self.reuse and rng.random() < 0.2 else None
        ready = rng.random() < 0.95
        real = LlmRequest(
            self.next_id,
            tokens,
            max_new,
            state=LlmRequestState.CONTEXT_INIT if ready else LlmRequestState.UNKNOWN,
            cache_salt=salt,
            **values,
        )
        shadow = oracle.Request(
            self.next_id,
            prompt_len,
            max_new,
            beams=values["beam_width"],
            drafts=values["num_draft_tokens"],
            task=values["lora_task_id"],
            encoder_len=values["encoder_len"],
            credit=values["estimated_reusable_tokens"],
            priority=values["priority"],
            state=oracle.CONTEXT if ready else oracle.NOT_READY,
            prompt=list(tokens),
            salt=salt,
        )
        self.next_id += 1
        self.real[real.request_id] = real
        insert_by_priority(self.active, real)
        oracle.insert_by_priority(self.shadow, shadow)

    def iterate(self) -> None:
        for shadow in self.shadow:
            if shadow.state == oracle.NOT_READY and self.rng.random() < 0.3:
                shadow.state = oracle.CONTEXT
                self.real[shadow.request_id].move_to(LlmRequestState.CONTEXT_INIT)
        same("active", self.active, self.shadow)
        decide = getattr(self.capacity, self.policy)
        wanted, wanted_paused = decide(self.shadow)
        fitting, paused = self.scheduler.schedule_request(self.active)
        same("fitting", fitting, wanted)
        same("paused", paused, wanted_paused)
        in_flight = {i for batch in self.flying for i in batch}
        context, generation = self.micro_batch.schedule(fitting, in_flight)
        contexts, generations = self.micro_oracle.decide(wanted, in_flight)
        same("context", context, contexts)
        same("generation", generation, generations)
        for shadow in self.shadow:
            self.same_fields(shadow)
        for shadow in wanted_paused:
            if shadow.request_id in in_flight:
                self.flagged.add(shadow.request_id)
            else:
                self.pause(shadow)
        launched = self.launch(contexts, generations)
        self.flying.append(launched)
        if len(self.flying) > self.overlap:
            self.land(self.flying.pop(0))

    def same_fields(self, shadow: oracle.Request) -> None:
        real = self.real[shadow.request_id]
        got = (
            real.context_chunk_size,
            real.context_current_position,
            real.num_draft_tokens,
            real.prompt_len,
            real.max_new_tokens,
            real.num_generated,
            real.is_first_context_chunk,
            real.is_last_context_chunk,
        )
        wanted = (
            shadow.chunk,
            shadow.position,
            shadow.drafts,
            shadow.prompt_len,
            shadow.max_new,
            shadow.generated,
            shadow.is_first_chunk(),
            shadow.is_last_chunk(),
        )
        if shadow.state == oracle.CONTEXT:
            assert got == wanted, (shadow.request_id, got, wanted)
        self.num_chunks += shadow.chunk is not None and 0 < shadow.chunk < shadow.remainder()

    def pause(self, shadow: oracle.Request) -> None:
        request_id, real = shadow.request_id, self.real[shadow.request_id]
        self.free(request_id)
        real.pause(self.max_input_len)
        shadow.pause(self.max_input_len)
        shadow.prompt = list(real.tokens)
        self.num_paused += 1

    def free(self, request_id: int) -> None:
        for kv, memory in ((self.kv, self.memory), (self.cross, self.cross_memory)):
            if kv is not None and memory is not None and request_id in kv:
                kv.remove(request_id)
                memory.remove(request_id)

    def launch(
        self, contexts: list[oracle.Request], generations: list[oracle.Request]
    ) -> list[int]:
        launched = []
        starting = [self.real[s.request_id] for s in contexts if s.position == 0]
        with self.kv.holding_cached([r for r in starting if r.request_id not in self.kv]):
            for shadow in contexts:
                real = self.real[shadow.request_id]
                if real.request_id not in self.kv and not self.start(real, shadow):
                    continue
                launched.append(shadow)
        for shadow in launched:
            real = self.real[shadow.request_id]
            real.move_to_next_context_chunk()
            shadow.advance()
            if shadow.state == oracle.GENERATION:
                self.kv.store_context(real)
                shadow.launch_token()
                real.add_token(self.rng.randint(0, 3))
        for shadow in generations:
            real = self.real[shadow.request_id]
            try:
                self.kv.add_token(real.request_id)
            except CapacityError:
                assert self.may_lack_blocks()
                continue
            self.memory.add_token(shadow, shadow.prompt_len + shadow.generated)
            shadow.launch_token()
            real.add_token(self.rng.randint(0, 3))
            launched.append(shadow)
        return [shadow.request_id for shadow in launched]

    def start(self, real: LlmRequest, shadow: oracle.Request) -> bool:
        if self.cross is not None:
            assert self.cross_memory is not None
            self.cross.add_sequence(real)
            self.cross_memory.add_sequence(shadow)
        try:
            self.kv.add_sequence(real)
        except CapacityError:
            assert self.may_lack_blocks(), "blocks lacking for what was scheduled"
            return False
        self.memory.add_sequence(shadow)
        cached = self.kv.num_cached_tokens(real.request_id)
        # "Context position starts at the matched length; if the current chunk would not finish
        # the context, its end is floored to a block boundary."
        shadow.position = cached
        if cached and shadow.chunk is not None:
            end = cached + shadow.chunk
            floor = end - end % self.block
            if end < shadow.prompt_len and floor > cached:
                end = floor
            shadow.chunk = min(end, shadow.prompt_len) - cached
        return True

    def may_lack_blocks(self) -> bool:
        """Return whether blocks may run out.

        They may if the policy does not count them, or while a paused request is in flight.
        """
        return self.policy == "max_requests" or bool(self.flagged)

    def land(self, batch: list[int]) -> None:
        by_id = {shadow.request_id: shadow for shadow in self.shadow}
        for request_id in batch:
            shadow, real = by_id[request_id], self.real[request_id]
            stopped = shadow.is_generating() and self.rng.random() < 0.05
            if stopped or shadow.state == oracle.TO_COMPLETE:
                self.free(request_id)
                shadow.state = oracle.COMPLETE
                real.finish()
                self.flagged.discard(request_id)
                self.num_finished += 1
                if self.rng.random() < 0.8:  # else it stays and must be passed over
                    self.shadow.remove(shadow)
                    self.active.remove(real)
            elif request_id in self.flagged:
                self.flagged.discard(request_id)
                self.pause(shadow)

    def check_memory(self) -> None:
        self.kv.check()
        assert self.kv.get_num_free_blocks() == self.memory.free()
        if self.cross is not None and self.cross_memory is not None:
            assert self.cross.get_num_free_blocks() == self.cross_memory.free()
        for shadow in self.shadow:
            real = self.real[shadow.request_id]
            whole = self.kv.get_needed_resource_to_completion(real)
            assert whole == self.memory.whole_life(shadow), (real, whole)


def same(what: str, real: list[LlmRequest], shadow: list[oracle.Request]) -> None:
    got, wanted = [r.request_id for r in real], [s.request_id for s in shadow]
    assert got == wanted, f"{what}: {got} decided, {wanted} by the oracle"


def run_trace(
    seed: int, policy: str | None = None, reuse: bool | None = None, iterations: int = 40
) -> Trace:
    trace = Trace(seed, policy, reuse)
    for number in range(iterations):
        for _ in range(trace.rng.choice([0, 0, 1, 1, 5])):
            if len(trace.active) < 25:
                trace.arrive()
        try:
            trace.iterate()
            trace.check_memory()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, iteration {number}: {error}") from error
    return trace
