import asyncio
import copy
import os
import pickle
import queue as std_queue
import signal
import threading
import time
import warnings
from contextlib import suppress

import numpy as np
import pytest
import torch
from responding import ManagerStub, ending, in_thread, streamed, whole

from gptmanager import FinishReason, InferenceRequest, NamedTensor
from gptmanager.callbacks import RequestQueue
from gptmanager.errors import (
    CallbackError,
    CapacityError,
    DuplicateRequestIdError,
    InvalidRequestError,
    ManagerDeadError,
)

TIMEOUT = 30.0


@pytest.fixture
def queue():
    with RequestQueue() as queue:
        yield queue


def fetched_ids(queue, room=-1):
    return [request.request_id for request in queue.get_inference_requests(room)]


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


# What the manager sees -------------------------------------------------------------------------


def test_requests_are_fetched_in_order_and_within_the_room(queue):
    for prompt in ([1], [2], [3]):
        queue.submit(prompt, 5)

    assert queue.num_pending == queue.num_open == 3
    assert fetched_ids(queue, 0) == []
    assert fetched_ids(queue, 2) == [1, 2]
    assert fetched_ids(queue, 2) == [3]
    assert fetched_ids(queue) == []
    assert (queue.num_pending, queue.num_open) == (0, 3)


def test_negative_room_is_unbounded_and_priority_goes_first(queue):
    queue.submit([1], 5)
    queue.submit([1], 5, priority=0.9)

    assert fetched_ids(queue, -1) == [2, 1]


def test_a_submitted_request_carries_what_it_was_given(queue):
    queue.submit([1, 2], 5, temperature=0.5, stop_words_list=[[3, 4]], is_streaming=True)

    (request,) = queue.get_inference_requests(1)

    assert request.input_ids.tolist() == [1, 2]
    assert request.max_new_tokens.tolist() == 5
    assert request.temperature.tolist() == 0.5
    assert request.stop_words_list.tolist() == [[[3, 4], [2, -1]]]
    assert request.is_streaming


def test_defaults_are_for_requests_without_values_of_their_own(checkpoint):
    with RequestQueue.for_checkpoint(checkpoint, default_pad_id=0) as queue:
        queue.submit([1], 5)
        queue.submit([1], 5, end_id=-1)
        queue.submit(InferenceRequest.from_tokens(9, [1], 5))

        requests = queue.get_inference_requests(-1)

    assert [request.end_id.reshape(-1).tolist() for request in requests] == [
        [7, 8, 9],
        [-1],
        [7, 8, 9],
    ]
    assert [request.pad_id.tolist() for request in requests] == [[0]] * 3


# Submitting ------------------------------------------------------------------------------------


def test_ids_are_counted_and_skip_those_in_use(queue):
    whole_request = InferenceRequest.from_tokens(2, [1], 5)

    handles = [queue.submit([1], 5), queue.submit(whole_request), queue.submit([1], 5)]

    assert [handle.request_id for handle in handles] == [1, 2, 3]
    assert handles[1].request is whole_request
    assert queue.submit([1], 5, request_id=77).request_id == 77


def test_an_open_id_is_refused_and_free_again_after_its_final_response(queue):
    first = queue.submit([1], 5, request_id=7)

    with pytest.raises(DuplicateRequestIdError, match="request_id = 7"):
        queue.submit([1], 5, request_id=7)
    queue.get_inference_requests(-1)
    queue.send_response(7, whole([1, 9]), True, "")

    assert first.result(0).generated_ids == ((9,),)
    assert queue.submit([1], 5, request_id=7) is not first


def test_what_cannot_be_submitted_is_refused_in_the_line(queue):
    for name, meant in (("top_p", "runtime_top_p"), ("temprature", "temperature")):
        with pytest.raises(AttributeError, match=rf"{name!r} \(did you mean {meant!r}\?\)"):
            queue.submit([1], 5, **{name: 0.5})
    with pytest.raises(AttributeError, match="has no property 'qqq'$"):
        queue.submit([1], 5, qqq=0.5)
    with pytest.raises(ValueError, match="outside"):
        queue.submit([1], 5, request_id=-1)
    with pytest.raises(TypeError, match="max_new_tokens"):
        queue.submit([1])
    with pytest.raises(TypeError, match="InferenceRequest"):
        queue.submit(InferenceRequest(1), 5)
    for limit in (0, "3", 1.5):
        with pytest.raises(ValueError, match="max_pending = .* must be an integer of at least 1"):
            RequestQueue(max_pending=limit)

    assert queue.num_open == 0


