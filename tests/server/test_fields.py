"""Fields of bodies: what is read, what is refused with which words, and how it is described."""

import re

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gptmanager.server.errors import ApiError
from gptmanager.server.fields import (
    Field,
    Flag,
    Integer,
    ListOf,
    Number,
    Object,
    OneOf,
    Text,
    TextOrTexts,
    by_name,
    object_schema,
    outside_quotes,
    read_fields,
)
from gptmanager.server.openai.completions import FIELDS
from gptmanager.server.text.generation_fields import EarlyStopping, TokenBias

KINDS = {
    "number": Number(-1, 2),
    "open number": Number(-1.5, 2, excludes_low=True),
    "integer": Integer(0, 5),
    "flag": Flag(),
    "text": Text(1, 4),
    "one of": OneOf(("a", "b")),
    "list": ListOf(Integer(0, 9), 1, 3),
    "texts": TextOrTexts(2),
    "object": Object(by_name([Field("a", Flag()), Field("b", Integer(0), required=True)])),
    "bias": TokenBias(),
    "early": EarlyStopping(),
}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 12)
    | st.sampled_from([-1.5, 0.25, 1.75])
    | st.sampled_from(["", "a", "b", "7", "never", "long text"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["a", "b", "7"]), inner, max_size=2)
    ),
    max_leaves=5,
)


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("x: 'x' and \"x'x\" x", "y: 'x' and \"x'x\" y"),
        (r"""x 'it\'s x' x""", r"""y 'it\'s x' y"""),
        ("the 1's x, the 2's x", "the 1's y, the 2's y"),
    ],
)
def test_quoted_values_stay_as_they_are(text, changed):
    assert outside_quotes(text, lambda part: part.replace("x", "y")) == changed


@pytest.mark.parametrize("kind", KINDS)
@given(value=JSON.filter(lambda value: value is not None))
@example(value=-1.5)  # the low limits of both numbers
@example(value=-1)
def test_a_kind_takes_what_its_schema_describes(kind, value):
    fields = {"x": Field("x", KINDS[kind])}
    schema = object_schema(fields)
    is_described = jsonschema.Draft202012Validator(schema).is_valid({"x": value})
    try:
        read_fields({"x": value}, fields)
    except ApiError as error:
        assert not is_described, error.message
        assert error.status == 400 and error.param.startswith("x")
    else:
        assert is_described


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "prompt is missing"),
        ({"prompt": None}, "prompt is missing"),
        ({"prompt": "x", "top_p": 1.5}, "top_p = 1.5 is outside 0 to 1"),
        ({"prompt": "x", "deadline_s": 0}, "deadline_s = 0 must be more than 0"),
        ({"prompt": "x", "deadline_s": -1}, "deadline_s = -1 is outside 0 to 1e+09"),
        ({"prompt": "x", "top_k": -2}, "top_k = -2 is outside -1 to 2147483647"),
        ({"prompt": "x", "n": True}, "n must be an integer, got True"),
        ({"prompt": "x", "max_tokens": 1e300}, "max_tokens = 1e+300 is not exact"),
        ({"prompt": "x", "temperature": float("inf")}, "temperature must be a number, got inf"),
        ({"prompt": "x", "stop": [""]}, "stop[0] has 0 characters, and needs at least 1"),
        ({"prompt": "x", "stop": ["a"] * 65}, "stop has 65 items, at most 64 are allowed"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "the key 'a' must be a token id"),
        (
            {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(2**16 + 1)), 1)},
            "logit_bias has 65537 tokens, at most 65536 are allowed",
        ),
        (
            {"prompt": "x", "stream_options": {"include_usage": 1}},
            "stream_options.include_usage must be true or false, got 1",
        ),
        (
            {"prompt": "x", "colour": "red"},
            "'colour' is an unknown field; a server started with --l",
        ),
        (
            {"prompt": "x", "max_token": 3},
            "'max_token' is an unknown field; a server started with --lenient ignores it "
            "(did you mean 'max_tokens'?)",
        ),
        ({"prompt": "x", "n_predict": 3}, "(did you mean 'max_tokens'?)"),
        ({"prompt": "x", "stop_sequences": []}, "(did you mean 'stop'?)"),
        ({"prompt": "x", "messages": []}, "(did you mean 'prompt'?)"),
        ({"prompt": "x", "max_tokens": -2}, "max_tokens = -2 must be at least 0"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens must be an integer, got True"),
        ({"prompt": [[1], None]}, "prompt[1] = None must be a string or token ids"),
        (
            {"prompt": "x", "stop_token_ids": [3, 2**31]},
            "stop_token_ids[1] = 2147483648 is outside",
        ),
        (
            {"prompt": "x", "stop_token_ids": [3, True]},
            "stop_token_ids[1] must be an integer, got True",
        ),
        ({"prompt": []}, "prompt = [] must be a string, token ids"),
    ],
)
def test_refusals_name_field_value_and_limit(body, message):
    with pytest.raises(ApiError) as refused:
        read_fields(body, FIELDS)
    assert message in refused.value.message


def test_a_whole_number_is_an_integer_however_it_is_written():
    assert Integer(0, 9).read("x", 5.0) == 5
    with pytest.raises(ApiError, match="must be an integer, got 5.5"):
        Integer(0, 9).read("x", 5.5)


def test_an_empty_stop_is_none_and_no_limit_is_one():
    given, _ = read_fields({"prompt": "x", "stop": "", "max_tokens": -1.0}, FIELDS)
    assert given == {"prompt": ["x"], "stop": [], "max_tokens": -1}


def test_numbers_may_be_strings_if_this_is_lenient():
    texts = {"temperature": "0.7", "max_tokens": "5", "echo": "True", "n": " 2", "stop": "1"}
    values = {"temperature": 0.7, "max_tokens": 5, "echo": True, "n": 2, "stop": ["1"]}
    body = {"prompt": "x", **texts}
    assert read_fields(body, FIELDS, lenient=True) == ({"prompt": ["x"], **values}, [])
    for name, text, message in (
        ("temperature", "x", "temperature must be a number, got 'x'"),
        ("temperature", "1e999", "temperature must be a number, got inf"),
        ("temperature", "0." + "1" * 63, "temperature must be a number, got '0.1"),
        ("n", "0.5", "n must be an integer, got 0.5"),
        ("n", "\f2", "n must be an integer, got '\\x0c2'"),
        ("max_tokens", "-5", "max_tokens = -5 must be at least 0"),
        ("max_tokens", str(2**64), "max_tokens = 1.8446744073709552e+19 is not exact"),
        ("logit_bias", "{}", "logit_bias must be an object, got '{}'"),
    ):
        with pytest.raises(ApiError, match=re.escape(message)):
            read_fields({"prompt": "x", name: text}, FIELDS, lenient=True)
    with pytest.raises(ApiError, match="temperature must be a number, got '0.7'"):
        read_fields({"prompt": "x", "temperature": "0.7"}, FIELDS)


def test_null_is_absent_and_unknown_fields_may_be_a_warning():
    given, unknown = read_fields({"prompt": "x", "n": None, "y": 1}, FIELDS, lenient=True)
    assert given == {"prompt": ["x"]} and unknown == ["y"]
    assert read_fields({"prompt": "x", "y": None}, FIELDS) == ({"prompt": ["x"]}, [])
