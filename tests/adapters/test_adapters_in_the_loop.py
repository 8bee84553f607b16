"""Which requests wait for an adapter, and which adapters have device pages: the loop alone.

Work on adapters ends when the test says so. An adapter of `size` n has n pages.
"""

from __future__ import annotations

import numpy as np
import pytest
from loop_driver import ForcedPauses, LoopDriver, expected_output

from gptmanager.assembly.adapter_sizing import AdapterSizes
from gptmanager.config import FinishReason
from gptmanager.loop.adapter_state import adapters_state, restore_adapters
from gptmanager.loop.adapters import Adapters
from gptmanager.loop.request_table import RequestTable
from gptmanager.manager.inspection import audit, explain, would_fit
from gptmanager.peft_cache import CacheSizes, PeftCacheManager
from gptmanager.peft_cache.work import (
    AdapterDone,
    CopyAdapter,
    DropAdapter,
    FreeHostPages,
    ReadAdapter,
    WriteAdapter,
)
from gptmanager.request.adapter_modules import LoraModule
from gptmanager.request.inference_request import InferenceRequest
from gptmanager.request.llm_request import LlmRequestState

RANK, LAYERS = 8, 4
MODULE = LoraModule("out", 0, 4, 4)
PREPARING = LlmRequestState.PREPARING


def sizes(host: int = 8, device: int = 8) -> AdapterSizes:
    pages = CacheSizes(RANK * MODULE.width, host, device, 4, RANK)
    return AdapterSizes(pages, ((4, MODULE),), LAYERS, "float32")


def driver_of(host: int = 8, device: int = 8, **options) -> LoopDriver:
    return LoopDriver(adapters=sizes(host, device), **options)


def request(request_id, task=None, *, size=None, value=1.0, length=3, prompt=4, **keywords):
    """`size` None: it brings no more than the id."""
    tensors = {"input_ids": [*range(2, 2 + prompt)], "request_output_len": length}
    if task is not None:
        tensors["lora_task_id"] = task
    if size is not None:
        weights = np.full((size, RANK * MODULE.width), value, np.float32)
        tensors["lora_weights"] = weights
        tensors["lora_config"] = [[4, layer, RANK] for layer in range(size)]
    return InferenceRequest(request_id, tensors, **keywords)


def step(driver: LoopDriver, times: int = 1, *, works: bool = True) -> None:
    """Iterations, after each of which all work is done."""
    for _ in range(times):
        driver.loop.iterate()
        report = audit(driver.loop)
        assert report.ok, report.problems
        if works:
            driver.host.finish_work()


def finish(driver: LoopDriver, most: int = 200) -> None:
    """Until everybody is answered; in the end no request has an adapter."""
    for _ in range(most):
        step(driver)
        if not driver.loop.active and not driver.host.work:
            break
    driver.check_empty()
    adapters = driver.loop.table.adapters
    assert not (adapters.requests or adapters.waiting or adapters.reads or adapters.moves)
    assert not any(adapter.requests for adapter in adapters.cache.adapters)


def assert_restored(driver: LoopDriver) -> None:
    """Brought to the state of these, others are in the same one."""
    own = driver.loop.table.adapters
    others = Adapters(PeftCacheManager(own.cache.sizes), lambda work: None, patience=0)
    state = adapters_state(own)
    restore_adapters(others, state, driver.loop.table.by_id)
    assert adapters_state(others) == state


def state_of(driver: LoopDriver, request_id: int) -> LlmRequestState:
    return driver.loop.table.by_id[request_id].state


def begun(driver: LoopDriver, kind: type) -> list:
    return [work for work in driver.host.work if isinstance(work, kind)]


def error_of(driver: LoopDriver, request_id: int) -> str:
    return driver.final(request_id).error


def counts(driver: LoopDriver):
    return driver.loop.table.adapters.cache.counts()


# From the host's tensors to the device -----------------------------------------------------


