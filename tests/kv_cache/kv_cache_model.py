"""What the KV cache's contract says, in plain dicts: the other side of `kv_cache_trial`.

Knows what every place of every block was computed from, which blocks can be found by what they
hold, and when each was freed. Shares no code with `gptmanager.kv_cache` and never asks it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gptmanager.request.llm_request import LlmRequest

Reuse = Literal["off", "whole", "part", "copy"]
REUSES: tuple[Reuse, ...] = ("off", "whole", "part", "copy")
_UNBOUNDED = 10**9
_DEFAULT_PRIORITY = 35


class Divergence(AssertionError):
    """The KV cache and the model say different things."""


class Options(NamedTuple):
    """What a KV cache is made of. `reuse`: of whole blocks, and of parts of free ones, and of
    parts of any, by copying. `host`: there is a host tier of `num_host_blocks`. The names of
    `KvCacheManager` otherwise."""

    num_blocks: int
    tokens_per_block: int
    max_attention_window: int | None = None
    sink_token_length: int = 0
    reuse: Reuse = "off"
    num_host_blocks: int = 0
    onboard_blocks: bool = True
    min_offload_tokens: int = 1
    secondary_offload_min_priority: int | None = None


@dataclass(slots=True)
class Life:
    """One sequence. A value stands for a token and all before it; `values` are those stored.

    `tokens` has one more in generation: the newest, which no block holds yet. The context is
    computed in the first beam: until they fork the others have no values.
    """

    request: LlmRequest
    reuses: bool
    root: int
    tokens: list[list[int]]  # a beam each
    values: list[list[int]]
    tables: list[list[int]] = field(default_factory=list)
    peak: int = 0  # the most tokens stored at any rewind

    @property
    def stored(self) -> int:
        return len(self.values[0])

    @property
    def is_forked(self) -> bool:
        """Whether all beams are computed."""
        return len(self.values) == len(self.tables)


class Match(NamedTuple):
    """What a prompt finds: whole blocks, then `num_partial` tokens of one of `candidates`."""

    whole: list[int]
    num_partial: int = 0
    candidates: frozenset[int] = frozenset()


class KvCacheModel:
    """Places, contents and free blocks, as they must be."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.size = options.tokens_per_block
        self.window = options.max_attention_window or _UNBOUNDED
        self.sink = options.sink_token_length
        self.padding = -self.sink % self.size
        self.lives: dict[int, Life] = {}
        self.memory: dict[tuple[int, int], int] = {}  # place -> value
        self.freed: dict[int, int] = dict.fromkeys(range(options.num_blocks), 0)  # block -> when
        self.host_free = {options.num_blocks + i for i in range(options.num_host_blocks)}
        self.host_used: dict[int, None] = {}  # the least recently used first
        self.due: deque[tuple[int, int, int]] = deque()  # copies that were told of, in order
        self.contents: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> value before, tokens
        self.priorities: dict[int, int] = {}  # block -> of what can be found in it
        self.behind: dict[int, dict[tuple[int, ...], int]] = {}  # the same, by those
        self.now = 0
        self._values: dict[Hashable, int] = {}

    # Lengths ------------------------------------------------------------------------------------

    def num_blocks_of(self, num_tokens: int) -> int:
        """The length of a block table."""
        return -(-(min(num_tokens, self.window) + self.padding) // self.size)

    def context_blocks(self, request: LlmRequest) -> int:
        """Blocks of the prompt in all beams: the last, if partial, once for each."""
        whole = (min(request.prompt_len, self.window) + self.padding) // self.size
        return whole + (self.num_blocks_of(request.prompt_len) - whole) * request.beam_width

    def life_blocks(self, request: LlmRequest) -> int:
        whole = (min(request.prompt_len, self.window) + self.padding) // self.size
        total = self.num_blocks_of(request.prompt_len + request.max_new_tokens)
        return whole + (total - whole) * request.beam_width

    def growth(self, life: Life, steps: int) -> int:
        """Blocks that so many steps of generation take."""
        room = life.request.max_new_tokens - (life.stored - life.request.prompt_len)
        length = self.num_blocks_of(life.stored + min(steps, room))
        return (length - len(life.tables[0])) * len(life.tables)

    def held(self, request_ids: Iterable[int]) -> set[int]:
        tables = (table for i in request_ids for table in self.lives[i].tables)
        return {block for table in tables for block in table}

    # Values and places --------------------------------------------------------------------------

    def new_life(self, request: LlmRequest) -> Life:
        reuses = (
            self.options.reuse != "off"
            and request.prompt_len + request.max_new_tokens <= self.window
        )
        # what takes no part in reuse has values that nothing else has
        root = (request.lora_task_id, request.cache_salt) if reuses else ("alone", self.now)
        beams = request.beam_width
        prompt = request.tokens[: request.prompt_len]
        return Life(request, reuses, self._value(root), [prompt[:] for _ in range(beams)], [[]])

    def values_of(self, life: Life, beam: int, end: int) -> list[int]:
        values = life.values[beam][:end]
        value = values[-1] if values else life.root
        for token in life.tokens[beam][len(values) : end]:
            value = self._value((value, token))
            values.append(value)
        return values

    def place(self, table: list[int], position: int) -> tuple[int, int]:
        if position >= self.sink:
            position = self.sink + (position - self.sink) % (self.window - self.sink)
        block, offset = divmod(self.padding + position, self.size)
        return table[block], offset

    def write(self, life: Life, end: int) -> None:
        """Compute the tokens up to `end`."""
        for beam, table in enumerate(life.tables[: len(life.values)]):
            values = self.values_of(life, beam, end)
            for position in range(len(life.values[beam]), end):
                place = self.place(table, position)
                if place[0] in self.contents:
                    raise Divergence(f"block {place[0]} can be found and is written to")
                self.memory[place] = values[position]
            life.values[beam] = values

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        for source, destination, num_tokens in copies:
            for offset in range(num_tokens):
                if (source, offset) in self.memory:  # padding is never written
                    self.memory[destination, offset] = self.memory[source, offset]

    def misread(self, life: Life) -> str | None:
        """The first position that does not hold what the next token must see there."""
        memory, stored = self.memory, life.stored
        # what the next token will see: the window's last place is its own
        oldest = max(self.sink, stored + 1 - (self.window - self.sink))
        positions = [*range(min(self.sink, stored)), *range(oldest, stored)]
        for beam, table in enumerate(life.tables[: len(life.values)]):
            values = life.values[beam]
            for position in positions:
                if memory.get(self.place(table, position)) != values[position]:
                    block = self.place(table, position)[0]
                    return f"block {block} does not hold position {position} of beam {beam}"
        return None

    # What can be found --------------------------------------------------------------------------

    def match(self, life: Life) -> Match:
        """What of the prompt, but for its last token, can be found."""
        if not life.reuses:
            return Match([])
        prompt, size = life.tokens[0][:-1], self.size
        whole: list[int] = []
        value = life.root
        while len(prompt) >= (len(whole) + 1) * size:
            key = tuple(prompt[len(whole) * size : (len(whole) + 1) * size])
            block = self.behind.get(value, {}).get(key)
            if block is None or (self.is_far(block) and not self.options.onboard_blocks):
                break
            whole.append(block)
            value = self._end(block)
        return Match(whole, *self._partial(value, prompt[len(whole) * size :]))

    def _partial(self, value: int, wanted: list[int]) -> tuple[int, frozenset[int]]:
        best, candidates = 0, set[int]()
        for tokens, block in self.behind.get(value, {}).items():
            if not self._may_be_partial(block):
                continue
            if self.options.reuse == "whole" and [*tokens] != wanted[: len(tokens)]:
                continue
            common = 0
            while common < min(len(tokens), len(wanted)) and tokens[common] == wanted[common]:
                common += 1
            if common > best:
                best, candidates = common, set()
            if common == best and best:
                candidates.add(block)
        return best, frozenset(candidates)

    def can_take_over(self, block: int) -> bool:
        return block in self.freed and self.is_leaf(block)

    def _may_be_partial(self, block: int) -> bool:
        if self.is_far(block):
            return self.options.onboard_blocks
        return self.options.reuse == "copy" or self.can_take_over(block)

    def store(self, life: Life, end: int) -> None:
        """The first `end` tokens of a sequence can be found from now on."""
        if not life.reuses:
            return
        value, tokens = life.root, life.tokens[0]
        for index, block in enumerate(life.tables[0]):
            start = index * self.size
            key = tuple(tokens[start : min(end, start + self.size)])
            if not key:
                return
            known = self.behind.setdefault(value, {})
            if key not in known:
                covered = len(key) < self.size and self.options.reuse != "whole"
                covered = covered and any(other[: len(key)] == key for other in known)
                if covered or block in self.contents:
                    return
                self.contents[block] = value, key
                self.priorities[block] = _DEFAULT_PRIORITY
                known[key] = block
            elif self.is_far(known[key]) and block not in self.contents:
                self.host_drop(known[key])
                self.move(known[key], block)
            if life.request.retention_priority is not None:
                self.priorities[known[key]] = life.request.retention_priority
            value = self._end(known[key])

    def is_leaf(self, block: int) -> bool:
        return block not in self.contents or not self.behind.get(self._end(block))

    def is_end(self, block: int) -> bool:
        """No block of the pool comes right behind it."""
        if block not in self.contents:
            return True
        return all(map(self.is_far, self.behind.get(self._end(block), {}).values()))

    def is_far(self, block: int) -> bool:
        """On the host."""
        return block >= self.options.num_blocks

    def forget(self, block: int) -> None:
        """It is written to: neither it nor what lies behind it can be found."""
        if block not in self.contents:
            return
        end = self._end(block)
        value, key = self.contents.pop(block)
        del self.priorities[block]
        if self.is_far(block):
            self.host_drop(block)
        del self.behind[value][key]
        for other in [*self.behind.get(end, {}).values()] if len(key) == self.size else ():
            self.forget(other)

    def _end(self, block: int) -> int:
        value, tokens = self.contents[block]
        for token in tokens:
            value = self._value((value, token))
        return value

    def _value(self, key: Hashable) -> int:
        return self._values.setdefault(key, len(self._values))

    # Free blocks --------------------------------------------------------------------------------

    def hand_out(self, block: int) -> None:
        """The KV cache gives this block away to be written to: was it its turn?"""
        if block not in self.freed:
            raise Divergence(f"block {block} is handed out and not free")
        if block in self.contents:
            empty = [other for other in self.freed if other not in self.contents]
            if empty:
                raise Divergence(f"block {block}, which can be found, goes before {empty}")
            leaves = [other for other in self.freed if self.is_end(other)]
            rank = {other: (self.priorities[other], self.freed[other]) for other in self.freed}
            earlier = [other for other in leaves or self.freed if rank[other] < rank[block]]
            if earlier or (leaves and block not in leaves):
                raise Divergence(f"block {block} goes before {earlier or leaves}")
            self._offload(block)
        del self.freed[block]
        self.forget(block)

    def _offload(self, block: int) -> None:
        """What the block holds moves to the host, where there is room for it."""
        options, (_, tokens) = self.options, self.contents[block]
        priority = self.priorities[block]
        if not options.num_host_blocks or len(tokens) < options.min_offload_tokens:
            return
        if priority < (options.secondary_offload_min_priority or 0):
            return
        if not self.host_free:
            leaves = [other for other in self.host_used if self.is_leaf(other)]
            oldest = min(leaves, key=self.priorities.__getitem__, default=None)
            if oldest is None or self.priorities[oldest] > priority:
                return
            self.forget(oldest)
        _, to, _ = self.expect_copy({block}, self.host_free, len(tokens))
        self.host_free.remove(to)
        self.host_used[to] = None
        self.move(block, to)

    def onboard(self, block: int, to: int) -> None:
        """What lies on the host comes into a block that was handed out for it."""
        self.expect_copy({block}, {to}, self.size)
        self.host_free.add(block)
        self.move(block, to)

    def host_drop(self, block: int) -> None:
        del self.host_used[block]
        self.host_free.add(block)

    def move(self, block: int, to: int) -> None:
        value, key = self.contents[to] = self.contents.pop(block)
        self.priorities[to] = self.priorities.pop(block)
        self.behind[value][key] = to

    def expect_copy(
        self, sources: Collection[int], destinations: Collection[int], num_tokens: int
    ) -> tuple[int, int, int]:
        """The next copy that is due must be one of these."""
        if self.due:
            copy = self.due.popleft()
            if copy[0] in sources and copy[1] in destinations and copy[2] == num_tokens:
                return copy
            raise Divergence(f"the copy {copy} is not of {sources} to {destinations}")
        raise Divergence(f"no copy of {sources} to {destinations}")

    def take(self, blocks: Iterable[int]) -> None:
        """These are held now, to be read."""
        for block in blocks:
            self.freed.pop(block, None)

    def free(self, blocks: Iterable[int]) -> None:
        """Those of `blocks` that nobody holds any more."""
        for block in set(blocks) - self.held(self.lives):
            self.freed[block] = self.now
