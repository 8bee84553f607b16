"""The queue and its handles between real hosts' threads and a real manager."""

import asyncio
import concurrent.futures
from types import SimpleNamespace

import torch
from responding import in_thread

from gptmanager import FinishReason, GptManager, ModelType, OptionalParams, SchedulerConfig
from gptmanager.callbacks import RequestQueue
from gptmanager.callbacks.longest_request import longest_request
from gptmanager.errors import ManagerDeadError
from gptmanager.testing import ContractChecker, ScriptedModel

TIMEOUT = 30.0


def serve(queue, next_token, stats=None, checker=None, **params):
    return GptManager(
        ScriptedModel(next_token),
        ModelType.INFLIGHT_FUSED_BATCHING,
        1,
        SchedulerConfig(),
        (checker or queue).get_inference_requests,
        (checker or queue).send_response,
        queue.poll_stop_signal,
        stats,
        OptionalParams(**params),
    )


def count_up(history):
    return (history[-1] + 1) % 1000


def test_many_threads_and_a_real_manager():
    # Given a small queue in front of a small manager that is only asked when notified
    queue = RequestQueue(max_pending=4)
    checker = ContractChecker(queue.get_inference_requests, queue.send_response)
    with (
        queue,
        serve(queue, count_up, checker=checker, max_batch_size=4, idle_poll_s=None) as manager,
    ):
        queue.attach(manager)

        def submit_some(first):
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                handles = pool.map(
                    lambda token: queue.submit([token], 6, is_streaming=bool(token % 2)),
                    range(first, first + 12),
                )
                return [(handle.request.input_ids[0], list(handle)) for handle in handles]

        # When several threads submit and read
        outputs = [in_thread(submit_some, first) for first in (0, 100, 200)]

        # Then every one has its own tokens
        for output in outputs:
            for first, tokens in output.result(20):
                assert tokens == list(range(first + 1, first + 7))
    checker.check(manager)


def test_cancellations_at_any_moment_leave_every_handle_with_its_own_prefix():
    # Given a manager that serves few at a time
    queue = RequestQueue(max_pending=8)
    checker = ContractChecker(queue.get_inference_requests, queue.send_response)
    with (
        queue,
        serve(queue, count_up, checker=checker, max_batch_size=3) as manager,
        concurrent.futures.ThreadPoolExecutor(1) as canceller,
    ):
        queue.attach(manager)

        # When every other request is cancelled by another thread while it waits, runs or ends
        handles = []
        for token in range(60):
            handles.append(queue.submit([token], 8, is_streaming=bool(token % 3)))
            if token % 2:
                canceller.submit(handles[-1].cancel)

        # Then each handle ends, with the tokens that it had
        for token, handle in enumerate(handles):
            expected = tuple(range(token + 1, token + 9))
            result = handle.result(20)
            assert result.generated_ids == (expected[: len(result.generated_ids[0])],)
            assert tuple(handle) == result.generated_ids[0]
            if result.finish_reasons == (FinishReason.LENGTH,):
                assert result.generated_ids == (expected,)
            else:
                assert token % 2 and result.finish_reasons == (FinishReason.CANCELLED,)
        assert queue.poll_stop_signal() == set()
    checker.check(manager)


def test_cancel_stream_and_drain_with_a_real_manager():
    with RequestQueue() as queue, serve(queue, count_up) as manager:
        queue.attach(manager)

        async def read_some():
            with queue.submit([1], 500, is_streaming=True) as generation:
                async for token in generation:
                    if token == 5:
                        break
            return await generation

        # When a reader leaves early
        result = asyncio.run(asyncio.wait_for(read_some(), TIMEOUT))
        assert result.finish_reasons == (FinishReason.CANCELLED,)
        assert result.generated_ids[0][:4] == (2, 3, 4, 5)
        assert 0 <= result.metrics["queue_s"] <= result.metrics["first_token_s"]

        # When the manager is left with work, it drains
        last = queue.submit([1], 5)
        while queue.num_pending:
            manager.wait_idle(TIMEOUT)
    assert last.result(0).generated_ids == ((2, 3, 4, 5, 6),)


def test_what_a_failed_manager_never_fetched_is_answered_too():
    def fail(history):
        raise RuntimeError("boom")

    with RequestQueue() as queue:
        running = queue.submit([1], 5)
        pending = queue.submit([1], 5)
        manager = serve(queue, fail, max_active_requests=1, max_step_failures=1)
        queue.attach(manager)

        for handle in (running, pending):
            assert "boom" in repr(handle.exception(TIMEOUT)) + repr(handle.exception(0).__cause__)
            assert isinstance(handle.exception(0), ManagerDeadError)


def test_without_the_prompt_in_the_output():
    with (
        RequestQueue(exclude_input_in_output=True) as queue,
        serve(queue, lambda history: history[-2], exclude_input_in_output=True) as manager,
    ):
        queue.attach(manager)

        result = queue.submit([1, 2], 4).result(TIMEOUT)

    assert result.generated_ids == ((1, 2, 1, 2),)
    assert result.output_ids == ((1, 2, 1, 2, 1, 2),)
    assert torch.equal(
        result.tensors["output_ids"], torch.tensor([[[1, 2, 1, 2]]], dtype=torch.int32)
    )


def test_the_longest_request_is_found_by_asking_the_manager():
    for limit in range(2, 10):
        for at_most in range(2, 10):

            def would_fit(request, limit=limit, at_most=at_most):
                length = len(request.input_ids) + int(request.max_new_tokens[0])
                assert 2 <= length <= at_most
                return SimpleNamespace(accepted=length <= limit)

            manager = SimpleNamespace(would_fit=would_fit)
            assert longest_request(manager, at_most) == min(limit, at_most)