def test_it_waits_while_others_run_and_then_runs():
    driver = driver_of()
    driver.submit(request(1, length=8), request(2, 7, size=2))
    step(driver, works=False)
    assert driver.loop.table.by_id[1].slot >= 0 and state_of(driver, 2) is PREPARING
    for kind in (ReadAdapter, WriteAdapter, CopyAdapter):
        (work,) = begun(driver, kind)
        assert state_of(driver, 2) is PREPARING
        driver.host.finish_work()
        step(driver, works=False)
        assert isinstance(work, kind)
    assert driver.loop.table.by_id[2].slot >= 0
    (start,) = [s for it in driver.executor.schedules for s in it.starts if s.adapter_slot >= 0]
    assert start.adapter_slot == work.device_pages[0] == work.slot
    finish(driver)
    for request_id, length in ((1, 8), (2, 3)):
        assert driver.output(request_id)[-length:] == expected_output([2, 3, 4, 5], length)
    assert driver.host.counts[-1].adapters.device_used_pages == 2


def test_later_requests_pass_only_the_id():
    driver = driver_of()
    driver.submit(request(1, 7, size=1))
    finish(driver)
    driver.submit(request(2, 7), request(3, 7))
    step(driver)
    assert all(driver.loop.table.by_id[i].slot >= 0 for i in (2, 3))
    finish(driver)
    assert (counts(driver).hits, counts(driver).misses) == (2, 1)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_an_id_alone_waits_for_the_request_of_the_same_get_that_has_the_weights(order):
    driver = driver_of()
    both = {1: request(1, 7, size=1), 2: request(2, 7)}
    driver.submit(*(both[i] for i in order))
    finish(driver)
    assert not error_of(driver, 1) and not error_of(driver, 2)
    assert counts(driver).misses == 1


def test_an_unknown_id_is_an_error_that_names_no_other_id():
    driver = driver_of()
    driver.submit(request(1, 7, size=1), request(2, 9))
    finish(driver)
    driver.submit(request(3, 8), request(4))
    finish(driver)
    assert error_of(driver, 2).startswith("AdapterError: lora_task_id 9 is not cached")
    assert "lora_task_id 8 is not cached" in error_of(driver, 3)
    assert "7" not in error_of(driver, 3)
    assert not error_of(driver, 4)


def test_weights_that_differ_are_refused_and_the_same_ones_are_not():
    driver = driver_of()
    driver.submit(request(1, 7, size=1))
    finish(driver)
    driver.submit(request(2, 7, size=1, value=2.0), request(3, 7, size=1), request(4, 7))
    finish(driver)
    assert "lora_task_id 7 differ" in error_of(driver, 2)
    assert not error_of(driver, 3) and not error_of(driver, 4)
    assert counts(driver).misses == 1


def test_an_adapter_that_is_none_ends_its_request_and_those_that_wait_for_it():
    driver = driver_of()
    driver.submit(request(1, 7, size=1, value=np.nan), request(2, 7), request(3, length=6))
    finish(driver)
    assert "lora_weights[0, 0] = nan is not finite" in error_of(driver, 1)
    assert "AdapterError: lora_task_id 7 is not cached" in error_of(driver, 2)
    assert not error_of(driver, 3)


def test_a_request_that_waits_for_an_invalid_adapter_gets_that_of_a_later_one():
    driver = driver_of()
    driver.submit(request(1, 7, size=1, value=np.nan), request(2, 7), request(3, 7, size=1))
    driver.submit(request(4, 7))
    finish(driver)
    assert error_of(driver, 1)
    assert not any(error_of(driver, i) for i in (2, 3, 4))


def test_others_get_an_adapter_after_the_request_that_passed_it_ends():
    driver = driver_of()
    driver.submit(request(1, 7, size=1), request(2, 7))
    step(driver, works=False)
    driver.host.callbacks.stop(1)
    driver.loop.poll()
    finish(driver)
    assert int(driver.final(1).tensors["finish_reasons"]) == FinishReason.CANCELLED
    assert not error_of(driver, 2)


def test_an_adapter_that_no_request_needs_is_dropped():
    driver = driver_of()
    driver.submit(request(1, 7, size=1))
    step(driver, works=False)
    driver.host.callbacks.stop(1)
    driver.loop.poll()
    step(driver, works=False)
    assert begun(driver, DropAdapter)
    finish(driver)
    assert 7 not in driver.loop.table.adapters.cache


