"""What a request may hold: every rejection names the field, the value and the limit."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptmanager.callbacks import BannedTokens
from gptmanager.config import PromptLookup
from gptmanager.decoding.sampling.random_numbers import derive_seed
from gptmanager.errors import CapacityError, InvalidRequestError, RequestError
from gptmanager.loop.admission import admit
from gptmanager.loop.limits import Limits
from gptmanager.request.inference_request import InferenceRequest
from gptmanager.request.input_rows import token_bias
from gptmanager.request.output_options import OutputConfig

LIMITS = Limits(
    vocab_size=100, max_seq_len=32, max_input_len=20, num_blocks=16, tokens_per_block=4, seed=7
)


def request(**by_name):
    by_name.setdefault("input_ids", [1, 2, 3])
    by_name.setdefault("request_output_len", 4)
    tensors = {name: np.asarray(value) for name, value in by_name.items()}
    return InferenceRequest(1, tensors)


def accept(**by_name):
    return admit(request(**by_name), LIMITS, now=0.0)


@pytest.mark.parametrize(
    "ids",
    [
        np.array([5, 6], dtype=np.int64),
        np.array([[5, 6]], dtype=np.uint8),
        torch.tensor([[5, 6]], dtype=torch.int32),
        torch.tensor([5, 6], dtype=torch.uint16),
    ],
)
def test_any_integer_dtype_and_both_shapes_are_taken(ids):
    admitted = admit(InferenceRequest(1, {"input_ids": ids, "request_output_len": 3}), LIMITS, 0.0)
    assert admitted.tokens == [5, 6] and admitted.max_new_tokens == 3


@pytest.mark.parametrize(
    "value", [np.int32(4), np.array([4]), np.array([[4]]), torch.tensor(4), torch.tensor([[4]]), 4]
)
def test_a_scalar_may_have_any_shape_of_one_value(value):
    tensors = {"input_ids": np.array([1]), "request_output_len": value}
    assert admit(InferenceRequest(1, tensors), LIMITS, 0.0).max_new_tokens == 4


@pytest.mark.parametrize(
    ("by_name", "text"),
    [
        ({"colour": [1]}, "Invalid tensor name: colour"),
        ({"streaming": [1]}, r"name: streaming \(did you mean 'is_streaming'\?\)"),
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [1, 100]}, r"input_ids\[1\] = 100 is outside the vocabulary of 100"),
        ({"input_ids": [-1]}, r"input_ids\[0\] = -1 is outside the vocabulary"),
        ({"input_ids": [1.0]}, "input_ids has dtype float64, expected an integer"),
        ({"input_ids": [[1], [2]]}, "Expected batch dimension to be 1 for each request"),
        ({"input_ids": [[[1]]]}, r"input_ids has shape \[1, 1, 1\]"),
        ({"input_ids": [1] * 21}, r"Prompt length \(21\) exceeds maximum input length \(20\)."),
        ({"request_output_len": 0}, "request_output_len = 0 is outside 1"),
        ({"request_output_len": 2.0}, "request_output_len has dtype float64"),
        ({"request_output_len": [1, 2]}, r"request_output_len has shape \[2\], expected one"),
        ({"request_output_len": 2**40}, "request_output_len = 1099511627776 is outside"),
        ({"request_output_len": True}, "request_output_len has dtype bool"),
        ({"beam_width": 2}, r"beam_width = 2 is outside 1..1"),
        ({"beam_width": 0}, r"beam_width = 0 is outside 1..1"),
        ({"end_id": 100}, "end_id = 100 is outside -1..99"),
        ({"end_id": -2}, "end_id = -2 is outside -1..99"),
        ({"temperature": float("nan")}, "temperature = nan is not finite"),
        ({"temperature": float("inf")}, "temperature = inf is not finite"),
        ({"temperature": -0.5}, "temperature = -0.5 must be at least 0"),
        ({"temperature": 1e300}, r"temperature = 1e\+300 must be 0 or within 1e-30"),
        ({"temperature": 1e-300}, "temperature = 1e-300 must be 0 or within 1e-30"),
        ({"runtime_top_p": 1.5}, "runtime_top_p = 1.5 must be within 0..1"),
        ({"runtime_top_p": -0.1}, "runtime_top_p = -0.1 must be within 0..1"),
        ({"runtime_top_p": 1.0000001}, "runtime_top_p = 1.00000[0-9]* must be within 0..1"),
        ({"runtime_min_p": 2.0}, "runtime_min_p = 2 must be within 0..1"),
        ({"runtime_top_k": -1}, "runtime_top_k = -1 is outside 0"),
        ({"runtime_top_k": 0.5}, "runtime_top_k has dtype float64"),
        ({"random_seed": -1}, "random_seed = -1 is outside 0..18446744073709551615"),
        ({"min_length": -1}, "min_length = -1 is outside"),
        ({"pad_id": 2**31}, "pad_id = 2147483648 is outside"),
        ({"stop_words_list": [1, 2]}, r"stop_words_list has shape \[2\], expected \[1, 2, L\]"),
        ({"stop_words_list": [[[1, 2], [3, -1]]]}, r"end offsets \[3, -1\]"),
        ({"stop_words_list": [[[1, 2], [0, 2]]]}, r"end offsets \[0, 2\]"),
        ({"stop_words_list": [[[1, 2], [2, 1]]]}, r"end offsets \[2, 1\]"),
        ({"stop_words_list": [[[1, 200], [2, -1]]]}, r"stop_words_list\[1\] = 200 is outside"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0 must be within 1e-30"),
        ({"repetition_penalty": -1.0}, "repetition_penalty = -1 must be within 1e-30"),
        ({"presence_penalty": 2e30}, r"presence_penalty = 2e\+30 must be within -1e\+30"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty = nan is not finite"),
        ({"noRepeatNgramSize": -1}, "noRepeatNgramSize = -1 is outside 0"),
        ({"noRepeatNgramSize": 1.0}, "noRepeatNgramSize has dtype float64"),
        (
            {"embedding_bias": [1.0]},
            r"embedding_bias has shape \[1\], expected \[100\] or \[1, 100\]",
        ),
        ({"embedding_bias": [True] * 100}, "embedding_bias has dtype bool, expected a float"),
        (
            {"embedding_bias": [0.0] * 99 + [float("nan")]},
            r"embedding_bias\[99\] = nan is not finite",
        ),
        (
            {"embedding_bias": [[1e39] + [0.0] * 99]},
            r"embedding_bias\[0\] = 1e\+39 is not finite in torch.float32: at most 3.4",
        ),
        ({"return_log_probs": 2}, "return_log_probs = 2 must be a bool, 0 or 1"),
        ({"return_context_logits": 1.0}, "return_context_logits = 1.0 must be a bool, 0 or 1"),
        ({"bad_words_list": [[[1], [2]]]}, r"bad_words_list has end offsets \[2\]"),
        (
            {"bad_words_list": np.zeros((2, 2**18), int)},
            r"end offsets \[0, 0, 0, .{,20}\] \(more than 100000 characters\), expected strictly",
        ),
        ({"bad_words_list": [[[100], [1]]]}, r"bad_words_list\[0\] = 100 is outside"),
        ({"stop_words_list": np.ones((2, 2**18 + 1), int)}, "at most 262144 token ids"),
        ({"num_return_sequences": 2}, "num_return_sequences = 2 exceeds max_beam_width = 1"),
        ({"temperature": "hot"}, "temperature is a text, expected numbers"),
        ({"input_ids": np.array("hot")}, "input_ids is a text, expected numbers"),
    ],
)
def test_what_is_wrong_is_named(by_name, text):
    with pytest.raises(InvalidRequestError, match=text):
        accept(**by_name)


@pytest.mark.parametrize("name", ["input_ids", "request_output_len"])
def test_a_missing_mandatory_tensor_is_named(name):
    wanting = request()
    del wanting.tensors[name]
    with pytest.raises(InvalidRequestError, match=f"^Undefined tensor: {name}"):
        admit(wanting, LIMITS, 0.0)


def test_a_tensor_set_to_none_is_named():
    wrong = request()
    wrong.temperature = None
    with pytest.raises(
        InvalidRequestError, match="^Cannot set nullptr when calling temperature: None is"
    ):
        admit(wrong, LIMITS, 0.0)


def test_a_text_for_a_bool_is_named():
    wrong = request()
    wrong.return_log_probs = "yes"
    with pytest.raises(InvalidRequestError, match="of type str, expected a bool, 0 or 1"):
        admit(wrong, LIMITS, 0.0)


def test_words_of_several_lengths_need_word_list():
    wrong = request()
    wrong.stop_words_list = [[1, 2], [3]]
    with pytest.raises(InvalidRequestError, match=r"tensor: word_list\(\) makes it from lists"):
        admit(wrong, LIMITS, 0.0)


def test_a_logits_post_processor_that_is_not_callable_is_refused():
    with pytest.raises(
        InvalidRequestError, match="logits_post_processor is of type str, expected a call"
    ):
        admit(
            InferenceRequest.from_tokens(1, [1], 1, logits_post_processor="mine"),
            LIMITS,
            0.0,
        )
    unbound = InferenceRequest.from_tokens(1, [1], 1, logits_post_processor=BannedTokens())
    with pytest.raises(InvalidRequestError, match=r"BannedTokens: pass what its bind\(\) returns"):
        admit(unbound, LIMITS, 0.0)


@pytest.mark.parametrize("priority", [-1, 101, 1.0, "high", True, [1, 2]])
def test_a_retention_priority_that_is_none_is_refused(priority):
    with pytest.raises(InvalidRequestError, match="retention_priority"):
        admit(InferenceRequest.from_tokens(1, [1], 1, retention_priority=priority), LIMITS, 0.0)


def test_a_retention_priority_reaches_the_request_and_its_limits_are_named():
    def admitted(priority):
        request = InferenceRequest.from_tokens(1, [1], 1)
        request.retention_priority = priority
        return admit(request, LIMITS, 0.0).retention_priority

    assert [admitted(priority) for priority in (None, 0, 100, np.int8(7))] == [None, 0, 100, 7]
    with pytest.raises(
        InvalidRequestError, match=r"^retention_priority = 101 is outside 0\.\.100$"
    ):
        admitted(101)


@pytest.mark.parametrize("client_id", [-1, 2**64, 1.5, "me"])
def test_a_client_id_that_is_none_is_refused(client_id):
    with pytest.raises(InvalidRequestError, match="client_id"):
        admit(InferenceRequest.from_tokens(1, [1], 1, client_id=client_id), LIMITS, 0.0)


@pytest.mark.parametrize(
    "by_name",
    [
        {"temperature": -0.5},
        {"runtime_top_k": -1},
        {"runtime_top_p": 1.5},
        {"repetition_penalty": 0.0},
        {"random_seed": -1},
        {"min_length": -1},
        {"embedding_bias": [1.0]},
    ],
    ids=str,
)
def test_what_samples_wrong_is_an_incorrect_sampling_config(by_name):
    with pytest.raises(InvalidRequestError, match=f"^Incorrect sampling config: {[*by_name][0]}"):
        accept(**by_name)


def test_neutral_values_of_what_has_not_landed_are_taken():
    accept(len_penalty=1.5, early_stopping=1, num_return_sequences=1, input_lengths=[3])


@pytest.mark.parametrize(
    ("length", "kept"), [(1, ()), (3, (1, 2)), (4, (1, 2, 3)), (9, (1, 2, 3, 4))]
)
def test_drafts_are_cut_to_the_tokens_before_the_last(length, kept):
    admitted = accept(draft_input_ids=[1, 2, 3, 4], request_output_len=length)
    assert (admitted.drafts.tokens, admitted.num_draft_tokens) == (kept, len(kept))
    repeats = request(input_ids=[9, 1, 2, 3, 4, 9], request_output_len=length)
    lookup = dataclasses.replace(LIMITS, lookup=PromptLookup(min_ngram=1))
    admitted = admit(repeats, lookup, now=0.0)
    admitted.propose_drafts()
    assert (admitted.drafts.tokens, admitted.num_draft_tokens) == (kept, len(kept))


def test_what_changes_the_logits_is_read():
    bias = np.zeros((1, 100))
    bias[0, [3, 99]] = -np.inf, 0.1
    sampling = accept(
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=torch.tensor([0.25]),
        noRepeatNgramSize=[3],
        bad_words_list=[[[5, 7, 3, 9, 2], [3, 5, -1, -1, -1]]],
        embedding_bias=bias,
        min_length=2,
        end_id=5,
    ).sampling
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.5, -1.0)
    assert (sampling.frequency_penalty, sampling.no_repeat_ngram_size) == (0.25, 3)
    assert sampling.bad_words == ((5, 7, 3), (9, 2))
    assert (sampling.min_length, sampling.end_ids, sampling.greedy) == (2, (5,), True)
    assert sampling.embedding_bias == token_bias([3, 99], [-np.inf, 0.1])


def test_outputs_in_addition_to_tokens():
    assert not accept().has_extras
    for wanted in ("log_probs", "generation_logits", "context_logits"):
        assert accept(**{f"return_{wanted}": True}).has_extras
    assert accept(num_top_log_probs=1).has_extras and accept(num_prompt_log_probs=0).has_extras
    assert accept(return_log_probs=[True]).output.config == OutputConfig(log_probs=True)
    assert accept(return_context_logits=1).output.config == OutputConfig(context_logits=True)
    flags = {"gather_context_logits": True, "gather_generation_logits": True}
    limits = dataclasses.replace(LIMITS, **flags, normalize_log_probs=False)
    wanted = admit(request(return_generation_logits=False), limits, 0.0).output.config
    assert wanted == OutputConfig(False, False, True, True)


def test_new_tokens_beyond_max_seq_len_are_clamped_with_a_warning(caplog):
    caplog.set_level(logging.WARNING, logger="gptmanager")
    assert accept(input_ids=[1] * 20, request_output_len=13).max_new_tokens == 12
    assert "request_output_len = 13 lowered to 12" in caplog.text
    assert "max_seq_len = 32" in caplog.text


def test_a_prompt_that_an_empty_cache_cannot_hold_is_refused_with_numbers():
    limits = Limits(100, 13, 12, num_blocks=4, tokens_per_block=4, pool_limited=True)
    with pytest.raises(CapacityError, match=r"Prompt length \(16\).*needs 5.*blocks.*has 4\."):
        admit(request(input_ids=[1] * 16), limits, 0.0)
    with pytest.raises(CapacityError, match=r"Prompt length \(13\).* 4 KV.* at most 13 tokens"):
        admit(request(input_ids=[1] * 13), limits, 0.0)


def test_an_evicting_policy_without_chunks_limits_the_whole_run():
    limits = Limits(100, 32, 20, num_blocks=16, tokens_per_block=4, max_run_len=20)
    admit(request(input_ids=[1] * 10, request_output_len=11), limits, 0.0)
    with pytest.raises(
        InvalidRequestError, match="^Request sequence length is potentially greater"
    ):
        admit(request(input_ids=[1] * 10, request_output_len=12), limits, 0.0)


@pytest.mark.parametrize(
    ("by_name", "greedy"),
    [
        ({}, True),
        ({"random_seed": 3}, True),
        ({"runtime_top_k": 1, "temperature": 2.0}, True),
        ({"runtime_top_p": 0.0, "temperature": 2.0}, True),
        ({"temperature": 0.0, "runtime_top_k": 5}, True),
        ({"temperature": 1.0}, False),
        ({"temperature": 1}, False),
        ({"runtime_top_k": 0}, False),
        ({"runtime_top_k": 5}, False),
        ({"runtime_top_p": 0.9}, False),
        ({"runtime_min_p": 0.1}, False),
    ],
)
def test_when_sampling_is_greedy(by_name, greedy):
    assert accept(**by_name).sampling.greedy is greedy


def test_defaults():
    admitted = accept()
    assert not admitted.end_rule.end_ids and admitted.output.pad_id == 0
    assert admitted.sampling.top_k == 0 and admitted.sampling.top_p == 1.0
    assert admitted.sampling.seed == derive_seed(7, 1)
    assert accept(end_id=5).output.pad_id == 5
    assert accept(end_id=5, pad_id=9).output.pad_id == 9
    assert accept(random_seed=np.uint64(2**64 - 1)).sampling.seed == 2**64 - 1
    for client_id in (None, 0, 2**64 - 1):
        given = InferenceRequest.from_tokens(1, [1], 1, client_id=client_id)
        assert admit(given, LIMITS, 0.0).client_id == client_id


def test_derived_seeds_differ_by_request_and_by_manager():
    seeds = {derive_seed(manager, request) for manager in range(10) for request in range(100)}
    assert len(seeds) == 1000 and all(0 <= seed < 2**64 for seed in seeds)


def test_derived_seeds_are_the_numbers_of_splitmix64():
    """A seed of the journal's file leads to the same tokens on every version and machine."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [derive_seed(1234567, number) for number in range(3)] == published


