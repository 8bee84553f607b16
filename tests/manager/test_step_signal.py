"""Wake-ups of readers that wait for the next step: none waits when there is no next step."""

import asyncio
import time

import pytest

from gptmanager import (
    GptManager,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.callbacks import RequestQueue
from gptmanager.executor.runner import StepSignal
from gptmanager.kernels.capture import captured_step
from gptmanager.kernels.gemm.matmul_plan import packing_pays
from gptmanager.manager.gpt_manager import before_steps

pytestmark = pytest.mark.skipif(
    not packing_pays(),
    reason="torch computes the matmuls on this processor, and steps are not captured",
)
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def served():
    """Return a queue without Poll, its manager, and what `before_steps` reports. All captured
    steps count as long.
    """
    options = OptionalParams(
        kv_cache_config=KvCacheConfig(max_tokens=4096),
        max_batch_size=4,
        max_step_failures=9,
    )
    kind, events = ModelType.INFLIGHT_FUSED_BATCHING, []
    with pytest.MonkeyPatch.context() as patch, RequestQueue() as queue:
        patch.setattr(captured_step, "LONG_S", -1.0)
        callbacks = queue.get_inference_requests, queue.send_response
        with GptManager(
            *("examples/tiny_llama", kind, 1, SchedulerConfig(), *callbacks),
            optional_params=options,
        ) as manager:
            queue.attach(manager)
            before_steps(manager, events.append)
            yield queue, manager, events


def test_each_true_is_followed_by_another_call():
    signal, calls = StepSignal(), []
    signal.callbacks += [calls.append, lambda is_unlocked: calls.append("other")]
    signal.begin(True)
    signal.end_iteration()
    assert calls == [True, "other"]  # the next iteration may have a step
    signal.end_iteration()
    assert calls[2:] == [False, "other"]
    signal.begin(True)
    signal.end_iteration()
    signal.interrupt()
    assert calls[4:] == [True, "other", False, "other"]


def test_a_loop_that_becomes_idle_releases_what_waits(served):
    queue, manager, events = served
    queue.submit([1, 2, 3], 6).result(LIMIT_S)
    assert manager.wait_idle(LIMIT_S)
    assert events[0] is False and True in events  # the context, then captured steps
    assert events[-1] is False


def test_readers_of_many_streams_get_every_token(served):
    queue, _, _ = served

    async def read(generation):
        return [token async for token in generation]

    async def read_all():
        streams = [queue.submit([1, 2, n], 9, is_streaming=True) for n in range(6)]
        return await asyncio.wait_for(asyncio.gather(*map(read, streams)), LIMIT_S)

    wanted = [list(queue.submit([1, 2, n], 9).result(LIMIT_S).generated_ids[0]) for n in range(6)]
    assert asyncio.run(read_all()) == wanted


def test_readers_have_all_tokens_in_a_pause(served, monkeypatch):
    queue, manager, events = served
    loop, inbox, paused_in = manager._worker.loop, manager._inbox, []
    sample = loop.sample

    def pause_after_a_long_step(step):
        if events[-1] and not paused_in:
            inbox.is_paused = True  # without the question of `pause_generation`
            paused_in.append(inbox.iteration)
        sample(step)

    async def run():
        generation, seen = queue.submit([1, 2, 3], 20, is_streaming=True), []

        async def read():
            async for token in generation:
                seen.append(token)

        task = asyncio.ensure_future(read())
        give_up = time.monotonic() + LIMIT_S
        try:
            while (
                not paused_in
                or inbox.iteration <= paused_in[0]  # the step's response is not sent yet
                or len(seen) < len(generation._tokens)
            ):
                assert time.monotonic() < give_up
                await asyncio.sleep(0.001)
            assert 0 < len(seen) < 20
        finally:
            manager.resume_generation()
        await asyncio.wait_for(task, LIMIT_S)
        assert len(seen) == 20

    monkeypatch.setattr(loop, "sample", pause_after_a_long_step)
    asyncio.run(run())


def test_nothing_waits_while_the_loop_answers_a_question(served):
    queue, manager, events = served
    with queue.submit([1, 2, 3], 2000, is_streaming=True) as generation:
        next(generation.tokens(LIMIT_S))
        for _ in range(20):
            assert manager._ask("test", lambda loop: events[-1], LIMIT_S) is False
        manager.abort_all()


def test_a_failed_step_releases_what_waits(served, monkeypatch):
    queue, manager, events = served
    loop, seen = manager._worker.loop, []
    sample = loop.sample

    def fail_after_a_long_step(step):
        if events[-1]:
            monkeypatch.setattr(loop, "sample", sample)
            raise RuntimeError("boom")
        sample(step)

    monkeypatch.setattr(loop, "sample", fail_after_a_long_step)
    generation = queue.submit([1, 2, 3], 50)
    generation.add_done_callback(lambda _: seen.extend(events[-2:]))
    assert "boom" in str(generation.exception(LIMIT_S))
    assert seen == [True, False]


def test_a_queue_hears_only_the_steps_of_its_own_manager(served):
    queue, manager, _ = served
    with pytest.raises(ValueError, match="attached to a manager already"):
        queue.attach(manager)
    assert manager._worker.steps.callbacks.count(queue._wakeups.begin_step) == 1