@pytest.mark.parametrize("way", ["stop", "deadline_s", "queue_timeout_s"])
@pytest.mark.parametrize("kind", [ReadAdapter, WriteAdapter, CopyAdapter])
def test_a_request_that_ends_while_its_adapter_is_read(kind, way):
    """At each stage, which ends later. Others go on; what comes then is answered, too."""
    driver = driver_of()
    limits = {} if way == "stop" else {way: 6.5}
    driver.submit(request(1, 7, size=2, **limits), request(2, length=20))
    for _ in range(6):
        step(driver, works=False)
        if begun(driver, kind):
            break
        driver.host.finish_work()
    assert begun(driver, kind) and state_of(driver, 1) is PREPARING
    if way == "stop":
        driver.host.callbacks.stop(1)
        driver.loop.poll()
    for _ in range(7):
        step(driver, works=False)
    reason = FinishReason.CANCELLED if way == "stop" else FinishReason.TIMED_OUT
    final = driver.final(1)
    assert not final.error and int(final.tensors["finish_reasons"]) == reason
    assert driver.loop.table.by_id.keys() == {2}
    driver.submit(request(3, 7, size=2))
    finish(driver)
    assert driver.output(2)[4:] == expected_output(range(2, 6), 20)
    assert not error_of(driver, 3)


@pytest.mark.parametrize("kind", [WriteAdapter, CopyAdapter])
def test_an_adapter_that_cannot_be_moved_ends_its_requests_and_leaves_nothing(kind):
    driver = driver_of()
    driver.submit(request(1, 7, size=1), request(2, 7), request(3, length=8))
    for _ in range(5):
        driver.loop.iterate()
        failing = begun(driver, kind)
        driver.host.finish_work(error=MemoryError("no memory") if failing else None)
        if failing:
            break
    finish(driver)
    for request_id in (1, 2):
        assert error_of(driver, request_id).startswith("AdapterError: lora_task_id 7 could not be")
        assert "MemoryError: no memory" in error_of(driver, request_id)
    assert not error_of(driver, 3)
    assert counts(driver).host_used_pages == counts(driver).device_used_pages == 0


def test_one_that_no_cache_can_hold_is_refused():
    driver = driver_of(host=8, device=2)
    driver.submit(request(1, 7, size=3))
    finish(driver)
    assert "takes 3 pages of 64, and the device cache has 2" in error_of(driver, 1)


def test_freed_pages_are_reported_before_others_are_written_to_them():
    driver = driver_of(host=2, device=2)
    driver.submit(request(1, 7, size=2))
    finish(driver)
    driver.submit(request(2, 8, size=1))
    kinds = []
    for _ in range(3):
        step(driver, works=False)
        kinds += [type(it) for it in driver.host.work]
        driver.host.finish_work()
        driver.host.work.clear()
    assert kinds[:3] == [ReadAdapter, FreeHostPages, WriteAdapter]
    finish(driver)


# The pages of the host ---------------------------------------------------------------------


def test_one_for_which_the_host_has_no_room_waits_until_others_end():
    driver = driver_of(host=2, device=2)
    driver.submit(request(1, 1, size=1, length=6), request(2, 2, size=2))
    step(driver, 4)
    assert state_of(driver, 2) is PREPARING
    text = explain(driver.loop, 2).text
    assert "waits for host pages of its adapter 2" in text
    finish(driver)
    assert not error_of(driver, 2)
    assert counts(driver).host_evictions == 1


# The pages of the device -------------------------------------------------------------------


def test_adapters_that_do_not_fit_together_run_one_after_the_other():
    driver = driver_of(host=8, device=2)
    driver.submit(request(1, 1, size=2, length=4), request(2, 2, size=1), request(3, 1))
    step(driver, 4)
    assert state_of(driver, 2) is PREPARING and driver.loop.table.by_id[3].slot >= 0
    waiting = explain(driver.loop, 2)
    assert waiting.reason == "adapter_pages"
    assert "waits for 1 adapter pages of its adapter 2: 0 of 2 are free" in waiting.text
    assert "with adapter 1" in explain(driver.loop, 3).text
    finish(driver)
    assert counts(driver).device_evictions == 1


