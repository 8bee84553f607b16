"""What a manager keeps while it runs, and what it leaves behind: nothing, at once and without the
garbage collector.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import threading
import weakref
from concurrent.futures import Future

import pytest
from measure_memory import TINY_LLAMA, EndlessHost, mixed_requests, start

import gptmanager.manager.ending
from gptmanager import InferenceRequest
from gptmanager.bench import random_llama
from gptmanager.testing import RecordingCallbacks, ScriptedModel

SOURCE = (TINY_LLAMA, random_llama(TINY_LLAMA, 7))


@pytest.fixture
def without_collector(monkeypatch):
    # a captured log record keeps the error that it tells of, and all that it passed
    monkeypatch.setattr(logging.getLogger("gptmanager"), "disabled", True)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def executor_of(manager):
    """The manager's own, out of what records it."""
    return manager._worker.loop.executor.sample.__self__


def watched(manager):
    """Weak references to the manager and what belongs to it."""
    loop, executor = manager._worker.loop, executor_of(manager)
    whole = (
        manager,
        manager._host,
        manager._worker,
        manager._worker._recorder,
        loop,
        loop.allocator,
        loop.scheduler,
    )
    runner = executor.runner
    within = (executor, runner.model, runner.kv_pool, executor._chooser)
    return [*map(weakref.ref, whole)], [*map(weakref.ref, within)]


def end(manager, **options):
    """Its thread holds the loop until its last line, for which `shutdown` waits 0.3 s at most."""
    manager.shutdown(**options)
    manager._thread.join()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"black_box_iterations": 0},
        {"callback_budget_s": None},
        {"run_ahead": 1},
        {"recording_path": os.devnull},
    ],
    ids=str,
)
@pytest.mark.every(2)
def test_what_a_manager_held_is_free_when_it_has_ended(without_collector, options, monkeypatch):
    order, others = [], set(threading.enumerate())  # a manager of another test may end just now

    def given_back():
        if threading.current_thread() not in others:
            order.append([ref() is None for ref in within])

    monkeypatch.setattr(gptmanager.manager.ending, "give_back", given_back)
    host = EndlessHost(itertools.islice(mixed_requests(512, None), 24), 8)
    manager = start(SOURCE, host, **options)
    assert host.is_over.wait(60)
    whole, within = watched(manager)
    assert all(ref() is not None for ref in (*whole, *within))
    end(manager)
    assert order == [[True] * len(within)]  # the heap is trimmed when they are gone
    assert not manager.audit().problems  # it still answers
    left = set(threading.enumerate()) - others
    assert not [thread for thread in left if thread.name.startswith("gptmanager")]
    del manager
    assert [ref() for ref in whole] == [None] * len(whole)


def test_an_aborted_manager_is_free_too(without_collector):
    model = ScriptedModel(lambda history: 1, vocab_size=512)
    host = RecordingCallbacks(itertools.islice(mixed_requests(512, None), 24))
    manager = start(model, host)
    whole, (executor, *_) = watched(manager)
    end(manager, drain=False)
    assert executor() is None
    del manager
    assert [ref() for ref in whole] == [None] * len(whole)


def test_a_failed_manager_leaves_nothing_but_its_error(without_collector):
    is_watched = threading.Event()

    class Failing(ScriptedModel):
        def forward(self, batch, kv_pool):
            is_watched.wait(30)
            raise RuntimeError("no")

    host = RecordingCallbacks(itertools.islice(mixed_requests(512, None), 24))
    manager = start(Failing(lambda history: 1, vocab_size=512), host, black_box_iterations=0)
    whole, within = watched(manager)
    is_watched.set()
    assert manager.wait(30)
    del manager
    gc.collect()  # an error and the frames that it passed hold each other
    assert [ref() for ref in (*whole, *within)] == [None] * (len(whole) + len(within))


def test_the_kv_cache_keeps_nothing_of_requests_that_have_ended():
    """Many wait, and some end while they do. One is only asked about, and never comes."""
    model = ScriptedModel(lambda history: 1, vocab_size=512)
    host = EndlessHost(itertools.islice(mixed_requests(512, None), 200), 40)
    with start(model, host, max_active_requests=None) as manager:
        assert host.is_over.wait(60)
        assert manager.would_fit(InferenceRequest.from_tokens(9999, [1] * 40, 3)).accepted
    reuse = manager._worker.loop.allocator.kv_cache._reuse
    lookups = reuse.lookups
    assert manager._worker.loop.allocator.kv_cache._live == reuse._storing == {}
    assert lookups._lookups == lookups._numbers == lookups._users == {}
    assert lookups._last.requests == []


def test_a_future_that_requests_waited_for_does_not_hold_the_manager(without_collector):
    """A grammar is compiled once, and may live as long as the process."""

    class Prepared:
        future: Future[None] = Future()

        def prepare(self, device):
            return self.future

        def __call__(self, request_id, logits, tokens, stream, client_id):
            pass

    host = RecordingCallbacks(
        [InferenceRequest.from_tokens(1, [1, 2], 3, logits_post_processor=Prepared())]
    )
    manager = start(ScriptedModel(lambda history: 1), host)
    whole, _ = watched(manager)
    while manager.health().num_active == 0:
        pass
    Prepared.future.set_result(None)
    assert host.final(1).error == ""
    end(manager)
    del manager
    assert [ref() for ref in whole] == [None] * len(whole)
