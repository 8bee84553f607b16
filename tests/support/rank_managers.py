"""Managers of several ranks in one process: each is constructed by a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.distributed import HashStore, PrefixStore

from gptmanager import GptManager, OptionalParams, ParallelConfig
from gptmanager.callbacks import broadcast
from gptmanager.manager import gpt_manager
from gptmanager.ranks.layout import RankLayout

PATIENCE_S = 60.0


class ThreadWorld(NamedTuple):
    """Replaces `World`, for one rank that runs on a thread instead of in a process."""

    layout: RankLayout
    stores: Any
    host: str = "127.0.0.1"

    def store(self, timeout_s: float) -> Any:
        number = self.stores.add(f"managers of {self.layout.rank}", 1)
        return PrefixStore(f"manager {number}", self.stores)


_here = threading.local()


@contextmanager
def rank_managers(
    monkeypatch: Any,
    make: Callable[[int, OptionalParams], GptManager],
    tensor: int = 1,
    stages: int = 1,
    **config: Any,
) -> Iterator[list[GptManager]]:
    """Yield the managers that `make(rank, params)` returns; `params` has the layout of the ranks.

    At the end, shut down rank 0's manager, and wait for the others.
    """
    stores = HashStore()
    alone = ThreadWorld(RankLayout(), stores)
    monkeypatch.setattr(gpt_manager, "find_world", lambda _: getattr(_here, "world", alone))

    def start(layout: RankLayout) -> GptManager:
        _here.world = ThreadWorld(layout, stores)
        ranks = ParallelConfig(tensor, stages, **{"timeout_s": PATIENCE_S, **config})
        return make(layout.rank, OptionalParams(parallel_config=ranks))

    layouts = [RankLayout(rank, tensor, stages) for rank in range(tensor * stages)]
    with ThreadPoolExecutor(len(layouts)) as threads:
        managers = list(threads.map(start, layouts))
    try:
        yield managers
    finally:
        for manager in managers:  # rank 0's manager is the first
            manager.shutdown(timeout=PATIENCE_S)


class Host:
    """A host that returns all requests at the first Get.

    `stops` maps the number of a poll to the ids that it returns. `finals` has the final responses
    by request id.
    """

    def __init__(self, requests: Sequence[Any], stops: dict[int, set[int]] | None = None) -> None:
        self._waiting = list(requests)
        self._stops = stops or {}
        self.polls = 0
        self.finals: dict[int, tuple[Any, ...]] = {}
        self.streamed: dict[int, list[int]] = {}
        self.statistics: list[str] = []
        self.num_finals = 0

    def get(self, room: int) -> list[Any]:
        requests, self._waiting = self._waiting, []
        return requests

    def poll(self) -> set[int]:
        self.polls += 1
        return self._stops.get(self.polls, set())

    def send(self, request_id: int, tensors: Any, is_final: bool, error: str) -> None:
        named = {name: tensor.tolist() for name, tensor in tensors if name != "request_metrics"}
        if "output_offset" in named:
            self.streamed.setdefault(request_id, []).extend(named["output_ids"][0][0])
        if is_final:
            self.num_finals += 1
            self.finals[request_id] = (named, error)

    def callbacks(self, rank: int) -> dict[str, Any]:
        get, poll = (self.get, self.poll) if rank == 0 else (None, None)
        get, poll = broadcast(get, poll)
        return {
            "get_inference_requests_cb": get,
            "send_response_cb": self.send,
            "poll_stop_signal_cb": poll,
            "return_batch_manager_stats_cb": self.statistics.append,
        }
