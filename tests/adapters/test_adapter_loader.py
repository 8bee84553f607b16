"""The threads that read and move adapters: what they do at the end, and while steps run."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from gptmanager.config import PeftCacheManagerConfig
from gptmanager.executor.forward_thread import ForwardThread
from gptmanager.host.adapter_loader import AdapterLoader
from gptmanager.memory.adapter_pool import AdapterPool
from gptmanager.peft_cache import CacheSizes
from gptmanager.peft_cache.layout import Packing
from gptmanager.peft_cache.work import CopyAdapter, ReadAdapter

SIZES = CacheSizes(64, 2, 2, 4, 8)


class Endless:
    """Tensors that take for ever to read."""

    def __init__(self) -> None:
        self.began = threading.Event()

    is_plain = True

    def read_in_pieces(self):
        self.began.set()
        while True:
            yield


def test_what_is_under_way_ends_soon_after_the_manager():
    loader, tensors = AdapterLoader(lambda: None), Endless()
    loader.attach(AdapterPool(SIZES, 1, torch.float32), PeftCacheManagerConfig())
    loader.begin(ReadAdapter(1, 7, tensors))
    assert tensors.began.wait(30) and not loader.done
    loader.release()
    while not loader.done:
        time.sleep(0.001)
    assert "the manager has ended" in str(loader.done[0].error)


@pytest.fixture
def copying(monkeypatch):
    """A loader beside a thread of forwards, what these do, and whether pages were written to."""
    before, copied, forward = torch.get_num_threads(), threading.Event(), []
    loader, pool = AdapterLoader(lambda: None), AdapterPool(SIZES, 1, torch.float32)
    monkeypatch.setattr(pool, "copy_in_pieces", lambda copies: iter([copied.set()]))
    monkeypatch.setattr(pool, "place", lambda *where: None)
    forwards = ForwardThread(lambda schedule: forward[0]())
    loader.attach(pool, PeftCacheManagerConfig(), forwards.mark)
    yield loader, forwards, forward, copied
    loader.release()
    assert forwards.close(30)
    torch.set_num_threads(before)


COPY = CopyAdapter(1, 0, (), (), Packing((), ()), (0,))


def test_pages_are_written_to_when_the_steps_that_were_begun_have_run(copying):
    """These may read them for requests that have ended."""
    loader, forwards, forward, copied = copying
    forward.append(lambda: copied.wait(0.1))
    begun = [forwards.submit(None), forwards.submit(None)]
    loader.begin(COPY)
    assert [result() for result in begun] == [False, False]
    assert copied.wait(30)


def test_a_step_that_hangs_is_not_waited_for_when_the_manager_has_ended(copying):
    loader, forwards, forward, copied = copying
    goes_on = threading.Event()
    forward.append(lambda: goes_on.wait(30))
    forwards.submit(None)
    loader.begin(COPY)
    threads = loader._ensuring
    loader.release()
    threads.shutdown()  # waits for them
    assert not copied.is_set() and not goes_on.is_set()
    goes_on.set()
