"""What is no integer, or too large a one, is refused by name, value and limit, in whatever form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gptmanager import InferenceRequest, word_list
from gptmanager.callbacks import AllowedTokens, BannedTokens, ForcedPrefix
from gptmanager.errors import InvalidRequestError
from gptmanager.loop.admission import admit
from gptmanager.loop.limits import Limits

LIMITS = Limits(
    vocab_size=100,
    max_seq_len=32,
    max_input_len=20,
    num_blocks=16,
    tokens_per_block=4,
    max_beam_width=4,
    hidden_size=3,
)
HUGE = [2**31, 2**40, 2**63, 2**64, 2**70, -(2**31) - 1, -(2**63) - 1]
INTEGERS = (
    *("request_output_len", "beam_width", "end_id", "pad_id", "runtime_top_k", "min_length"),
    *("early_stopping", "noRepeatNgramSize", "num_return_sequences", "random_seed"),
)
LISTS = ("input_ids", "draft_input_ids")


def forms(value):
    """The same number in every form in which a host may give it."""
    found = [value, [value], [[value]], (value,), np.array(value, dtype=object)]
    found += [np.array([value], dtype=object)]
    for dtype in (np.int64, np.uint64):
        if np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
            found += [dtype(value), np.array(value, dtype), np.array([[value]], dtype)]
            found += [torch.from_numpy(np.array([value], dtype)), [dtype(value)]]
    return found


def refusal(from_tokens=None, **tensors):
    """The text for a request that is given them as they are, or by `from_tokens`."""
    if from_tokens:
        given = {"input_ids": [1], "max_new_tokens": 2, **tensors}
        if "request_output_len" in given:
            given["max_new_tokens"] = given.pop("request_output_len")
        request = InferenceRequest.from_tokens(1, **given)
    else:
        request = InferenceRequest(1, {"input_ids": [1], "request_output_len": 2, **tensors})
    with pytest.raises(InvalidRequestError) as raised:
        admit(request, LIMITS, 0.0)
    return str(raised.value)


@pytest.mark.parametrize("from_tokens", [False, True])
@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("name", INTEGERS)
def test_an_integer_out_of_range_is_named_with_its_limit(name, value, from_tokens):
    if name == "random_seed" and 0 <= value < 2**64:
        return
    for form in forms(value):
        text = refusal(from_tokens, **{name: form})
        assert f"{name} = {value} is outside " in text and ".." in text


@pytest.mark.parametrize("from_tokens", [False, True])
@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("name", LISTS)
def test_a_token_out_of_range_is_named_with_the_vocabulary(name, value, from_tokens):
    for form in [*forms(value)[1:4], [5, value], [5, value, 2**63]]:
        text = refusal(from_tokens, **{name: form})
        assert f"] = {value} is outside the vocabulary of 100 tokens" in text, text
        assert text.startswith(f"{name}[")


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("name", ["stop_words_list", "bad_words_list"])
def test_a_word_out_of_range_is_named_with_the_vocabulary(name, value):
    for words in ([[value]], [[5], [1, value]], [[value], [2**63]]):
        text = refusal(True, **{name: words})
        assert f"{name}[" in text
        assert f"] = {value} is outside the vocabulary of 100 tokens" in text, text


@pytest.mark.parametrize("value", [2**64, 2**70, -1])
def test_a_client_id_out_of_range_is_named(value):
    for form in [value, np.array(value, dtype=object)]:
        request = InferenceRequest.from_tokens(1, [1], 2, client_id=form)
        with pytest.raises(InvalidRequestError, match=f"client_id = {value} is outside 0..1844674"):
            admit(request, LIMITS, 0.0)


@pytest.mark.parametrize("odd", [4.9, 4.0, True, np.bool_(True), "42", "x", None, 1j, b"4"])
@pytest.mark.parametrize("from_tokens", [False, True])
@pytest.mark.parametrize("name", LISTS)
def test_other_values_are_never_converted_to_integers(name, from_tokens, odd):
    for ids in ([odd], [5, odd], (5, odd), [[5, odd]]):
        text = refusal(from_tokens, **{name: ids})
        assert text.startswith(name) and ("is not an integer" in text or "has dtype" in text)
    assert f"{name}[1] = " in refusal(False, **{name: [5, odd]})


def test_mixed_lists_say_which_element_it_is():
    assert refusal(True, input_ids=[5, True]) == "input_ids[1] = True is not an integer"
    assert refusal(True, input_ids=[[5, None]]) == "input_ids[0][1] = None is not an integer"
    assert refusal(True, input_ids=[5, "42"]) == "input_ids[1] = '42' is not an integer"
    assert refusal(True, input_ids=[[1], [2, 3]]).startswith("input_ids cannot become a tensor")
    array = np.array([5, True, 6], dtype=object)
    assert refusal(input_ids=array) == "input_ids[1] = True is not an integer"
    assert refusal(input_ids=np.array(None, dtype=object)).startswith("input_ids has dtype object")
    assert "input_ids[1] = True" in refusal(True, input_ids=[5, torch.tensor(True)])
    text = "embedding_bias[1] = True is not a number"
    assert text in refusal(True, embedding_bias=[1.0, True, *[0.0] * 98])
    assert "temperature[0] = None is not a number" in refusal(temperature=[None])


@pytest.mark.parametrize(
    "odd", [4.9, 4.0, True, np.bool_(True), "42", None, np.float32(4), [4], b"4"]
)
@pytest.mark.parametrize("name", ["stop_words_list", "bad_words_list"])
def test_an_invalid_token_in_a_word_is_named(name, odd):
    for words in ([[odd]], [[5], [6, odd]], [[odd], [1]], ([5, odd],)):
        text = refusal(True, **{name: words})
        assert name in text and "Traceback" not in text
        if not isinstance(odd, list):
            assert f"] = {odd!r} is not an integer" in text, text
        with pytest.raises(TypeError, match=r"word \d is not a sequence of integers"):
            word_list(words)


@pytest.mark.parametrize("words", ["42", ["42"], [b"42"], [5, 6], 5, [None], [[5], None]])
def test_words_that_are_not_lists_are_refused_by_name(words):
    assert "stop_words_list" in refusal(True, stop_words_list=words)
    with pytest.raises(TypeError):
        word_list(words)


def test_integers_of_any_kind_make_words():
    words = [np.array([5, 7], dtype=np.uint8), (np.int64(3), torch.tensor(9)), range(2)]
    assert word_list(words).tolist() == [[[5, 7, 3, 9, 0, 1], [2, 4, 6, -1, -1, -1]]]
    assert word_list(words).dtype == np.int32


def test_large_numbers_are_floats_where_floats_are_taken():
    request = InferenceRequest.from_tokens(1, [1], 2, presence_penalty=2**70, deadline_s=2**70)
    assert admit(request, LIMITS, 0.0).sampling.presence_penalty == 2.0**70
    assert "presence_penalty" in refusal(presence_penalty=10**400)
    assert "presence_penalty = 1e+300 must be" in refusal(presence_penalty=10**300)


@pytest.mark.parametrize("processor", [AllowedTokens(), BannedTokens(), ForcedPrefix()])
def test_processors_take_integers_only(processor):
    for odd in (True, 4.0, "4", np.bool_(True)):
        with pytest.raises(TypeError):
            processor.bind([5, odd])
    for bad in (-1, 2**31, 2**70):
        with pytest.raises(ValueError, match=str(bad)):
            processor.bind([5, bad])
