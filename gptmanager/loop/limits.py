"""`Limits`: the limits of a request, fixed when the manager starts, and checks of its lengths."""

from __future__ import annotations

from dataclasses import dataclass

from gptmanager.config import PromptLookup
from gptmanager.errors import CapacityError, InvalidRequestError
from gptmanager.lifecycle.log import logger
from gptmanager.request.adapter_modules import AdapterLimits


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a request, and how many requests may run and wait. Lengths are in tokens.

    `pool_limited` means that the KV cache bounds `max_seq_len`. `max_run_len` limits prompt + new
    tokens - 1 if the policy evicts and contexts are not chunked: a request may then have to run its
    whole history as one context again. `max_num_requests` requests may run at once, and
    `max_waiting` more may wait, or any number if it is None. With `hidden_size` 0, the model does
    not accept prompt embeddings. `drafts_refused` says why drafts are refused; it is "" if they are
    not. With `adapters` None, adapters are refused.
    """

    vocab_size: int
    max_seq_len: int
    max_input_len: int
    num_blocks: int
    tokens_per_block: int
    pool_limited: bool = False
    max_run_len: int | None = None
    max_beam_width: int = 1
    lookup: PromptLookup | None = None
    drafts_refused: str = ""
    exclude_input_in_output: bool = False
    gather_context_logits: bool = False
    gather_generation_logits: bool = False
    normalize_log_probs: bool = True
    hidden_size: int = 0
    seed: int = 0
    max_num_requests: int = 0
    max_waiting: int | None = None
    adapters: AdapterLimits | None = None


def fit_length(request_id: int, prompt_len: int, max_new_tokens: int, limits: Limits) -> int:
    """Return `max_new_tokens`, lowered to the number of tokens that fit after the prompt.

    Raise InvalidRequestError or CapacityError if the request cannot run with these lengths.
    """
    if prompt_len == 0:
        raise InvalidRequestError("input_ids is empty, expected at least 1 token")
    if prompt_len > limits.max_input_len:
        text = (
            f"Prompt length ({prompt_len}) exceeds maximum input length ({limits.max_input_len})."
        )
        if limits.pool_limited and prompt_len >= limits.max_seq_len:
            needed = -(-(prompt_len + 1) // limits.tokens_per_block)
            blocks = f"KV cache blocks of {limits.tokens_per_block} tokens"
            if needed > limits.num_blocks:
                raise CapacityError(
                    f"{text} It needs {needed} {blocks}, the cache has {limits.num_blocks}."
                )
            raise CapacityError(
                f"{text} {limits.num_blocks} {blocks} hold at most {limits.max_seq_len} tokens of "
                "one request, (blocks - 1) x tokens_per_block + 1."
            )
        raise InvalidRequestError(text)
    room = limits.max_seq_len - prompt_len
    if max_new_tokens > room:
        logger.warning(
            "request %d: request_output_len = %d lowered to %d: prompt of %d tokens, "
            "max_seq_len = %d",
            *(request_id, max_new_tokens, room, prompt_len, limits.max_seq_len),
        )
        max_new_tokens = room
    run_len = prompt_len + max_new_tokens - 1
    if limits.max_run_len is not None and run_len > limits.max_run_len:
        raise InvalidRequestError(
            "Request sequence length is potentially greater than max input length: prompt + new "
            f"tokens - 1 = {run_len}, limit {limits.max_run_len}. This cannot be run unless "
            "context chunking is enabled or the GUARANTEED_NO_EVICT scheduling policy is used"
        )
    return max_new_tokens


def check_context(num_tokens: int, limits: Limits) -> None:
    """Raise CapacityError if a request cannot compute its prompt and output as one new context."""
    if num_tokens > limits.max_input_len:
        raise CapacityError(
            f"the request must compute its {num_tokens} tokens again, but a context that does not "
            f"run in chunks has at most {limits.max_input_len} tokens: set enable_chunked_context"
        )


def check_pool(prompt_len: int, max_new_tokens: int, beam_width: int, limits: Limits) -> None:
    """Raise CapacityError if the cache cannot hold all beams at their full length.

    Beams share only the full blocks of the prompt.
    """
    size = limits.tokens_per_block
    shared = prompt_len // size
    needed = shared + (-(-(prompt_len + max_new_tokens) // size) - shared) * beam_width
    if needed > limits.num_blocks:
        raise CapacityError(
            f"{beam_width} beams of {prompt_len} + {max_new_tokens} tokens need {needed} KV cache "
            f"blocks of {size} tokens, the cache has {limits.num_blocks}"
        )
