"""Why the first waiting request is not in an iteration, in the numbers of that iteration.

Reads counts alone, so that it says the same of a live loop and of a recording. The order of the
questions is that of the schedulers: memory before tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from gptmanager.picture.trace import Bounds, Reason


@dataclass(frozen=True, slots=True)
class Load:
    """What an iteration has taken. `reserved_blocks`: what its started requests may still take."""

    num_running: int
    num_tokens: int
    num_older: int  # of the running, those that had started in an earlier iteration
    free_blocks: int
    reserved_blocks: int


@dataclass(frozen=True, slots=True)
class Wish:
    """What the waiting request would take. `next_blocks` for its next step, of `life_blocks`."""

    context_tokens: int
    next_blocks: int
    life_blocks: int
    was_paused: bool


def explain_wait(bounds: Bounds, load: Load, wish: Wish) -> tuple[Reason, str]:
    """The limit that stands in the way first."""
    if load.num_running >= bounds.max_batch_size:
        text = f"{load.num_running} requests run, max_batch_size = {bounds.max_batch_size}"
        return Reason.BATCH, text
    if bounds.policy == "STATIC_BATCH" and load.num_older:
        return Reason.STATIC, f"the batch must end first: {load.num_running} of it still run"
    blocks = _explain_blocks(bounds, load, wish)
    if blocks:
        return Reason.BLOCKS, blocks
    left = bounds.max_num_tokens - load.num_tokens
    if bounds.chunk_unit is None:
        least, what = wish.context_tokens, "prompt"
    else:
        least, what = min(wish.context_tokens, bounds.chunk_unit), "smallest chunk"
    if least > left:
        text = f"its {what} ({least}) does not fit into the {left} tokens that are left of "
        return Reason.TOKENS, f"{text}max_num_tokens = {bounds.max_num_tokens}"
    text = f"{wish.next_blocks} of {load.free_blocks} free blocks would do for its next step"
    # a headroom for those that run: up to a block each
    is_tight = wish.next_blocks + load.num_running >= load.free_blocks
    if bounds.policy == "MAX_UTILIZATION" and (wish.was_paused or is_tight):
        return Reason.BLOCKS, f"{text}, but it starts only where those that run can go on too"
    return Reason.OTHER, text


def _explain_blocks(bounds: Bounds, load: Load, wish: Wish) -> str:
    free, reserved = load.free_blocks, load.reserved_blocks
    if wish.next_blocks > free:
        return f"its next step needs {wish.next_blocks} blocks, {free} are free"
    promises = bounds.policy in ("GUARANTEED_NO_EVICT", "STATIC_BATCH")
    if promises and wish.life_blocks > free - reserved:
        return (
            f"it needs {wish.life_blocks} blocks to its end; {free} are free, {reserved} of them "
            "reserved by those that run"
        )
    return ""
