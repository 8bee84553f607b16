"""Every scheduling rule once more: slow, obvious, and written from the contract's words alone.

Beside each rule stands its sentence. Nothing here imports the schedulers or the KV cache, so that
an error in them is not repeated. `tests/scheduler/test_scheduler_oracle.py` drives both over random
traces and compares each decision.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

NOT_READY, CONTEXT, GENERATION, TO_COMPLETE, COMPLETE = range(5)


@dataclass(eq=False)
class Request:
    request_id: int
    prompt_len: int
    max_new: int
    beams: int = 1
    drafts: int = 0
    task: int | None = None
    encoder_len: int = 0
    credit: int = 0
    priority: float = 0.5
    state: int = CONTEXT
    position: int = 0
    chunk: int | None = None
    generated: int = 0
    prompt: list[int] = field(default_factory=list)  # its tokens, for block reuse
    salt: Hashable = None

    # "Reached = numeric >=. Schedulable iff CONTEXT_INIT reached and GENERATION_COMPLETE not."
    def is_schedulable(self) -> bool:
        return CONTEXT <= self.state < COMPLETE

    # '"Generation in progress" includes GENERATION_TO_COMPLETE.'
    def is_generating(self) -> bool:
        return self.state in (GENERATION, TO_COMPLETE)

    # "first chunk = unset or position 0"
    def is_first_chunk(self) -> bool:
        return self.chunk is None or self.position == 0

    # "last chunk = unset or position+size == prompt_len"
    def is_last_chunk(self) -> bool:
        return self.chunk is None or self.position + self.chunk == self.prompt_len

    def remainder(self) -> int:
        return self.prompt_len - self.position

    # "Started" for a MAX_UTILIZATION victim: "generation, or context past its first chunk"
    def is_started(self) -> bool:
        return self.is_generating() or (self.state == CONTEXT and not self.is_first_chunk())

    # "Advancing adds the size and resets it to 0; with unset it jumps to prompt_len."
    def advance(self) -> None:
        if self.chunk is None:
            self.position = self.prompt_len
        else:
            self.position += self.chunk
            self.chunk = 0
        if self.position == self.prompt_len:
            self.state = GENERATION

    # "max_new tokens take max_new steps"
    def launch_token(self) -> None:
        self.generated += 1
        if self.generated == self.max_new:
            self.state = TO_COMPLETE

    # "beam 1: generated tokens move into the prompt (truncated to max_input_len), max_new shrinks
    # by the same number; beam > 1: generated tokens are discarded. [...] state CONTEXT_INIT,
    # position 0, chunk unset"
    def pause(self, max_input_len: int) -> None:
        if self.beams == 1:
            moved = max(0, min(self.generated, max_input_len - self.prompt_len))
            self.prompt_len += moved
            self.max_new -= moved
        self.generated = 0
        self.state, self.position, self.chunk = CONTEXT, 0, None


# "Priority insertion: stable, descending priority; equal priority keeps arrival order"
def insert_by_priority(active: list[Request], request: Request) -> None:
    place = 0
    while place < len(active) and active[place].priority >= request.priority:
        place += 1
    active.insert(place, request)


def ceil_div(number: int, by: int) -> int:
    return (number + by - 1) // by


class Memory:
    """The blocks of a pool without block reuse: counts are enough, no block is shared."""

    def __init__(
        self,
        num_blocks: int,
        block: int,
        window: int | None = None,
        sink: int = 0,
        cross: bool = False,
    ) -> None:
        self.num_blocks, self.block, self.cross = num_blocks, block, cross
        self.window = 10**9 if window is None else window
        # 'Sink tokens are padded ("bubble") to a whole block.'
        self.bubble = ceil_div(sink, block) * block - sink
        self.tables: dict[int, tuple[Request, int, int]] = {}  # shared blocks, entries per beam

    def full(self, tokens: int) -> int:
        return (min(tokens, self.window) + self.bubble) // self.block

    def entries(self, tokens: int) -> int:
        return ceil_div(min(tokens, self.window) + self.bubble, self.block)

    # "ceil(min(len,window)/tpb) blocks shared by all beams, except the last partial block, which
    # is per beam (none when the prompt ends on a block boundary; then the next block is per beam)"
    def add_sequence(self, request: Request) -> None:
        if self.cross:
            blocks = ceil_div(request.encoder_len, self.block)
            self.tables[request.request_id] = (request, blocks, blocks)
        else:
            prompt = request.prompt_len
            self.tables[request.request_id] = (request, self.full(prompt), self.entries(prompt))

    # "new block(s) when the stored count is a multiple of tpb; costs beam_width blocks. At the
    # attention-window limit the cache is cyclic: no growth"
    def add_token(self, request: Request, stored: int) -> None:
        _, shared, _ = self.tables[request.request_id]
        self.tables[request.request_id] = (request, shared, self.entries(stored))

    def remove(self, request_id: int) -> None:
        self.tables.pop(request_id, None)

    def held(self, request_id: int) -> int:
        if request_id not in self.tables:
            return 0
        request, shared, entries = self.tables[request_id]
        return shared + (entries - shared) * request.beams

    def free(self) -> int:
        return self.num_blocks - sum(map(self.held, self.tables))

    # "`get_needed_resource_to_completion` includes what is held"
    def whole_life(self, request: Request) -> int:
        if self.cross:
            return ceil_div(request.encoder_len, self.block)
        context = self.full(request.prompt_len)
        total = self.entries(request.prompt_len + request.max_new)
        return (total - context) * request.beams + context

    # "context blocks = floor(min(P,window)/tpb); total per beam = ceil(min(P+max_new,window)/tpb);
    # need = (total-context)*beam + context - already allocated (already allocated counts per beam
    # once past the context). Cross: ceil(encoder_len/tpb) while position 0 in context, else 0."
    def remaining(self, request: Request) -> int:
        if self.cross:
            begun = request.is_generating() or request.position > 0
            return 0 if begun else ceil_div(request.encoder_len, self.block)
        context = self.full(request.prompt_len)
        total = self.entries(request.prompt_len + request.max_new)
        allocated = self.tables[request.request_id][2] if request.request_id in self.tables else 0
        if allocated < context:
            return (total - context) * request.beams + context - allocated
        return (total - allocated) * request.beams

    # "first context chunk: blocks for min(P + min(draft,max_new), window), partial block times
    # beam - the WHOLE prompt even if only a chunk runs, and NOT the sampled token; later chunks 0;
    # generation: growth for min(steps*(draft+1), max_new - tokens already stored beyond the
    # prompt), steps = 2 with lookahead; 0 past the window; cross 0 in generation"
    def one_step(self, request: Request, lookahead: bool) -> int:
        if request.state == CONTEXT:
            if not request.is_first_chunk():
                return 0
            tokens = request.prompt_len + min(request.drafts, request.max_new)
            partial = self.entries(tokens) - self.full(tokens)
            return self.full(tokens) + partial * request.beams
        # "KV holds prompt_len + generated - 1 tokens"
        beyond = request.generated - 1
        steps = 2 if lookahead else 1
        growth = min(steps * (request.drafts + 1), request.max_new - beyond)
        stored = request.prompt_len + beyond
        return (self.entries(stored + growth) - self.entries(stored)) * request.beams

    # What a pass of MAX_UTILIZATION asks, `removed` being those it has paused so far. ---------

    # "scheduling-free grows by blocks only it held"
    def scheduling_free(self, removed: list[Request]) -> int:
        return self.free() + sum(self.held(request.request_id) for request in removed)

    def one_step_after(self, request: Request, lookahead: bool, removed: list[Request]) -> int:
        return self.one_step(request, lookahead)

    def begin_pass(self) -> None:
        """Begin a pass. A memory with shared blocks forgets what the last pass took."""

    def take(self, request: Request, removed: list[Request]) -> None:
        """The pass takes `request`."""


class Pages:
    """'each distinct task id counted once per pass'; 'task id may be shared for free'."""

    def __init__(self, limit: int, pages_of: Callable[[int], int]) -> None:
        self.limit, self.pages_of = limit, pages_of

    def new(self, request: Request, seen: set[int]) -> int:
        if request.task is None or request.task in seen:
            return 0
        return self.pages_of(request.task)


NO_PAGES = Pages(0, lambda task: 0)
Prefix = Hashable


class Delay:
    """'Delay for reuse': `first_missing` is "the prefix up to and including its first full block
    not in cache (full prompt blocks, last token included)", None if there is none."""

    def __init__(
        self, first_missing: Callable[[Request], Prefix | None], active: list[Request]
    ) -> None:
        self.first_missing = first_missing
        # "or an unfinished chunked context, contributes the same prefix"
        unfinished = [r for r in active if r.state == CONTEXT and not r.is_first_chunk()]
        self.contributed = {first_missing(r) for r in unfinished} - {None}

    def skips(self, request: Request) -> bool:
        # "for a first-chunk context [...] -> skip this iteration; else record it"
        if request.state != CONTEXT or not request.is_first_chunk():
            return False
        prefix = self.first_missing(request)
        if prefix is None:
            return False
        if prefix in self.contributed:
            return True
        self.contributed.add(prefix)
        return False


