"""Resumes the unfinished requests of a journal in a new manager.

The journal and the host's own record (`restore_cb`) decide where each request continues.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gptmanager.config import Delivered, OptionalParams
from gptmanager.errors import CallbackError, JournalError, quoted, response_text
from gptmanager.journal.accepted import AcceptedRequests, read_response
from gptmanager.journal.entries import Entry
from gptmanager.journal.journal import Journal
from gptmanager.journal.journaled_host import Response
from gptmanager.lifecycle.clock import system_time
from gptmanager.lifecycle.log import logger
from gptmanager.recorder.requests import RecordedProcessor
from gptmanager.request.inference_request import InferenceRequest, NamedTensor
from gptmanager.request.post_processor import name_of
from gptmanager.step import Progress

# inputs that ask for outputs that the journal does not keep: of the generated tokens, of the prompt
_OF_TOKENS = {"return_generation_logits", "num_top_log_probs"}
_OF_PROMPT = {"return_context_logits", "num_prompt_log_probs"}
_BY_TOKEN = ("output_ids", "output_log_probs")  # outputs `[1, beam, tokens]` that the journal keeps


class Resumption(NamedTuple):
    """The requests that a new manager continues, and the responses that it sends first.

    `requests` are in the order of their acceptance. `progress` has the progress of each of them.
    `ended` has the ids of the requests with a final response that the host has already received.
    If `restore_cb` is None or returns None, a final response in the journal counts as received.
    """

    requests: list[InferenceRequest]
    progress: list[Progress]
    responses: list[Response]
    ended: list[int]


def resume(journal: Journal, accepted: AcceptedRequests, params: OptionalParams) -> Resumption:
    """Decide how each request of the journal continues.

    A request that cannot be resumed gets a final error. Raise CallbackError if `restore_cb` fails.
    """
    found = Resumption([], [], [], [])
    for request_id, entry in journal.entries.items():
        delivered = _delivered(params.restore_cb, request_id)
        if (delivered is not None and delivered.final) or (entry.last and delivered is None):
            found.ended.append(request_id)
            continue
        try:
            if entry.last:
                assert delivered is not None
                found.responses.extend(_again(request_id, entry, delivered.num_tokens))
                continue
            request, progress = _resumed(entry, accepted, params, delivered)
        except Exception as error:
            logger.warning("request %d cannot be resumed", request_id, exc_info=error)
            text = f"the request cannot be resumed: {response_text(error)}"
            found.responses.append((request_id, [], True, response_text(JournalError(text))))
            continue
        found.requests.append(request)
        found.progress.append(progress)
    accepted.remove_unused()
    return found


def _delivered(restore: Callable[[int], Any] | None, request_id: int) -> Delivered | None:
    if restore is None:
        return None
    try:
        answer = restore(request_id)
    except Exception as error:
        raise CallbackError(f"restore_cb raised {response_text(error)}") from error
    is_valid = isinstance(answer, Delivered) and (
        (type(answer.num_tokens), type(answer.final)) == (int, bool) and answer.num_tokens >= 0
    )
    if answer is not None and not is_valid:
        raise CallbackError(
            f"restore_cb returned {quoted(answer)}, expected None, or a Delivered with at least 0 "
            "tokens and final True or False"
        )
    return answer  # type: ignore[no-any-return]


def _resumed(
    entry: Entry, accepted: AcceptedRequests, params: OptionalParams, delivered: Delivered | None
) -> tuple[InferenceRequest, Progress]:
    if entry.num_starts >= params.journal_max_resumes:
        raise JournalError(
            f"{entry.num_starts} managers have resumed it and none has sent a token of it "
            f"(journal_max_resumes = {params.journal_max_resumes}); it may be what ends the process"
        )
    read = accepted.read(entry.accepted)
    renews_adapter = accepted.renews_adapter(read)
    request = accepted.restore(read)
    _restore_processor(request, params)
    age_s = max(0.0, system_time() - read.time)
    for name in ("deadline_s", "queue_timeout_s"):
        limit = getattr(request, name)
        if isinstance(limit, (int, float)) and math.isfinite(limit):
            setattr(request, name, max(0.0, limit - age_s))
    tokens, log_probs, num_sent = entry.tokens, entry.log_probs, len(entry.tokens)
    if delivered is not None and request.is_streaming:
        num_sent = delivered.num_tokens
        if num_sent < len(tokens) and _lacks_outputs(request, num_sent, params):
            tokens, log_probs = tokens[:num_sent], log_probs[:num_sent]
    progress = Progress(
        *(request.request_id, tuple(tokens), tuple(log_probs), num_sent, age_s, renews_adapter)
    )
    return request, progress


def _lacks_outputs(request: InferenceRequest, num_sent: int, params: OptionalParams) -> bool:
    """Return whether a request asks for outputs that neither its host nor the journal has.

    The host has `num_sent` tokens of the request, and lacks others. These are then computed again.
    """
    asked, gathers = _OF_TOKENS, params.gather_generation_logits
    if not num_sent:
        asked, gathers = asked | _OF_PROMPT, gathers or params.gather_context_logits
    return gathers or not asked.isdisjoint(request.tensors)


def _restore_processor(request: InferenceRequest, params: OptionalParams) -> None:
    """Set a request's Python post-processor. Raise JournalError if a rank would not have it."""
    processor, ranks = request.logits_post_processor, params.parallel_config
    if processor is not None and ranks is not None and ranks.replicate_logits_post_processors:
        if ranks.tensor_parallel_size > 1:
            raise JournalError(
                f"its logits_post_processor {name_of(processor)} must be called on other ranks, "
                "too (replicate_logits_post_processors), but only rank 0 has the journal"
            )
    if not isinstance(processor, RecordedProcessor):
        return
    restore = params.restore_processor_cb
    found = None if restore is None else restore(request.request_id, request.client_id)
    if found is None:
        why = (
            "no restore_processor_cb is set" if restore is None else "restore_processor_cb has none"
        )
        raise JournalError(f"its logits_post_processor {processor.name} is code, and {why}")
    request.logits_post_processor = found


