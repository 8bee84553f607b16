"""Wrong arguments of public classes: an error in the caller's line, which names the argument."""

import math

import numpy as np
import pytest

from gptmanager import GptManager, InferenceRequest, ModelType, word_list
from gptmanager.callbacks import (
    BannedTexts,
    JsonLinesSink,
    LivePage,
    LoggingSink,
    PrometheusSink,
    RequestQueue,
    Watermark,
)
from gptmanager.errors import ConfigError
from gptmanager.scheduler import LlmRequest
from gptmanager.testing import ContractChecker, RecordingCallbacks, ScriptedExecutor, ScriptedModel

NUMBERS = (None, "x", True, np.True_, math.nan, -1, [])
COUNTS = (*NUMBERS, 1.5, np.float32(2))
FUNCTIONS = (1, "x", [])


def nothing(*_):
    pass


WRONG = [
    (
        LoggingSink,
        (),
        {"every_s": NUMBERS, "level": (*COUNTS, "INFO"), "clock": (None, *FUNCTIONS)},
    ),
    (LoggingSink, (), {"logger": (None, "x")}),
    (JsonLinesSink, ("unused.jsonl",), {"max_bytes": COUNTS[1:], "backups": COUNTS}),
    (PrometheusSink, (), {"model_name": (None, "", 1)}),
    (LivePage, (), {"max_viewers": (*COUNTS, 0), "num_outside": FUNCTIONS}),
    (RequestQueue, (), {"max_pending": (*COUNTS[1:], 0), "max_pending_bytes": COUNTS[1:]}),
    (
        RequestQueue,
        (),
        {"default_end_id": ("x", True, -2, 2**31, 1.5, [1.5]), "tokenizer": (1, [])},
    ),
    (
        RequestQueue,
        (),
        {"default_pad_id": ("x", True, 2**31, []), "exclude_input_in_output": (None, 1)},
    ),
    (BannedTexts, (None,), {"max_word_lists": COUNTS}),
    (Watermark, (1,), {"gamma": (*NUMBERS, 0, 1), "delta": (None, "x", math.nan, math.inf, 1e39)}),
    (Watermark, (), {"key": (*COUNTS, 2**32)}),
    (ContractChecker, (), {"get_inference_requests": (None, *FUNCTIONS)}),
    (
        ContractChecker,
        (nothing, nothing),
        {"poll_stop_signal": FUNCTIONS, "callback_budget_s": NUMBERS},
    ),
    (ScriptedModel, (), {"next_token": (None, *FUNCTIONS)}),
    (ScriptedExecutor, (), {"next_token": (None, *FUNCTIONS)}),
    (LlmRequest, (1, 4), {"max_new_tokens": COUNTS}),
    (LlmRequest, (1, 4, 2), {"beam_width": (*COUNTS, 0), "num_draft_tokens": COUNTS}),
]
OTHERS = {
    PrometheusSink: {"model_name": "m"},
    ContractChecker: {"send_response": nothing},
    ScriptedExecutor: {"tokens_per_block": 4},
}


@pytest.mark.parametrize(
    ("make", "positional", "wrong"), WRONG, ids=lambda it: getattr(it, "__name__", "")
)
def test_a_wrong_argument_is_named_where_it_is_given(make, positional, wrong):
    for name, values in wrong.items():
        for value in values:
            others = {} if positional else OTHERS.get(make, {})
            with pytest.raises(ConfigError, match=name):
                make(*positional, **{**others, name: value})


def test_numbers_of_numpy_are_numbers():
    LoggingSink(every_s=np.float32(0.5), level=np.int64(20))
    RequestQueue(max_pending=np.int64(4), default_end_id=np.array([1, 2])).close()
    assert LlmRequest(1, 4, np.int64(2)).max_new_tokens == 2


@pytest.mark.parametrize("timeout", ["x", math.nan, [], b"1"])
def test_a_wrong_timeout_is_named_whether_or_not_the_call_waits(timeout):
    host = RecordingCallbacks()
    model = ScriptedModel(lambda history: 1)
    with (
        RequestQueue() as queue,
        GptManager(model, ModelType.INFLIGHT_FUSED_BATCHING, **host.keywords()) as manager,
    ):
        with pytest.raises(TypeError, match="timeout = .* must be a number of seconds"):
            queue.submit([1], 2, timeout=timeout)
        assert queue.num_open == 0
        handle = queue.submit([1], 2)
        for call in (
            handle.result,
            handle.exception,
            handle.tokens,
            manager.wait,
            manager.shutdown,
        ):
            with pytest.raises(TypeError, match="timeout = .* must be a number of seconds"):
                call(timeout=timeout)
        assert manager.wait_idle(timeout=np.float32(60))


@pytest.mark.parametrize("make", [LivePage, lambda: PrometheusSink(model_name="attached")])
def test_only_a_manager_can_be_attached(make):
    made = make()
    try:
        with pytest.raises(ConfigError, match="manager = 5 must be a GptManager"):
            made.attach(5)
    finally:
        made.close()


def test_values_that_are_neither_tensors_nor_words():
    with pytest.raises(TypeError, match="tensors = 5 must be a dict.*from_tokens"):
        InferenceRequest(1, 5)
    with pytest.raises(TypeError, match="words = 5 is not a list of words"):
        word_list(5)