@dataclass
class Capacity:
    """One capacity policy; `decide` answers with the fitting and the paused requests."""

    max_num_requests: int
    memory: Memory | None = None
    cross: Memory | None = None
    pages: Pages = NO_PAGES
    lookahead: bool = False
    first_missing: Callable[[Request], Prefix | None] | None = None

    def delay(self, active: list[Request]) -> Delay:
        return Delay(self.first_missing or (lambda request: None), active)

    # "No KV manager: first max_num_requests schedulable requests."
    def max_requests(self, active: list[Request]) -> tuple[list[Request], list[Request]]:
        return [r for r in active if r.is_schedulable()][: self.max_num_requests], []

    def guaranteed_no_evict(
        self, active: list[Request], static: bool = False
    ) -> tuple[list[Request], list[Request]]:
        assert self.memory is not None
        # "no delay-for-reuse" in STATIC_BATCH
        delay = Delay(lambda r: None, []) if static else self.delay(active)
        taken: list[Request] = []
        pending: list[Request] = []
        seen: set[int] = set()
        reserved = reserved_cross = pages = 0
        # "pass 1 in order: running requests are always taken, reserving their remaining need;
        # others become pending; stop when max_num_requests reached"
        for request in active:
            if not request.is_schedulable():
                continue
            if len(taken) >= self.max_num_requests:
                break
            if not request.is_generating():
                pending.append(request)
                continue
            taken.append(request)
            reserved += self.memory.remaining(request)
            reserved_cross += self.cross.remaining(request) if self.cross else 0
            pages += self.pages.new(request, seen)
            seen |= {request.task} if request.task is not None else set()
        # "STATIC_BATCH: the same, but pass 2 only when pass 1 took nothing"
        if static and taken:
            return taken, []
        # "Pass 2 in order: take if need <= free - reserved (self and cross) and new adapter pages
        # fit. First KV misfit stops admission (head of line). An adapter misfit skips only that
        # request." Delay: "Checked before the count limit."
        for request in pending:
            if delay.skips(request):
                continue
            if len(taken) >= self.max_num_requests:
                break
            need = self.memory.remaining(request)
            need_cross = self.cross.remaining(request) if self.cross else 0
            if need > self.memory.free() - reserved:
                break
            if self.cross and need_cross > self.cross.free() - reserved_cross:
                break
            new_pages = self.pages.new(request, seen)
            if self.pages is not NO_PAGES and pages + new_pages > self.pages.limit:
                continue
            taken.append(request)
            reserved += need
            reserved_cross += need_cross
            pages += new_pages
            seen |= {request.task} if request.task is not None else set()
        return taken, []

    def static_batch(self, active: list[Request]) -> tuple[list[Request], list[Request]]:
        return self.guaranteed_no_evict(active, static=True)

    def max_utilization(self, active: list[Request]) -> tuple[list[Request], list[Request]]:
        assert self.memory is not None
        delay = self.delay(active)
        taken: list[Request] = []
        paused: list[Request] = []
        seen: set[int] = set()
        blocks = pages = 0
        place, end = 0, len(active)
        self.memory.begin_pass()
        while place < end:
            request = active[place]
            # "In MAX_UTILIZATION a retry of the same request after a pause sees its own record
            # and is skipped that iteration (quirk)."
            if not request.is_schedulable() or delay.skips(request):
                place += 1
                continue
            # "take if count < max_num_requests, sum of one-step needs <= scheduling-free blocks,
            # pages fit"
            need = self.memory.one_step_after(request, self.lookahead, paused)
            new_pages = self.pages.new(request, seen)
            if (
                len(taken) < self.max_num_requests
                and blocks + need <= self.memory.scheduling_free(paused)
                and (self.pages is NO_PAGES or pages + new_pages <= self.pages.limit)
            ):
                taken.append(request)
                self.memory.take(request, paused)
                blocks += need
                pages += new_pages
                seen |= {request.task} if request.task is not None else set()
                place += 1
                continue
            # "On a misfit: search from the END of the list back to the CURRENT request (inclusive)
            # for the last started request; pause it, shorten the walk to end before it, retry;
            # none found -> stop."
            victims = [i for i in range(place, end) if is_started_schedulable(active[i])]
            if not victims:
                break
            end = victims[-1]
            paused.append(active[end])
        return taken, paused