def test_a_full_queue_raises_after_the_timeout_and_keeps_no_id():
    with RequestQueue(max_pending=1) as queue:
        queue.submit([1], 5)

        with pytest.raises(std_queue.Full):
            queue.submit([1], 5, request_id=7, timeout=0)
        with pytest.raises(std_queue.Full):
            queue.submit([1], 5, request_id=7, timeout=0.01)

        queue.get_inference_requests(1)
        assert queue.submit([1], 5, request_id=7, timeout=0).request_id == 7


@pytest.mark.parametrize(
    ("limit", "size", "noun"),
    [("max_pending_tokens", 5, "prompt tokens"), ("max_pending_bytes", 5 * 8 + 8, "bytes")],
)
def test_a_queue_is_full_of_tokens_or_of_bytes(limit, size, noun):
    with RequestQueue(**{limit: 2 * size}) as queue:
        # Given two requests that fill it
        queue.submit([1] * 5, 5)
        queue.submit([2] * 5, 5)
        assert queue.num_pending_tokens == 10 and queue.num_pending_bytes == 2 * (5 * 8 + 8)

        # When a third comes, Then it is told what is full, by value and limit
        full = f"{2 * size} {noun}.* are pending, .* more would exceed {limit} = {2 * size}"
        with pytest.raises(std_queue.Full, match=full):
            queue.submit([3], 5, timeout=0)

        # When there is room again, Then smaller ones come in, and one too large for ever does not
        assert queue.cancel(1)
        assert queue.submit([3], 5, timeout=0).request_id == 4
        with pytest.raises(CapacityError, match=f"{noun}.* exceeds {limit} = {2 * size}"):
            queue.submit([3] * 50, 5)
        assert fetched_ids(queue) == [2, 4]
        assert queue.num_pending_tokens == queue.num_pending_bytes == 0


def test_what_waits_is_measured_in_whatever_form_it_came(queue):
    for prompt in (
        [[1, 2, 3]],
        np.array([[1, 2, 3]], dtype=np.int32),
        torch.tensor([1, 2, 3], dtype=torch.int16),
        None,
        "what is this",
    ):
        request = InferenceRequest(queue.num_open, {"input_ids": prompt})
        queue.submit(request)
    assert queue.num_pending_tokens == 1 + 3 + 3 + 0 + 12
    assert queue.num_pending_bytes == 8 + 12 + 6 + 0 + 8 * 12


def test_a_handler_may_call_what_it_interrupts_in_a_queue(queue):
    interrupted = threading.Event()

    def interrupt():
        with queue._lock:  # as a submit that a signal interrupts
            first = queue.submit([1], 5)
            assert queue.submit([1], 5).request_id == first.request_id + 1
            assert first.cancel()
            queue.close()
        interrupted.set()

    threading.Thread(target=interrupt, daemon=True).start()
    assert interrupted.wait(TIMEOUT)


def test_a_forked_child_does_not_wait_for_a_queue(queue):
    queue.submit([1], 5)
    with queue._lock, warnings.catch_warnings():  # its lock will never be free there
        warnings.simplefilter("ignore")  # Python 3.12 warns of threads

        def fork():
            if os.fork():
                return os.wait()[1]
            signal.alarm(10)
            with suppress(ManagerDeadError):
                queue.submit([1], 5)
                os._exit(1)
            assert not queue.cancel(1)
            with queue:
                pass
            os._exit(0)

        assert in_thread(fork).result(TIMEOUT) == 0


def test_an_inherited_handle_raises_where_it_would_wait(queue):
    done, waits = queue.submit([1], 5), queue.submit([1], 5)
    queue.get_inference_requests(-1)
    queue.send_response(1, whole([1, 7]), True, "")

    async def ask():
        await waits

    async def iterate():
        async for _ in waits:
            pass

    def fork():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of threads
            if os.fork():
                return os.wait()[1]
        signal.alarm(10)
        calls = (waits.result, waits.exception, lambda: next(iter(waits)),
                 lambda: asyncio.run(ask()), lambda: asyncio.run(iterate()))  # fmt: skip
        for call in calls:
            with suppress(ManagerDeadError):
                call()
                os._exit(1)
        assert done.result().generated_ids == ((7,),) and [*done] == [7]
        os._exit(0)

    assert in_thread(fork).result(TIMEOUT) == 0
    queue.send_response(2, whole([1, 8]), True, "")
    assert waits.result(TIMEOUT).generated_ids == ((8,),)


