"""An active request as data, and the request again: how it was made, and how far it has come."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

from gptmanager.decoding.beam_search import BeamParams
from gptmanager.decoding.beam_state import BeamState, beam_state, restore_beams
from gptmanager.decoding.deferred import beginning
from gptmanager.decoding.drafting import Drafter, DrafterState
from gptmanager.decoding.stop_words import StopWords
from gptmanager.errors import InvalidRequestError
from gptmanager.kv_cache.state import Salt
from gptmanager.loop.active_request import ActiveRequest
from gptmanager.loop.admission import Limits
from gptmanager.request.input_rows import HostRows
from gptmanager.request.llm_request import LlmRequestState, OutputConfig, SamplingParams
from gptmanager.request.post_processor import RequestProcessor


class RequestState(NamedTuple):
    """The attributes of an `ActiveRequest`, by their names. `words`: its stop words."""

    # how it was made
    request_id: int
    max_new_tokens: int
    sampling: SamplingParams
    is_streaming: bool
    pad_id: int
    include_stop: bool
    exclude_input: bool
    priority: float
    arrival_time: float
    retention_priority: int | None
    processor: RequestProcessor | None
    client_id: int | None
    output_config: OutputConfig
    drafts: tuple[int, ...]
    # how far it has come
    state: LlmRequestState
    slot: int
    epoch: int
    prompt_len: int
    orig_prompt_len: int
    num_tokens: int
    context_current_position: int
    context_chunk_size: int | None
    estimated_reusable_tokens: int
    num_draft_tokens: int
    pause_count: int
    num_drafted: int
    num_accepted: int
    is_serial: bool
    stop_state: int
    length_limit: int
    num_sent: int
    deadline: float | None
    queue_deadline: float | None
    cached_tokens: int
    first_scheduled: float | None
    first_token: float | None
    last_token: float | None
    # what is no attribute as it stands
    prompt_table: HostRows | None
    draft_logits: HostRows | None
    tokens: tuple[int, ...]
    cache_salt: Salt
    words: tuple[tuple[int, ...], ...] | None
    beams: BeamParams | None
    search: BeamState | None
    drafter: DrafterState | None


_FIELDS = RequestState._fields
_NUM_GIVEN = _FIELDS.index("state")
_GIVEN = _FIELDS[:_NUM_GIVEN]
_PROGRESS = _FIELDS[_NUM_GIVEN : _FIELDS.index("prompt_table")]
_read = attrgetter(*_GIVEN, *_PROGRESS)


def request_state(request: ActiveRequest) -> RequestState:
    """As data, between two iterations."""
    search, drafter, salt = request.search, request.drafter, request.cache_salt
    if request.prompt_table is not None and isinstance(salt, tuple):
        salt = salt[0]
    words = request.stop_words
    rest: tuple[Any, ...] = (
        _digest(request.prompt_table),
        _digest(request.draft_logits),
        beginning(request.tokens),
        salt,
        None if words is None else words.words,
        None if search is None else search.params,
        None if search is None else beam_state(search),
        None if drafter is None else drafter.state(),
    )
    state = RequestState(*_read(request), *rest)
    if state.sampling.embedding_bias is not None:
        state = state._replace(sampling=state.sampling.without_numbers())
    return state


def _digest(rows: HostRows | None) -> HostRows | None:
    """Not the numbers, which are many."""
    return None if rows is None else rows.without_numbers()


def restored_request(state: RequestState, limits: Limits) -> ActiveRequest:
    """Raises RequestError or ValueError for one that `limits` do not permit."""
    _check(state, limits)
    drafter = None
    if state.drafter is not None and limits.lookup is not None:
        drafter = Drafter(limits.lookup, limits.vocab_size)
        drafter.restore(state.drafter)
    request = ActiveRequest(
        **{name: getattr(state, name) for name in _GIVEN},
        tokens=list(state.tokens),
        prompt_table=state.prompt_table,
        draft_logits=state.draft_logits,
        cache_salt=state.cache_salt,
        stop_words=None if state.words is None else StopWords(state.words),
        beams=state.beams,
        drafter=drafter,
    )
    for name in _PROGRESS:
        setattr(request, name, getattr(state, name))
    if request.search is not None and state.search is not None:
        restore_beams(request.search, state.search)
    return request


def _check(state: RequestState, limits: Limits) -> None:
    """What later steps take for granted, or take memory by."""
    length, width = len(state.tokens), 1 if state.beams is None else state.beams.width
    longest = limits.max_seq_len
    ordered = (
        (0, state.num_sent, longest),
        (1, state.orig_prompt_len, state.prompt_len, length, longest),
        (state.prompt_len, state.num_tokens, longest),
        (state.prompt_len, state.prompt_len + state.max_new_tokens, longest),
        (0, state.context_current_position, state.prompt_len),
        (0, state.num_draft_tokens, len(state.drafts)),
        (0, state.stop_state, sum(map(len, state.words or ()))),
        (state.orig_prompt_len, state.length_limit, longest),
        (1, width, limits.max_beam_width),
        (0, state.cached_tokens, longest),
        (0, state.pause_count),
        (0, state.epoch),
        (-1, state.slot),
    )
    for chain in ordered:
        if any(low > high for low, high in zip(chain, chain[1:], strict=False)):
            raise InvalidRequestError(f"request {state.request_id}: {chain} does not rise")
    if (state.search is None) != (state.beams is None):
        raise InvalidRequestError(f"request {state.request_id}: a search belongs to several beams")
