import copy
import math
import pickle

import numpy as np
import pytest
import torch
from responding import METRICS, ending, streamed, whole

from gptmanager import REQUEST_METRICS, FinishReason, InferenceRequest, NamedTensor, errors
from gptmanager.callbacks.queue.result import ResponseCollector, cancelled_response, error_of


def request(prompt=(1, 2, 3), **keywords):
    return InferenceRequest.from_tokens(4, list(prompt), 5, **keywords)


def test_a_whole_response_is_cut_into_prompt_and_generated_tokens():
    collector = ResponseCollector(request())

    assert collector.add(whole([1, 2, 3, 9, 8])) == []
    done = collector.result()

    assert done.request_id == 4
    assert done.generated_ids == ((9, 8),)
    assert done.prompt_ids == (1, 2, 3)
    assert done.output_ids == ((1, 2, 3, 9, 8),)
    assert done.finish_reasons == (FinishReason.LENGTH,)
    assert dict(done.metrics) == dict(zip(REQUEST_METRICS, METRICS, strict=True))
    assert done.tensors["output_ids"].shape == (1, 1, 12)
    with pytest.raises(AttributeError):
        done.request_id = 5


@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))]
)
def test_a_result_is_copied_and_pickled_whole(clone):
    step = torch.arange(1000.0).reshape(1, 1, 1000)  # responses hold parts of it
    collector = ResponseCollector(request())
    collector.add([*whole([1, 2, 3, 9, 8]), NamedTensor("output_log_probs", step[..., :2])])
    done = collector.result()
    assert done.tensors.keys() and done.output_ids  # they are kept, but not pickled

    copied = clone(done)

    assert copied.output_ids == done.output_ids and copied.request_id == 4
    assert copied.metrics == done.metrics and copied.finish_reasons == done.finish_reasons
    assert copied.tensors["output_log_probs"].tolist() == [[[0.0, 1.0]]]
    assert copied.tensors.keys() == done.tensors.keys()
    assert len(pickle.dumps(done)) < 2500
    with pytest.raises(TypeError):
        copied.metrics["x"] = 1


def test_beams_have_lengths_of_their_own():
    collector = ResponseCollector(request())
    collector.add(whole([1, 2, 3, 9, 8], [1, 2, 3, 7]))

    done = collector.result()

    assert done.generated_ids == ((9, 8), (7,))
    assert len(done.finish_reasons) == 2


@pytest.mark.parametrize("exclude_input", [True, False])
def test_a_response_without_the_prompt_is_known_by_its_tokens(exclude_input):
    collector = ResponseCollector(request(), exclude_input=exclude_input)
    collector.add(whole([9, 8, 7, 6]))

    assert collector.result().generated_ids == ((9, 8, 7, 6),)


def test_a_generation_that_repeats_the_prompt_is_kept_when_the_input_is_excluded():
    collector = ResponseCollector(request(), exclude_input=True)
    collector.add(whole([1, 2, 3, 4]))

    assert collector.result().generated_ids == ((1, 2, 3, 4),)


@pytest.mark.parametrize("ids", [np.array([[1, 2, 3]]), torch.tensor([1, 2, 3])])
def test_the_prompt_may_be_any_tensor_that_the_contract_takes(ids):
    whole_request = InferenceRequest(0, {"input_ids": ids})
    collector = ResponseCollector(whole_request)
    collector.add(whole([1, 2, 3, 9]))

    assert collector.result().output_ids == ((1, 2, 3, 9),)


def test_streamed_parts_are_joined():
    collector = ResponseCollector(request(is_streaming=True))
    log_probs = [NamedTensor("output_log_probs", torch.full((1, 1, n), -0.5)) for n in (1, 2, 0)]
    running = [NamedTensor("cum_log_probs", torch.tensor([[value]])) for value in (-0.5, -1.5)]

    first = collector.add([*streamed([9]), log_probs[0], running[0]])
    second = collector.add([*streamed([8, 7], 1), log_probs[1], running[1]])
    seen = {}
    assert collector.new_tensors(seen)["output_log_probs"].shape == (1, 1, 3)
    assert "output_log_probs" not in collector.new_tensors(seen)
    last = collector.add([*streamed([], 3), log_probs[2], *ending(FinishReason.END_ID)])
    done = collector.result()

    assert (first, second, last) == ([9], [8, 7], [])
    assert done.generated_ids == ((9, 8, 7),)
    assert done.output_ids == ((1, 2, 3, 9, 8, 7),)
    assert done.finish_reasons == (FinishReason.END_ID,)
    assert done.tensors["output_ids"].tolist() == [[[9, 8, 7]]]
    assert done.tensors["output_ids"].dtype == torch.int32
    assert done.tensors["sequence_length"].tolist() == [[3]]
    assert done.tensors["output_log_probs"].shape == (1, 1, 3)
    assert done.tensors["cum_log_probs"].item() == -1.5
    assert "output_offset" not in done.tensors


@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_request_that_no_manager_saw_is_cancelled_without_tokens(is_streaming):
    pending = request(is_streaming=is_streaming)
    collector = ResponseCollector(pending)

    collector.add(cancelled_response(pending))
    done = collector.result()

    assert done.generated_ids == ((),)
    assert done.output_ids == ((1, 2, 3),)
    assert done.finish_reasons == (FinishReason.CANCELLED,)
    assert math.isnan(done.metrics["first_token_s"])
    assert done.metrics["prompt_tokens"] == 3
    assert done.tensors["sequence_length"].tolist() == [[0]]


@pytest.mark.parametrize(
    ("text", "cls", "message"),
    [
        ("CapacityError: needs 9 blocks", errors.CapacityError, "needs 9 blocks"),
        ("ManagerDeadError: a: b", errors.ManagerDeadError, "a: b"),
        ("RuntimeError: boom", errors.RequestError, "RuntimeError: boom"),
        ("annotations: boom", errors.RequestError, "annotations: boom"),
        ("Prompt length (9) exceeds", errors.RequestError, "Prompt length (9) exceeds"),
        ("CapacityError", errors.RequestError, "CapacityError"),
    ],
)
def test_an_error_is_of_the_class_at_the_front_of_its_text(text, cls, message):
    error = error_of(text)

    assert type(error) is cls
    assert str(error) == message