def test_a_handle_says_why_it_is_not_pickled_or_copied(queue):
    generation = queue.submit([1], 5)
    for clone in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"handle of request 1 .* pickle its result\(\)"):
            clone(generation)


def test_only_a_manager_can_be_attached(queue):
    with pytest.raises(TypeError, match=r"attach\(\) takes a GptManager: str has no method notify"):
        queue.attach("manager")


@pytest.mark.parametrize("room_by", ["fetching", "cancelling"])
def test_a_full_queue_blocks_until_there_is_room(room_by):
    with RequestQueue(max_pending=1) as queue:
        # Given a full queue and a thread that submits
        queue.submit([1], 5)
        waiting = in_thread(queue.submit, [2], 5)
        wait_until(lambda: queue.num_open == 2)
        assert not waiting.done()

        # When there is room
        if room_by == "fetching":
            assert fetched_ids(queue, 1) == [1]
        else:
            assert queue.cancel(1)

        # Then the submit goes through
        assert waiting.result(TIMEOUT).request_id == 2
        assert fetched_ids(queue) == [2]


def test_a_done_callback_may_submit_but_never_waits():
    with RequestQueue(max_pending=1) as queue:
        # Given a full queue, and a callback on the manager's thread that submits
        outcomes = []

        def submit_next(done):
            try:
                outcomes.append(queue.submit([1], 5).request_id)
            except std_queue.Full as full:
                outcomes.append(full)

        first = queue.submit([1], 5)
        first.add_done_callback(submit_next)
        queue.get_inference_requests(1)
        second = queue.submit([1], 5)
        second.add_done_callback(submit_next)

        # When the manager's thread, this one, answers
        queue.send_response(1, whole([1, 9]), True, "")
        queue.get_inference_requests(1)
        queue.send_response(2, whole([1, 9]), True, "")

        # Then it was refused while the queue was full
        assert isinstance(outcomes[0], std_queue.Full)
        assert isinstance(outcomes[1], int)


# Responses -------------------------------------------------------------------------------------


def test_responses_find_their_handles(queue):
    streaming = queue.submit([1], 5, is_streaming=True)
    plain = queue.submit([1, 2], 5)
    queue.get_inference_requests(-1)

    queue.send_response(1, streamed([9]), False, "")
    queue.send_response(2, whole([1, 2, 7]), True, "")
    queue.send_response(1, [*streamed([8]), *ending()], True, "")

    assert list(streaming) == [9, 8]
    assert plain.result(0).output_ids == ((1, 2, 7),)
    assert queue.num_open == 0


def test_an_error_response_raises_its_class(queue):
    handle = queue.submit([], 5)
    queue.get_inference_requests(-1)

    queue.send_response(1, [], True, "InvalidRequestError: input_ids is empty")

    with pytest.raises(InvalidRequestError, match="^input_ids is empty$"):
        handle.result(0)


def test_responses_to_unknown_ids_are_ignored(queue):
    queue.send_response(5, streamed([1]), False, "")
    queue.send_response(5, whole([1]), True, "")


@pytest.mark.parametrize("is_final", [False, True])
def test_an_unreadable_response_fails_its_handle_and_never_the_callback(queue, is_final):
    handle = queue.submit([1], 5, is_streaming=True)
    queue.get_inference_requests(-1)

    queue.send_response(1, [NamedTensor("output_ids", None), *ending(), 5], is_final, "")

    with pytest.raises(CallbackError, match="cannot be read"):
        handle.result(0)
    assert queue.poll_stop_signal() == (set() if is_final else {1})
    queue.send_response(1, whole([1]), True, "")
    assert queue.poll_stop_signal() == set()


# Cancelling ------------------------------------------------------------------------------------


def test_a_pending_request_is_cancelled_at_once_and_never_fetched(queue):
    handle = queue.submit([1, 2], 5, is_streaming=True)

    assert handle.cancel()

    assert handle.result(0).finish_reasons == (FinishReason.CANCELLED,)
    assert handle.result(0).output_ids == ((1, 2),)
    assert list(handle) == []
    assert fetched_ids(queue) == []
    assert queue.poll_stop_signal() == set()
    assert not handle.cancel()