def is_started_schedulable(request: Request) -> bool:
    return request.is_schedulable() and request.is_started()


class ContextTooLong(Exception):
    pass


FIRST_COME_FIRST_SERVED, EQUAL_PROGRESS, FORCE_CHUNK = range(3)


@dataclass
class MicroBatch:
    max_batch_size: int
    max_num_tokens: int | None = None
    max_context_length: int | None = None
    policy: int | None = None
    unit: int = 1
    draft_rule: str = "reserve"
    credit_rule: str = "prefix"

    def decide(
        self, fitting: list[Request], in_flight: set[int]
    ) -> tuple[list[Request], list[Request]]:
        contexts: list[Request] = []
        generation: list[Request] = []
        charged = accepted = 0
        beams: int | None = None
        # "One pass in list order. Skip: not schedulable, in flight."
        for request in fitting:
            if not request.is_schedulable() or request.request_id in in_flight:
                continue
            if request.is_generating():
                cost = request.beams + request.drafts
            elif self.policy is None:
                cost = self.unchunked_cost(request)
            else:
                # "contexts are tentatively whole (+ drafts on the last chunk), not charged"
                request.chunk = request.remainder()
                cost = 0
            # "First token-budget misfit ENDS the scan."
            if self.max_num_tokens is not None and charged + cost > self.max_num_tokens:
                break
            # "Generation requests must share the beam width of the first one taken; others are
            # skipped without using a slot (budget check comes before this check)."
            if request.is_generating():
                if beams is not None and request.beams != beams:
                    continue
                beams = request.beams
            (generation if request.is_generating() else contexts).append(request)
            charged += cost
            # "max_batch_size counts every accepted request, also a context that later gets 0"
            accepted += 1
            if accepted >= self.max_batch_size:
                break
        recomputed = self.policy is not None and self.fit_chunks(contexts, charged)
        if self.policy is not None:
            # "chunk 0 requests are not scheduled this iteration"
            contexts = [request for request in contexts if request.chunk != 0]
        # "if sizes were recomputed, contexts not finishing come before finishing ones; inside each
        # part (and for generation) ascending LoRA task id, none first"
        by_task = lambda r: -1 if r.task is None else r.task  # noqa: E731
        contexts.sort(key=by_task)
        if recomputed:
            contexts.sort(key=Request.is_last_chunk)
        return contexts, sorted(generation, key=by_task)

    # "Unchunked cost max(1, tokens + drafts - credit)". "Unchunked context longer than
    # max_context_length is an error"
    def unchunked_cost(self, request: Request) -> int:
        tokens = request.prompt_len + request.drafts
        cost = max(1, tokens - credit(request))
        if self.max_context_length is not None and cost > self.max_context_length:
            raise ContextTooLong
        return cost

    # "prefix" (EQUAL_PROGRESS charges max(0, chunk - credit), FCFS min(chunk, remainder - credit))
    # and "shift" (chunk if credit + chunk < remainder, else remainder - credit)
    def chunk_cost(self, request: Request, chunk: int) -> int:
        free, rest = credit(request), request.remainder()
        if self.policy == FORCE_CHUNK:
            return chunk
        if self.credit_rule == "prefix" and self.policy == EQUAL_PROGRESS:
            return max(0, chunk - free)
        return chunk if free + chunk < rest else rest - free

    # "If any exceeds max_context_length, or their sum exceeds max_num_tokens - charged, sizes are
    # recomputed: all reset to 0 first, capacity = max_num_tokens - charged (unlimited if none).
    # If everything fits nothing is trimmed, drafts included."
    def fit_chunks(self, contexts: list[Request], charged: int) -> bool:
        costs = [r.remainder() - credit(r) + r.drafts for r in contexts]
        capacity = 10**9 if self.max_num_tokens is None else self.max_num_tokens - charged
        longest = 10**9 if self.max_context_length is None else self.max_context_length
        fits = all(cost <= longest for cost in costs) and sum(costs) <= capacity
        if fits and self.policy != FORCE_CHUNK:
            return False
        self.recompute(contexts, capacity, longest)
        return True

    def recompute(self, contexts: list[Request], capacity: int, longest: int) -> None:
        for request in contexts:
            request.chunk = 0
        if self.policy == EQUAL_PROGRESS:
            self.equal_progress(contexts, capacity, longest)
        elif self.policy == FIRST_COME_FIRST_SERVED:
            self.first_come_first_served(contexts, capacity, longest)
        else:
            self.force_chunk(contexts, capacity)
        self.trim_drafts(contexts, capacity, longest)

    # "rounds; each request in order gets +unit (clamped to its remainder) unless that breaks
    # capacity or max_context_length (then it keeps its size and the round goes on); stop when
    # capacity is full or a round makes no progress"
    def equal_progress(self, contexts: list[Request], capacity: int, longest: int) -> None:
        used, progress = 0, True
        while used < capacity and progress:
            progress = False
            for request in contexts:
                chunk = chunk_of(request)
                wanted = min(chunk + self.unit, request.remainder())
                more = self.chunk_cost(request, wanted) - self.chunk_cost(request, chunk)
                if used + more > capacity or wanted > longest:
                    continue
                progress = progress or wanted > chunk
                request.chunk = wanted
                used += more

    # "each in order gets min(remainder, capacity, max_context_length); if less than its remainder,
    # rounded DOWN to a unit multiple (may be 0); leftover capacity goes on to the next request"
    def first_come_first_served(self, contexts: list[Request], capacity: int, longest: int) -> None:
        for request in contexts:
            rest = request.remainder()
            # What the credit covers costs nothing: the largest chunk whose cost has room.
            chunk = rest if self.chunk_cost(request, rest) <= capacity else min(rest, capacity)
            # "maximum context length": what one pass computes (the sources; contract silent)
            if self.credit_rule == "prefix":
                chunk = min(chunk, longest + credit(request))
            elif self.chunk_cost(request, chunk) > longest:
                chunk = longest
            if chunk < rest:
                chunk -= chunk % self.unit
            request.chunk = chunk
            capacity -= self.chunk_cost(request, chunk)

    # "every context gets min(remainder, unit), 0 if it would exceed capacity; always applied"
    def force_chunk(self, contexts: list[Request], capacity: int) -> None:
        used = 0
        for request in contexts:
            chunk = min(request.remainder(), self.unit)
            request.chunk = chunk if used + chunk <= capacity else 0
            used += request.chunk

    # "Drafts then trimmed for last chunks: keep at most the free space in the last unit (0 if
    # exactly full), max_context_length - chunk, and capacity - sum of chunks; older code charges
    # the whole space even if fewer drafts exist, later code only the kept ones."
    def trim_drafts(self, contexts: list[Request], capacity: int, longest: int) -> None:
        # Contract silent on the credit here; the sources count what is computed, by any policy.
        used = sum(min(chunk_of(r), r.remainder() - credit(r)) for r in contexts)
        for request in contexts:
            if not request.is_last_chunk() or request.drafts == 0:
                continue
            chunk = chunk_of(request)
            space = min(-chunk % self.unit, longest - chunk, capacity - used)
            space = max(0, space)
            used += space if self.draft_rule == "reserve" else min(space, request.drafts)
            request.drafts = min(request.drafts, space)


def chunk_of(request: Request) -> int:
    assert request.chunk is not None
    return request.chunk


# "Reuse token credit (later): on the first chunk only."
def credit(request: Request) -> int:
    return min(request.credit, request.remainder()) if request.is_first_chunk() else 0
