"""The threads that read and move adapters: what they do at the end, and while steps run."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from gptmanager.config import PeftCacheManagerConfig
from gptmanager.host import adapter_loader
from gptmanager.host.adapter_loader import AdapterLoader, Pace
from gptmanager.lifecycle.clock import monotonic
from gptmanager.memory.adapter_pool import AdapterPool
from gptmanager.peft_cache import CacheSizes
from gptmanager.peft_cache.work import ReadAdapter

SIZES = CacheSizes(64, 2, 2, 4, 8)


class Endless:
    """Tensors that take for ever to read."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.ended = threading.Event()

    def read(self, rest):
        self.began.set()
        try:
            while True:
                rest()
        finally:
            self.ended.set()


def test_what_is_under_way_ends_soon_after_the_manager():
    loader, tensors = AdapterLoader(lambda: None), Endless()
    loader.attach(AdapterPool(SIZES, 1, torch.float32), PeftCacheManagerConfig())
    loader.begin(ReadAdapter(1, 7, tensors))
    assert tensors.began.wait(30) and not tensors.ended.is_set()
    loader.release()
    assert tensors.ended.wait(30)


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_thread_rests_only_while_steps_run(monkeypatch, is_busy):
    loader, slept = AdapterLoader(lambda: None), []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(adapter_loader, "_PIECE_NS", 0)
    if is_busy:
        loader.last_step = monotonic()
    Pace(loader).rest()
    assert bool(slept) is is_busy
    assert all(0 <= seconds <= 0.01 for seconds in slept)
