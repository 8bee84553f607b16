"""The state of an active request as data, and functions that read and restore it."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

from gptmanager.decoding.deferred import beginning
from gptmanager.decoding.end_rule import EndRuleState, restored_end_rule
from gptmanager.decoding.prompt_lookup import Drafter, DraftsState, RequestDrafts
from gptmanager.decoding.search.beam_search import BeamParams
from gptmanager.decoding.search.beam_state import BeamState, beam_state, restore_beams
from gptmanager.errors import InvalidRequestError
from gptmanager.kv_cache.state import Salt
from gptmanager.loop.active_request import ActiveRequest
from gptmanager.loop.limits import Limits
from gptmanager.loop.request_times import RequestTimes, TimesState
from gptmanager.request.adapter import LoraInputs
from gptmanager.request.input_rows import HostRows
from gptmanager.request.llm_request import LlmRequestState
from gptmanager.request.output_options import OutputOptions
from gptmanager.request.post_processor import RequestProcessor
from gptmanager.request.sampling_params import SamplingParams


class ProgressState(NamedTuple):
    """The attributes of an `ActiveRequest` that are set after its construction, by name."""

    state: LlmRequestState
    slot: int
    epoch: int
    prompt_len: int
    orig_prompt_len: int
    num_tokens: int
    max_new_tokens: int
    context_current_position: int
    context_chunk_size: int | None
    estimated_reusable_tokens: int
    num_draft_tokens: int
    pause_count: int
    is_serial: bool
    stop_state: int
    num_sent: int
    cached_tokens: int
    awaited: int = 0
    adapter_digest: str = ""
    adapter_slot: int = -1


class RequestState(NamedTuple):
    """The state of an `ActiveRequest`, by attribute name."""

    request_id: int
    tokens: tuple[int, ...]
    sampling: SamplingParams
    end_rule: EndRuleState
    output: OutputOptions
    times: TimesState
    drafts: DraftsState
    beams: BeamParams | None
    search: BeamState | None
    priority: float
    cache_salt: Salt
    retention_priority: int | None
    processor: RequestProcessor | None
    client_id: int | None
    prompt_table: HostRows | None
    progress: ProgressState
    lora_task_id: int | None = None


_read_progress = attrgetter(*ProgressState._fields)


def request_state(request: ActiveRequest) -> RequestState:
    """Return a request's state as data, without its arrays. Call it between two iterations."""
    search, salt, table = request.search, request.cache_salt, request.prompt_table
    if table is not None and isinstance(salt, tuple):
        salt = salt[0]
    search_state: Any = None if search is None else beam_state(search)
    return RequestState(
        request.request_id,
        beginning(request.tokens),
        request.sampling.without_numbers(),
        request.end_rule.state(),
        request.output,
        request.times.state(),
        request.drafts.state(),
        None if search is None else search.params,
        search_state,
        request.priority,
        salt,  # type: ignore[arg-type]
        request.retention_priority,
        request.processor,
        request.client_id,
        None if table is None else table.without_numbers(),
        ProgressState(*_read_progress(request)),
        request.lora_task_id,
    )


def restored_request(state: RequestState, limits: Limits) -> ActiveRequest:
    """Restore a request. Raise RequestError or ValueError if `limits` do not permit the state."""
    _check(state, limits)
    drafter = None
    if state.drafts.drafter is not None and limits.lookup is not None:
        drafter = Drafter(limits.lookup, limits.vocab_size)
        drafter.restore(state.drafts.drafter)
    made = state._asdict()
    del made["search"], made["progress"], made["lora_task_id"]
    made.update(
        tokens=list(state.tokens),
        end_rule=restored_end_rule(state.end_rule, state.sampling.end_ids),
        times=RequestTimes(*state.times),
        drafts=RequestDrafts(state.drafts.tokens, state.drafts.logits, drafter),
        lora=None if state.lora_task_id is None else LoraInputs(state.lora_task_id, None),
    )
    request = ActiveRequest(**made)
    for name, value in zip(ProgressState._fields, state.progress, strict=True):
        setattr(request, name, value)
    if request.search is not None and state.search is not None:
        restore_beams(request.search, state.search)
    return request


def _check(state: RequestState, limits: Limits) -> None:
    """Check the values that later steps rely on, or that determine how much memory is used."""
    length, width = len(state.tokens), 1 if state.beams is None else state.beams.width
    longest, progress, ends = limits.max_seq_len, state.progress, state.end_rule
    ordered = (
        (progress.orig_prompt_len, progress.num_sent, longest),
        (1, progress.orig_prompt_len, progress.prompt_len, length, longest),
        (progress.prompt_len, progress.num_tokens, longest),
        (progress.prompt_len, progress.prompt_len + progress.max_new_tokens, longest),
        (0, progress.context_current_position, progress.prompt_len),
        (0, progress.num_draft_tokens, len(state.drafts.tokens)),
        (0, progress.stop_state, sum(map(len, ends.words or ()))),
        (0, ends.max_new_tokens, longest - progress.orig_prompt_len),
        (1, width, limits.max_beam_width),
        (0, progress.cached_tokens, longest),
        (0, progress.pause_count),
        (0, progress.epoch),
        (-1, progress.slot),
    )
    for chain in ordered:
        if any(low > high for low, high in zip(chain, chain[1:], strict=False)):
            raise InvalidRequestError(f"request {state.request_id}: {chain} must not decrease")
    if (state.search is None) != (state.beams is None):
        raise InvalidRequestError(
            f"request {state.request_id}: `search` and `beams` must both be set, or neither"
        )
