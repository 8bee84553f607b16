"""`AdapterPages`: checks whether the LoRA adapters of a batch fit into the adapter cache together.

This module knows nothing of the contents of adapters, nor of which adapters are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from gptmanager.request.llm_request import LlmRequest, RequestList
from gptmanager.scheduler.wait_reasons import Wait, WaitReason, lacking


class PeftCacheManager(Protocol):
    """The interface of an adapter cache for capacity schedulers. All counts are in pages."""

    def get_max_device_pages(self) -> int:
        """Return the number of device pages, free or not."""

    def determine_num_pages(self, lora_task_id: int) -> int:
        """Return the number of pages of one adapter, however many requests share it."""


class AdapterPages:
    """Counts the pages that adapters take in one scheduling decision, each adapter once.

    Without an adapter cache every adapter fits.
    """

    __slots__ = ("_free", "_peft_cache_manager", "_task_ids")

    def __init__(
        self, peft_cache_manager: PeftCacheManager | None, running: Iterable[LlmRequest] = ()
    ) -> None:
        """Count the adapters of `running`, the requests that already hold pages of adapters."""
        self._peft_cache_manager = peft_cache_manager
        self._task_ids: set[int] = set()
        self._free = 0
        if peft_cache_manager is not None:
            self._task_ids.update(r.lora_task_id for r in running if r.lora_task_id is not None)
            claimed = sum(map(peft_cache_manager.determine_num_pages, self._task_ids))
            self._free = peft_cache_manager.get_max_device_pages() - claimed

    def take(self, task_id: int) -> bool:
        """Take the adapter's pages if they fit; return whether they do."""
        if self._peft_cache_manager is None or task_id in self._task_ids:
            return True
        num_pages = self._peft_cache_manager.determine_num_pages(task_id)
        if num_pages > self._free:
            return False
        self._free -= num_pages
        self._task_ids.add(task_id)
        return True

    def wait(self, task_id: int | None, taken: RequestList) -> Wait:
        """Return the wait of a request if its adapter does not fit next to the adapters of `taken`.

        Call it after `take` has returned False.
        """
        cache = self._peft_cache_manager
        assert cache is not None and task_id is not None  # otherwise `take` returns True
        needed, total = cache.determine_num_pages(task_id), cache.get_max_device_pages()
        return lacking(WaitReason.ADAPTER_PAGES, needed, total, self._free, taken)