def test_a_later_request_shares_the_adapter_of_a_running_one():
    driver = driver_of(host=8, device=2)
    driver.submit(request(1, 1, size=2, length=12), request(2, 2, size=1))
    step(driver, 5)
    driver.submit(request(3, 1))
    step(driver, 2)
    assert driver.loop.table.by_id[3].slot >= 0 and state_of(driver, 2) is PREPARING
    finish(driver)


def test_a_higher_priority_takes_the_pages_of_a_request_that_has_not_started():
    driver = driver_of(host=8, device=1, max_batch_size=1)
    driver.submit(request(1, length=12), request(2, 2, size=1))
    step(driver, 4)
    assert state_of(driver, 2) is LlmRequestState.CONTEXT_INIT  # its adapter is there
    driver.submit(request(3, 3, size=1, priority=0.9))
    step(driver, 5)
    assert state_of(driver, 2) is PREPARING
    assert state_of(driver, 3) is LlmRequestState.CONTEXT_INIT
    finish(driver)
    assert not error_of(driver, 2) and not error_of(driver, 3)


def test_a_started_request_keeps_its_pages():
    driver = driver_of(host=8, device=1)
    driver.submit(request(1, 1, size=1, length=10))
    step(driver, 5)
    driver.submit(request(2, 2, size=1, priority=0.9))
    step(driver, 4)
    assert driver.loop.table.by_id[1].slot >= 0 and state_of(driver, 2) is PREPARING
    finish(driver)


def test_a_request_passed_over_long_enough_is_waited_for():
    """One adapter is used without a gap; another needs all pages."""
    driver = driver_of(host=8, device=2, max_batch_size=2, max_active=None)
    driver.submit(request(1, 1, size=1), request(2, 2, size=2))
    step(driver, 3)
    started = []
    for number in range(10, 60):
        driver.submit(request(number, 1, length=2))
        step(driver)
        assert_restored(driver)
        started = [r.request_id for r in driver.loop.active if r.slot >= 0]
        if 2 in started:
            break
    assert 2 in started
    finish(driver)


def test_a_running_request_keeps_its_pages_however_long_another_is_passed_over():
    driver = driver_of(host=8, device=2, max_batch_size=2, max_active=None)
    driver.submit(request(1, 1, size=1), request(2, 2, size=2))
    step(driver, 3)
    driver.submit(*(request(number, 1, length=12) for number in (3, 4, 5)))
    adapters, is_waited_for = driver.loop.table.adapters, False
    for _ in range(40):
        step(driver)
        running = [r.request_id for r in driver.loop.active if r.slot >= 0]
        assert all(it in adapters.cache.adapter_of(it).running for it in running)
        is_waited_for |= running == [3] and adapters.num_overtaken >= 2
        if 2 in running:
            break
    assert running == [2] and is_waited_for  # and not 4 or 5, which came later
    finish(driver)


def test_a_paused_request_has_its_adapter_again_before_it_goes_on():
    pauses: list[ForcedPauses] = []

    def forced(scheduler):
        pauses.append(ForcedPauses(scheduler))
        return pauses[0]

    driver = driver_of(host=8, device=1, scheduler=forced)
    driver.submit(request(1, 1, size=1, length=8))
    step(driver, 5)
    driver.submit(request(2, 2, size=1, priority=0.9, length=2))
    step(driver, 2)
    pauses[0].victims.add(1)
    step(driver)
    assert driver.loop.table.by_id[1].slot < 0
    finish(driver)
    assert driver.output(1)[-8:] == expected_output([2, 3, 4, 5], 8)
    starts = [s.adapter_slot for it in driver.executor.schedules for s in it.starts]
    assert starts == [0, 0, 0]
    assert counts(driver).misses == 3  # the first one had to be brought back


# Replacing one -----------------------------------------------------------------------------


def test_a_replaced_adapter_serves_the_requests_that_have_it():
    driver = driver_of()
    driver.submit(request(1, 7, size=1, length=12))
    step(driver, 5)
    driver.host.forgotten.append(7)
    driver.submit(request(2, 7), request(3, 7, size=1, value=2.0), request(4, 7))
    step(driver, 1)
    finish(driver)
    assert not any(error_of(driver, i) for i in (1, 2, 3, 4))
    assert counts(driver).host_used_pages == 1  # the old one went with its request
    driver.host.forgotten += [7, 99]
    driver.submit(request(5, 7))
    finish(driver)
    assert "not cached" in error_of(driver, 5)