def test_word_lists_in_both_shapes():
    words = [[5, 7, 3], [9, 2]]
    encoded = InferenceRequest.from_tokens(1, [1], 1, stop_words_list=words).stop_words_list
    assert encoded.tolist() == [[[5, 7, 3, 9, 2], [3, 5, -1, -1, -1]]]
    for shape in (encoded, encoded[0], torch.from_numpy(encoded)):
        stop_words = accept_tensor(stop_words_list=shape).end_rule.stop_words
        state = 0
        for token in (9, 5, 7):
            state, matched = stop_words.advance(state, token)
            assert not matched
        assert stop_words.advance(state, 3)[1] == 3


def accept_tensor(**tensors):
    return admit(
        InferenceRequest(1, {"input_ids": [1], "request_output_len": 1, **tensors}), LIMITS, 0.0
    )


def test_an_empty_word_list_stops_nothing():
    assert accept(stop_words_list=np.zeros((1, 2, 0), dtype=np.int32)).end_rule.stop_words is None


def test_properties_and_aliases_set_the_same_tensors():
    by_property = InferenceRequest(1)
    by_property.input_ids = np.array([1])
    by_property.max_new_tokens = 3
    by_property.length_penalty = 1.0
    assert set(by_property.tensors) == {"input_ids", "request_output_len", "len_penalty"}
    assert by_property.request_output_len == by_property.max_new_tokens == 3
    assert admit(by_property, LIMITS, 0.0).max_new_tokens == 3
    with pytest.raises(AttributeError, match="Undefined tensor: temperature"):
        _ = by_property.temperature
    with pytest.raises(AttributeError, match="no property 'colour'"):
        by_property.colour = 1
    with pytest.raises(TypeError, match="colour"):
        InferenceRequest(1, colour=1)
    with pytest.raises(AttributeError, match="no property 'colour'"):
        InferenceRequest.from_tokens(1, [1], 1, colour=1)


