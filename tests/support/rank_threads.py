"""Ranks as threads of one process, over gloo: no default group, no processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo

from gptmanager.ranks.collectives import GroupCollectives
from gptmanager.ranks.layout import RankLayout

T = TypeVar("T")
_PATIENCE = timedelta(seconds=20)


class World:
    """The store that the groups of a layout meet in."""

    def __init__(self, tensor: int = 1, pipeline: int = 1) -> None:
        self.store = HashStore()
        self.layouts = [RankLayout(rank, tensor, pipeline) for rank in range(tensor * pipeline)]

    def group(self, name: str, rank: int, size: int) -> ProcessGroupGloo:
        return ProcessGroupGloo(PrefixStore(name, self.store), rank, size, _PATIENCE)

    def collectives(self, layout: RankLayout, **options: Any) -> GroupCollectives:
        """Called on each rank at the same time."""
        stage = self.group(f"stage {layout.stage}", layout.part, layout.tensor_parallel_size)
        from_previous = to_next = None
        # the first stage connects last: each of the others waits for the one before it
        if not layout.is_first_stage:
            from_previous = self.group(f"from {layout.rank + layout.tensor_parallel_size}", 1, 2)
        if not layout.is_last_stage:
            to_next = self.group(f"from {layout.rank}", 0, 2)
        return GroupCollectives(
            layout, stage, from_previous, to_next, lambda work: work.wait(), **options
        )

    def run(self, body: Callable[[GroupCollectives], T], **options: Any) -> list[T]:
        """What each rank's `body` gives, by rank. The first error is raised."""
        with ThreadPoolExecutor(len(self.layouts)) as threads:
            # a group that ends while another rank still connects would fail that one
            ranks = list(threads.map(lambda it: self.collectives(it, **options), self.layouts))
            work = [threads.submit(body, rank) for rank in ranks]
            for it in as_completed(work):
                it.result()
            return [it.result() for it in work]
