"""Managers of several ranks in one process, whose hosts keep what they are told.

As `rank_managers`; but ranks may differ in what they are given, and may fail to start.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from own_time import own_time
from rank_links import at_once, outcome
from rank_managers import ThreadWorld, _here
from torch.distributed import HashStore

from gptmanager import GptManager, KvCacheConfig, ModelType, OptionalParams, ParallelConfig
from gptmanager.assembly import ranks
from gptmanager.callbacks import broadcast
from gptmanager.manager import gpt_manager
from gptmanager.ranks.layout import RankLayout
from gptmanager.ranks.world import _check_size
from gptmanager.testing import RecordingCallbacks

TINY = "examples/tiny_llama"
_ARGUMENTS = set(inspect.signature(GptManager).parameters)
_OPTIONS = {field.name for field in dataclasses.fields(OptionalParams)} - _ARGUMENTS


class Ranks(NamedTuple):
    """By rank. `hosts`: what their callbacks were told."""

    managers: list[GptManager]
    hosts: list[RecordingCallbacks]

    @property
    def host(self) -> RecordingCallbacks:
        return self.hosts[0]


def find_here(config: ParallelConfig) -> ThreadWorld:
    """Replaces `find_world`."""
    world: ThreadWorld = _here.world
    layout = world.layout
    _check_size(config.tensor_parallel_size, config.pipeline_parallel_size, layout.size, "here")
    return world


def start(
    monkeypatch: Any,
    size: int,
    hosts: list[RecordingCallbacks],
    *,
    own_means: bool = False,
    parallel: Mapping[str, Any] | None = None,
    by_rank: Mapping[int, Mapping[str, Any]] | None = None,
) -> list[Any]:
    """The manager of each rank, or the error that its constructor raised.

    `by_rank`: arguments that one has otherwise than the others, options among them.
    """
    monkeypatch.setattr(gpt_manager, "find_world", find_here)
    monkeypatch.setattr(ranks, "find_all", lambda: _here.world)
    stores = HashStore()

    def make(rank: int) -> Any:
        _here.world = ThreadWorld(RankLayout(rank, size, 1), stores)
        given: dict[str, Any] = {
            "model_path": TINY,
            "model_type": ModelType.INFLIGHT_FUSED_BATCHING,
            "kv_cache_config": KvCacheConfig(max_tokens=512, tokens_per_block=8),
            "max_batch_size": 4,
            "max_seq_len": 128,
            "parallel_config": ParallelConfig(size, **{"timeout_s": 20.0, **(parallel or {})}),
            **hosts[rank].keywords(),
        }
        if not own_means:
            own = given["get_inference_requests_cb"], given["poll_stop_signal_cb"]
            get, poll = broadcast(*own) if rank == 0 else broadcast()
            given |= {"get_inference_requests_cb": get, "poll_stop_signal_cb": poll}
        given |= (by_rank or {}).get(rank, {})
        options = {name: given.pop(name) for name in list(given) if name in _OPTIONS}
        new = functools.partial(GptManager, **given, optional_params=OptionalParams(**options))
        found = outcome(new)
        if isinstance(found, GptManager):
            hosts[rank].manager = found
        return found

    return at_once(make, range(size))


@contextmanager
def serving(
    monkeypatch: Any, size: int, hosts: list[RecordingCallbacks] | None = None, **options: Any
) -> Iterator[Ranks]:
    """Running managers; they drain at the end."""
    hosts = hosts or [RecordingCallbacks() for _ in range(size)]
    with own_time():
        found = start(monkeypatch, size, hosts, **options)
        for it in found:
            if not isinstance(it, GptManager):
                raise it
        try:
            yield Ranks(found, hosts)
            at_once(lambda it: it.shutdown(timeout=30), found)
        finally:
            at_once(lambda it: it.shutdown(drain=False, timeout=30), found)