@pytest.mark.parametrize(
    ("bad", "error"), [(-1, ValueError), (2**64, ValueError), ("1", TypeError)]
)
def test_an_impossible_id_raises_in_the_hosts_line(bad, error):
    with pytest.raises(error):
        InferenceRequest(bad)
    assert InferenceRequest(2**64 - 1).request_id == 2**64 - 1
    assert InferenceRequest(0).request_id == 0


numbers = st.integers(-(2**70), 2**70) | st.floats() | st.booleans()
values = (
    st.none()
    | numbers
    | st.text(max_size=3)
    | st.lists(numbers, max_size=4)
    | st.lists(st.lists(st.integers(-5, 300), max_size=3), max_size=3)
    | st.builds(np.array, st.lists(st.integers(-5, 120), max_size=6))
    | st.builds(torch.tensor, st.lists(st.floats(width=32), max_size=3))
    | st.builds(object)
)
names = st.sampled_from(
    [
        *("input_ids", "request_output_len", "beam_width", "end_id", "pad_id", "temperature"),
        *("stop_words_list", "runtime_top_k", "runtime_top_p", "runtime_min_p", "random_seed"),
        *("min_length", "repetition_penalty", "return_log_probs", "embedding_bias", "nonsense"),
        *("include_stop_in_output", "lora_weights", "input_lengths", "early_stopping"),
    ]
)


