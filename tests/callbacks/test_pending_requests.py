from collections import deque
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interrupting import interrupted

from gptmanager import InferenceRequest
from gptmanager.callbacks.queue.pending_requests import PendingRequests, Size
from gptmanager.errors import CapacityError


def ids(requests):
    return [request.request_id for request in requests]


def fill(*priorities):
    pending = PendingRequests()
    for request_id, priority in enumerate(priorities):
        pending.push(InferenceRequest(request_id, priority=priority))
    return pending


def test_equals_keep_their_order_and_higher_priority_goes_first():
    pending = fill(0.5, 0.9, 0.5, 0.1, 0.9)

    assert ids(pending.pop(3)) == [1, 4, 0]
    assert ids(pending.pop(9)) == [2, 3]
    assert pending.pop(1) == []


@pytest.mark.parametrize("priority", [float("nan"), None, "high"])
def test_an_impossible_priority_counts_as_the_default(priority):
    assert ids(fill(0.4, priority, 0.6).pop(3)) == [2, 1, 0]


@pytest.mark.parametrize("priority", [np.float32(0.9), np.int64(1), torch.tensor(0.9)])
def test_a_priority_is_a_number_of_any_type(priority):
    assert ids(fill(0.4, priority, 0.6).pop(3)) == [1, 2, 0]


def test_one_in_the_middle_can_be_taken_once():
    pending = fill(0.5, 0.5, 0.5)

    assert pending.take(1).request_id == 1
    assert pending.take(1) is None
    assert len(pending) == 2
    assert ids(pending.pop(3)) == [0, 2]


def test_an_interrupted_take_leaves_no_place_for_a_later_request_of_this_id():
    for point in count():
        pending = fill(0.9)

        def take(pending=pending):
            pending.take(0)

        is_reached = interrupted(take, point)
        if not pending:
            pending.push(InferenceRequest(0, priority=0.1))
            pending.push(InferenceRequest(1, priority=0.5))
            assert ids(pending.pop(2)) == [1, 0], point
        if not is_reached:
            break
    assert point > 4


def test_a_cleared_queue_keeps_no_order_of_earlier_requests():
    pending = fill(0.5, 0.5)

    assert pending.clear() == {0, 1}
    assert pending.size == Size(0, 0, 0)
    for request_id in (1, 0):
        pending.push(InferenceRequest(request_id, priority=0.5))
    assert ids(pending.pop(2)) == [1, 0]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.sampled_from([0.1, 0.5, 0.9])),
            st.tuples(st.just("pop"), st.integers(0, 3)),
            st.tuples(st.just("take"), st.integers(0, 12)),
        )
    )
)
def test_it_behaves_as_a_stably_sorted_list(operations):
    pending, model, next_id = PendingRequests(), [], 0
    for operation, value in operations:
        if operation == "push":
            pending.push(InferenceRequest(next_id, priority=value))
            model.append((-value, next_id))
            next_id += 1
        elif operation == "pop":
            expected = deque(sorted(model))
            popped = [expected.popleft() for _ in range(min(value, len(expected)))]
            model = list(expected)
            assert ids(pending.pop(value)) == [request_id for _, request_id in popped]
        else:
            found = [item for item in model if item[1] == value]
            model = [item for item in model if item[1] != value]
            assert (pending.take(value) is not None) == bool(found)
        assert len(pending) == len(model)


def test_without_limits_every_request_fits():
    assert fill(0.5).excess(Size(10**9, 10**9, 10**9)) == ""


def test_a_request_that_can_never_fit_is_refused_even_if_another_limit_is_exceeded_first():
    pending = PendingRequests(
        {"max_pending": 1, "max_pending_tokens": 8, "max_pending_bytes": None}
    )
    pending.push(InferenceRequest.from_tokens(1, [1, 2], 3))
    assert pending.excess(Size(1, 6, 0)).startswith("1 requests are pending, 1 more would exceed")
    with pytest.raises(CapacityError, match="a request of 9 prompt tokens exceeds max_pending_tok"):
        pending.excess(Size(1, 9, 0))
