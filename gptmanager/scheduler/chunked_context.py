"""Distributes the tokens of a step over contexts, and then over the drafts at their ends.

The decisions are written to the requests, as `context_chunk_size` or `num_draft_tokens`. `room` is
the number of tokens that the step has left. A chunk is a multiple of `unit` tokens, or all that
remains of its context. `longest` is the most tokens of one context in the step. If `prefix` is
True, a context's first chunk begins with its reusable tokens: `share_equally` does not charge them,
and `serve_in_order` permits them in addition to `longest`. If `prefix` is False, the first chunk
starts after the reusable tokens.
"""

from __future__ import annotations

from gptmanager.arguments import at_least
from gptmanager.config import ContextChunkingPolicy
from gptmanager.errors import ConfigError
from gptmanager.request.llm_request import LlmRequest, RequestList

UNLIMITED = 1 << 62  # requests or tokens, without a limit


def share_equally(requests: RequestList, room: int, unit: int, longest: int, prefix: bool) -> None:
    """Give contexts one unit each, in rounds. A context that cannot grow in a round drops out."""
    sizes = [0] * len(requests)
    lengths = [r.prompt_len - r.context_current_position for r in requests]
    credits = [r.estimated_reusable_tokens and credit_of(r) for r in requests]
    growing = list(range(len(requests)))
    size = charged = 0  # all growing contexts have the same size
    while growing and charged < room:
        grown, next_size = [], size + unit
        for index in growing:
            remaining, credit = lengths[index], credits[index]
            larger = next_size if next_size < remaining else remaining
            cost = larger - size
            if credit and prefix:
                cost = max(0, larger - credit) - max(0, size - credit)
            elif credit:
                cost = min(larger, remaining - credit) - min(size, remaining - credit)
            if charged + cost <= room and size < larger <= longest:
                sizes[index] = larger
                charged += cost
                grown.append(index)
        growing, size = grown, next_size
    for request, size in zip(requests, sizes, strict=True):
        if request.context_chunk_size != size:
            request.context_chunk_size = size


def serve_in_order(requests: RequestList, room: int, unit: int, longest: int, prefix: bool) -> None:
    """Give each context, in order, as many tokens as possible.

    Tokens that are lost by rounding down to units go to later contexts.
    """
    for request in requests:
        remaining = request.prompt_len - request.context_current_position
        credit = credit_of(request) if request.estimated_reusable_tokens else 0
        cost = remaining - credit
        size = remaining if cost <= room else room
        if prefix:
            if size > credit + longest:
                size = credit + longest
        elif min(size, cost) > longest:
            size = longest
        if size < remaining:
            size -= size % unit
        if request.context_chunk_size != size:  # most waiting requests keep their 0
            request.context_chunk_size = size
        room -= size if size < cost else cost


def share_units(requests: RequestList, room: int, unit: int) -> None:
    """Give each context `unit` tokens, or its remaining tokens if they are fewer.

    If `room` is too small, the context gets 0 tokens. Reusable tokens are charged like all other
    tokens.
    """
    for request in requests:
        size = min(request.context_remaining_length, unit)
        request.context_chunk_size = size = size if size <= room else 0
        room -= size


def trim_drafts(requests: RequestList, room: int, unit: int, longest: int, reserves: bool) -> None:
    """Trim the drafts after the last chunk of each context to the space that is left for them.

    The space is the rest of the chunk's last unit, limited by `longest` and `room`. With
    `reserves`, the whole space is charged, not only the kept drafts.
    """
    if not any(request.num_draft_tokens for request in requests):
        return
    for request in requests:
        cost = request.context_remaining_length - credit_of(request)
        room -= min(request.context_chunk_size or 0, cost)
    for request in requests:
        num_drafts = request.num_draft_tokens
        if num_drafts and request.is_last_context_chunk:
            size = request.context_chunk_size or 0
            space = max(0, min(-size % unit, longest - size, room))
            request.num_draft_tokens = kept = min(num_drafts, space)
            room -= space if reserves else kept


def first_credit(request: LlmRequest) -> int:
    """Return the number of reusable tokens of a context in its first chunk, or 0 in a later chunk.

    A context without a chunk size counts as a context in its first chunk.
    """
    if not request.is_first_context_chunk:
        return 0
    return min(request.estimated_reusable_tokens, request.context_remaining_length)


def credit_of(request: LlmRequest) -> int:
    """Return the number of reusable tokens of a context, or 0 if the context has started."""
    if request.context_current_position:
        return 0
    return min(request.estimated_reusable_tokens, request.prompt_len)


def check_policy(policy: ContextChunkingPolicy, unit: int, longest: int | None) -> None:
    """Raise ConfigError for an invalid policy, unit, or combination with `longest`."""
    if not isinstance(policy, ContextChunkingPolicy):
        raise ConfigError(
            f"context_chunking_policy must be a ContextChunkingPolicy, got {policy!r}"
        )
    at_least(1, "chunk_unit", unit)
    if policy is ContextChunkingPolicy.FORCE_CHUNK and longest is not None and longest < unit:
        raise ConfigError(f"chunk_unit = {unit} must be at most max_context_length = {longest}")
