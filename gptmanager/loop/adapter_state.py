"""Save and restore the state of `Adapters` as data, and copy `Adapters` for previews."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from gptmanager.kv_cache.block import LedgerError
from gptmanager.loop.active_request import FOR_ADAPTER, ActiveRequest
from gptmanager.loop.adapters import Adapters, Read
from gptmanager.peft_cache.layout import AdapterRow
from gptmanager.peft_cache.state import (
    PeftCacheState,
    copied_peft_cache,
    peft_cache_state,
    restore_peft_cache,
)


class ReadState(NamedTuple):
    """The state of a `Read`, and the number of its job."""

    job: int
    task_id: int
    brought_by: int
    rows: tuple[AdapterRow, ...]
    digest: str
    is_forgotten: bool
    wanted_by: tuple[int, ...]


class MoveState(NamedTuple):
    """A running copy of an adapter to the host or the device.

    `adapter` is the adapter's index in `AdaptersState.cache.adapters`.
    """

    job: int
    adapter: int


class AdaptersState(NamedTuple):
    """The state of `Adapters`."""

    cache: PeftCacheState
    reads: tuple[ReadState, ...]
    moves: tuple[MoveState, ...]
    unknown: tuple[int, ...]
    num_jobs: int
    has_changed: bool
    passed_over: int
    num_overtaken: int


def adapters_state(adapters: Adapters) -> AdaptersState:
    """Return the state of `adapters`. Call this function between two iterations."""
    number = {adapter: index for index, adapter in enumerate(adapters.cache.adapters)}
    return AdaptersState(
        peft_cache_state(adapters.cache),
        tuple(_read_state(job, read) for job, read in adapters.reads.items()),
        tuple(MoveState(job, number[adapter]) for job, adapter in adapters.moves.items()),
        tuple(adapters.unknown),
        adapters.num_jobs,
        adapters.has_changed,
        adapters.passed_over,
        adapters.num_overtaken,
    )


def restore_adapters(
    adapters: Adapters, state: AdaptersState, requests: Mapping[int, ActiveRequest]
) -> None:
    """Restore `state` into empty `adapters`. Raise LedgerError if `state` is inconsistent.

    `requests` are the restored active requests, by id.
    """
    restore_peft_cache(adapters.cache, state.cache)
    cached = adapters.cache.adapters
    for it in state.reads:
        adapters.reads[it.job] = Read(*it[1:-1], wanted_by=[*it.wanted_by])
    for move in state.moves:
        if not 0 <= move.adapter < len(cached):
            raise LedgerError(f"job {move.job} copies an adapter that is not in the cache")
        adapters.moves[move.job] = cached[move.adapter]
    adapters.requests = {i: r for i, r in requests.items() if r.lora_task_id is not None}
    adapters.waiting = {i for i, r in adapters.requests.items() if r.awaited & FOR_ADAPTER}
    adapters.unknown = [*state.unknown]
    adapters.num_jobs, adapters.has_changed = state.num_jobs, state.has_changed
    adapters.passed_over, adapters.num_overtaken = state.passed_over, state.num_overtaken
    problem = adapters.problem()
    if problem is not None:
        raise LedgerError(problem)


def copied_adapters(adapters: Adapters, requests: Mapping[int, ActiveRequest]) -> Adapters:
    """Return a copy of `adapters` that starts no work.

    `requests` are copies of `adapters.requests`; the copy of `adapters` refers to these copies.
    """
    cache, copies = copied_peft_cache(adapters.cache)
    found = Adapters(cache, lambda work: None, adapters._patience)
    found.waiting = {*adapters.waiting}
    found.requests = {**requests}
    for job, read in adapters.reads.items():
        found.reads[job] = replace(read, wanted_by=[*read.wanted_by])
    found.moves = {job: copies[adapter] for job, adapter in adapters.moves.items()}
    found.unknown = [*adapters.unknown]
    found.num_jobs, found.has_changed = adapters.num_jobs, adapters.has_changed
    found.passed_over, found.num_overtaken = adapters.passed_over, adapters.num_overtaken
    found.note(adapters._forgotten, adapters._done)
    found._failures = [*adapters._failures]
    return found


def _read_state(job: int, read: Read) -> ReadState:
    return ReadState(
        *(job, read.task_id, read.brought_by, read.rows),
        *(read.digest, read.is_forgotten, tuple(read.wanted_by)),
    )
