"""Why no token can be chosen from a row of logits, in words.

Knows what a request asks for that changes its logits; decides nothing.
"""

from __future__ import annotations

from gptmanager.errors import LogitsError
from gptmanager.loop.active_request import ActiveRequest
from gptmanager.step import NOT_FINITE


def fault_error(request: ActiveRequest, fault: int, iteration: int) -> LogitsError:
    """What ends a request whose next token is `fault`: NO_TOKEN or NOT_FINITE."""
    number = request.num_output + (request.search is None)
    where = f"generated token {number} (iteration {iteration})"
    inputs = ", ".join(_changes(request)) or "none"
    if fault == NOT_FINITE:
        text = f"the logits of {where} hold NaN or +inf"
    else:
        text = f"no token is possible as {where}: every logit is -inf"
    return LogitsError(f"{text}; inputs of the request that change them: {inputs}")


def _changes(request: ActiveRequest) -> list[str]:
    """What the request asks for that changes logits, in the order in which that is done."""
    sampling = request.sampling
    asked = {
        "embedding_bias": sampling.embedding_bias,
        "repetition_penalty": sampling.repetition_penalty != 1,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "bad_words_list": sampling.bad_words,
        "noRepeatNgramSize": sampling.no_repeat_ngram_size,
        "min_length": sampling.min_length,
    }
    names = [name for name, is_asked in asked.items() if is_asked]
    processor = request.processor
    return names if processor is None else [f"logits_post_processor {processor.name}", *names]