def test_an_adapter_replaced_while_it_is_read_serves_earlier_requests():
    driver = driver_of()
    driver.submit(request(1, 7, size=1), request(2, 7))
    step(driver, works=False)
    driver.host.forgotten.append(7)
    driver.submit(request(3, 7, size=1, value=2.0), request(4, 7))
    step(driver, works=False)
    first, second = begun(driver, ReadAdapter)
    for work in (second, first):  # the later one is read first
        driver.host.work.remove(work)
        driver.host.finish(work)
        step(driver, works=False)
    finish(driver)
    assert not any(error_of(driver, i) for i in (1, 2, 3, 4))
    digests = {it.digest for it in driver.loop.table.adapters.cache.adapters}
    assert digests == {second.tensors.read().digest}


# Block reuse -------------------------------------------------------------------------------


def test_blocks_are_found_by_the_content_of_an_adapter():
    driver = driver_of(reuse=True)
    driver.submit(request(1, 7, size=1, prompt=12))
    finish(driver)

    def reused(*requests):
        before = driver.kv_cache.reuse_counts.reused_tokens
        driver.submit(*requests)
        finish(driver)
        return driver.kv_cache.reuse_counts.reused_tokens - before

    assert reused(request(2, 7, prompt=12)) > 0
    assert reused(request(3, 8, size=1, prompt=12)) > 0  # another id, the same content
    assert reused(request(4, 9, size=1, value=2.0, prompt=12)) == 0
    assert reused(request(5, prompt=12)) == 0
    driver.host.forgotten.append(7)
    assert reused(request(6, 7, size=1, value=3.0, prompt=12)) == 0


# Questions ---------------------------------------------------------------------------------


def test_explain_says_what_a_request_waits_for():
    driver = driver_of()
    driver.submit(request(1, 7, size=1), request(2, 7))
    texts = []
    for _ in range(3):
        step(driver, works=False)
        texts.append([explain(driver.loop, i).text for i in (1, 2)])
        assert explain(driver.loop, 1).reason == "preparing"
        driver.host.finish_work()
    for number, what in enumerate(("is read", "is on the host", "is on the device")):
        assert all(f"waits until its adapter 7 {what}" in text for text in texts[number])
    finish(driver)


def test_would_fit_knows_which_adapters_are_known():
    driver = driver_of()
    assert would_fit(driver.loop, request(1, 7, size=1)).accepted
    assert "AdapterError" in would_fit(driver.loop, request(1, 7)).text
    driver.submit(request(1, 7, size=1))
    step(driver, works=False)
    assert would_fit(driver.loop, request(2, 7)).accepted
    finish(driver)
    assert would_fit(driver.loop, request(2, 7)).accepted


def test_results_that_no_request_waits_for_are_ignored():
    driver = driver_of()
    driver.submit(request(1, length=6))
    step(driver)
    driver.host.done.append(AdapterDone(99, "x"))
    finish(driver)
    assert not error_of(driver, 1)


def test_an_explanation_includes_news_that_are_noted_and_not_applied():
    driver = driver_of()
    driver.submit(request(1, 7, size=1))
    step(driver)
    adapters, done = driver.loop.table.adapters, driver.host.done
    adapters.note((), done)
    done.clear()
    assert "is on the host" in explain(driver.loop, 1).text
    finish(driver)
    assert not error_of(driver, 1)


@pytest.mark.parametrize(("owner", "name"), [(RequestTable, "most_active"), (Adapters, "take_in")])
def test_an_iteration_that_fails_loses_no_news(monkeypatch, owner, name):
    driver = driver_of()
    driver.submit(request(1, 7, size=1), request(2, 8, size=1))
    step(driver)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, lambda self: 1 / 0)
        driver.submit(request(3))
        with pytest.raises(ZeroDivisionError):
            driver.loop.iterate()
    driver.loop.recover(RuntimeError("it failed"))
    for request_id in (1, 2):  # both have been read, which the next iteration will notice
        assert "is on the host" in explain(driver.loop, request_id).text
    finish(driver)
    assert not error_of(driver, 1) and not error_of(driver, 2)