@given(st.dictionaries(names, values, max_size=4))
def test_whatever_a_host_sends_is_accepted_or_refused_by_a_request_error(tensors):
    mutated = request()
    mutated.tensors.update(tensors)
    try:
        admitted = admit(mutated, LIMITS, 0.0)
    except RequestError as error:
        assert str(error)
    else:
        assert 1 <= len(admitted.tokens) <= 20 and admitted.max_new_tokens >= 1


@pytest.mark.parametrize(
    ("by_name", "text"),
    [
        ({"stop_words_list": [[5], []]}, "end offsets"),
        ({"stop_words_list": [[2**40]]}, "stop_words_list"),
        ({"stop_words_list": [5, 6]}, "stop_words_list"),
        ({"stop_words_list": 5}, "stop_words_list"),
        ({"temperature": object()}, "temperature"),
        ({"temperature": [[1.0], [1.0, 2.0]]}, "temperature cannot become a tensor"),
    ],
)
def test_plain_values_are_answered_at_admission_too(by_name, text):
    sent = InferenceRequest.from_tokens(1, [1], 1, **by_name)
    with pytest.raises(InvalidRequestError, match=text):
        admit(sent, LIMITS, 0.0)


def test_from_tokens_takes_none_for_not_given_and_no_unknown_keyword():
    assert accept_tensor().sampling.greedy
    sent = InferenceRequest.from_tokens(1, [1], 1, temperature=None)
    assert "temperature" not in sent.tensors
    with pytest.raises(AttributeError, match="nonsense"):
        InferenceRequest.from_tokens(1, [1], 1, nonsense=None)


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(1, device="meta"),
        torch.eye(2).to_sparse(),
        torch.tensor([1 + 1j]).conj(),
    ],
    ids=["meta", "sparse", "conj"],
)
def test_tensors_that_cannot_be_read_name_their_field(value):
    with pytest.raises(InvalidRequestError, match="temperature"):
        accept_tensor(temperature=value)


def test_the_dtype_that_is_named_is_the_hosts():
    with pytest.raises(InvalidRequestError, match="input_ids has dtype torch.bfloat16"):
        admit(
            InferenceRequest(
                1, {"input_ids": torch.ones(3, dtype=torch.bfloat16), "request_output_len": 1}
            ),
            LIMITS,
            0.0,
        )


@pytest.mark.parametrize("endless", [None, float("inf"), np.float32("inf")])
def test_an_endless_deadline_is_none(endless):
    timed = InferenceRequest.from_tokens(1, [1], 2, deadline_s=endless, queue_timeout_s=endless)
    assert not admit(timed, LIMITS, now=0.0).times.is_limited
    for name in ("deadline_s", "queue_timeout_s"):
        for wrong in (float("nan"), -float("inf")):
            with pytest.raises(InvalidRequestError, match=f"{name} = .* is not finite"):
                admit(InferenceRequest.from_tokens(1, [1], 2, **{name: wrong}), LIMITS, now=0.0)