def _again(request_id: int, entry: Entry, num_tokens: int) -> list[Response]:
    """Return the responses that a host with `num_tokens` tokens lacks; the last one is final."""
    tensors, error = read_response(entry.last)
    responses: list[Response] = []
    by_name = dict(tensors)
    if error or "output_offset" not in by_name:
        return [(request_id, tensors, True, error)]
    offset, ids = int(by_name["output_offset"][0]), by_name["output_ids"]
    if num_tokens < offset:
        own = entry.tokens[num_tokens:offset]
        shape = 1, ids.shape[1], len(own)
        missing = [
            NamedTensor("output_ids", torch.tensor(own, dtype=torch.int32).expand(shape).clone()),
            NamedTensor("sequence_length", torch.full(shape[:2], len(own), dtype=torch.int32)),
        ]
        if entry.log_probs:
            shown = torch.tensor([[entry.log_probs[num_tokens:offset]]])
            sums = torch.tensor([[math.fsum(entry.log_probs[:offset])]])
            missing.append(NamedTensor("output_log_probs", shown))
            missing.append(NamedTensor("cum_log_probs", sums))
        missing.append(NamedTensor("output_offset", torch.tensor([num_tokens]).int()))
        responses.append((request_id, missing, False, ""))
    elif (extra := num_tokens - offset) > 0:
        rest = {name: by_name[name][:, :, extra:] for name in _BY_TOKEN if name in by_name}
        rest["output_offset"] = torch.tensor([num_tokens]).int()
        rest["sequence_length"] = (by_name["sequence_length"] - extra).clamp(min=0)
        tensors = [NamedTensor(name, rest.get(name, tensor)) for name, tensor in tensors]
    return [*responses, (request_id, tensors, True, "")]