def test_a_stop_of_a_fetched_request_is_repeated_until_its_final_response(queue):
    # Given a request that runs
    handle = queue.submit([1], 5, is_streaming=True)
    queue.get_inference_requests(-1)
    queue.send_response(1, streamed([9]), False, "")

    # When it is cancelled twice
    assert queue.cancel(1)
    assert queue.cancel(1)

    # Then the manager is told in every iteration, up to the final response
    assert queue.poll_stop_signal() == {1}
    queue.send_response(1, streamed([8]), False, "")
    assert queue.poll_stop_signal() == {1}
    queue.send_response(1, [*streamed([]), *ending(FinishReason.CANCELLED)], True, "")
    assert queue.poll_stop_signal() == set()
    assert list(handle) == [9, 8]
    assert handle.result(0).finish_reasons == (FinishReason.CANCELLED,)
    assert not queue.cancel(1)


def test_cancelling_an_unknown_id_says_so(queue):
    assert not queue.cancel(99)


# The end ---------------------------------------------------------------------------------------


def test_close_fails_every_handle_and_stops_what_runs(queue):
    # Given a request that runs and one that waits
    running, pending = queue.submit([1], 5), queue.submit([1], 5)
    queue.get_inference_requests(1)
    error = RuntimeError("the host is going down")

    # When the queue is closed, twice
    queue.close(error)
    queue.close()

    # Then both have failed, and only the running one has to be stopped
    for handle in (running, pending):
        assert handle.exception(0) is error
        with pytest.raises(RuntimeError, match="going down"):
            list(handle)
    assert queue.poll_stop_signal() == {1}
    assert fetched_ids(queue) == []
    queue.send_response(1, whole([1]), True, "")
    assert queue.poll_stop_signal() == set()
    with pytest.raises(ManagerDeadError, match="closed") as refused:
        queue.submit([1], 5)
    assert refused.value.__cause__ is error


def test_close_frees_a_submit_that_waits():
    with RequestQueue(max_pending=1) as queue:
        queue.submit([1], 5)
        waiting = in_thread(queue.submit, [1], 5)
        wait_until(lambda: queue.num_open == 2)
    assert isinstance(waiting.exception(TIMEOUT), ManagerDeadError)


def test_a_done_callback_may_use_the_queue_that_closes(queue):
    refused = []

    def submit_again(done):
        with pytest.raises(ManagerDeadError):
            queue.submit([1], 5)
        refused.append(done.request_id)

    queue.submit([1], 5).add_done_callback(submit_again)
    queue.close()

    assert refused == [1]


def test_an_attached_manager_is_woken(queue):
    manager = ManagerStub()
    queue.attach(manager)
    assert manager.notified.acquire(timeout=TIMEOUT)

    queue.submit([1], 5)
    assert manager.notified.acquire(timeout=TIMEOUT)

    with pytest.raises(ValueError, match="attached"):
        queue.attach(manager)
    manager.end()


def test_no_handle_is_left_waiting_when_the_manager_dies(queue):
    # Given a pending request and threads and tasks that wait for it
    manager, cause = ManagerStub(), RuntimeError("boom")
    queue.attach(manager)
    handle = queue.submit([1], 5, is_streaming=True)

    async def read():
        return [token async for token in handle]

    waiting = [in_thread(handle.result), in_thread(list, handle), in_thread(asyncio.run, read())]

    # When the manager dies
    manager.end(cause)

    # Then everyone learns why
    for future in waiting:
        error = future.exception(TIMEOUT)
        assert isinstance(error, ManagerDeadError)
        assert error.__cause__ is cause


def test_a_handle_that_has_ended_cancels_no_later_request_with_its_id():
    queue = RequestQueue()
    first = queue.submit([1], 3, request_id=7)
    queue.get_inference_requests(1)
    queue.send_response(7, whole([1, 2]), True, "")
    second = queue.submit([1], 3, request_id=7)
    assert not first.cancel() and not second.done()
    queue.get_inference_requests(1)
    assert not first.cancel() and not queue.poll_stop_signal()
    assert second.cancel() and queue.poll_stop_signal() == {7}
