"""What is checked before it is read: numbers of items, sizes, bytes; and the memory it takes."""

import gzip
import logging
import tracemalloc
from types import SimpleNamespace

import hypothesis
import numpy as np
import orjson
import pytest
import tritonclient.grpc as grpcclient
from counted import Counted
from hypothesis import strategies as st
from triton_calls import message_of, prompt
from tritonclient.utils import InferenceServerException

from gptmanager.callbacks.processors.banned_texts import MAX_WORD_LETTERS
from gptmanager.lifecycle.log import RareWarnings
from gptmanager.server.errors import ApiError
from gptmanager.server.http import json_text
from gptmanager.server.http.json_text import (
    MAX_CONTAINERS,
    MAX_JSON_BYTES,
    MAX_VALUES,
    parse_json,
)
from gptmanager.server.triton import http_messages, token_model
from gptmanager.server.triton.datatypes import from_bytes, from_values
from gptmanager.server.triton.grpc_messages import read_request
from gptmanager.server.triton.inference import sizes_of
from gptmanager.server.triton.tensors import InputReader, Sizes, input_table
from gptmanager.server.triton.text_model import BLS_INPUTS
from gptmanager.server.triton.token_model import INPUTS, OUTPUTS
from gptmanager.server.triton.wire import MAX_CONTENTS, MAX_FIELDS, MAX_SMALL, wire_problem

pb = grpcclient.service_pb2
MANY = 10**6
SIZES = Sizes(rows=8, prompt=63, vocabulary=640, hidden=128, adapter_rows=32, adapter_width=4096)
TOKENS = InputReader("tensorrt_llm", INPUTS, SIZES)
TEXTS = InputReader("ensemble", BLS_INPUTS, SIZES)
MODEL = SimpleNamespace(name="tensorrt_llm", inputs=INPUTS, outputs=OUTPUTS, reader=TOKENS)
HUGE, EMPTY_TEXTS = ["a"] * MANY, b"\0\0\0\0" * MANY
VARIABLE = [
    (reader, name)
    for reader in (TOKENS, TEXTS)
    for name, spec in reader.specs.items()
    if -1 in spec.dims
]


@pytest.fixture
def little_memory():
    """Far less than anything that is made of a million items."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def refused(work, *given, **by_name):
    with pytest.raises(ApiError) as error:
        work(*given, **by_name)
    assert error.value.status in (400, 413)
    return error.value.message


@pytest.mark.parametrize("reader, name", VARIABLE)
def test_no_dimension_is_without_a_limit(reader, name, little_memory):
    spec = reader.specs[name]
    shape = [1, *(1 if size < 0 else size for size in spec.dims)]
    limits = [SIZES.rows, *spec.limits(SIZES)]
    for axis, size in enumerate([-1, *spec.dims]):
        for given in (MANY, 2**31 - 1, 2**63 - 1, -1):
            wrong = [given if index == axis else size for index, size in enumerate(shape)]
            told = refused(reader.check, name, spec.datatype, wrong)
            assert str(given) in told
        if size == -1:
            largest = [limits[axis] if index == axis else it for index, it in enumerate(shape)]
            reader.check(name, spec.datatype, largest)


def test_an_input_without_a_limit_cannot_be_declared():
    for most in ((), ("rows",) * 2, ("nothing",)):
        with pytest.raises(ValueError, match="input new: each -1"):
            input_table(("new", "INT32", (-1,), True, False, most))


@pytest.mark.parametrize("name", ["stop_words", "bad_words", "embedding_bias_words"])
def test_a_long_list_in_json_is_not_read(name, little_memory):
    told = refused(TEXTS.shape_of, name, HUGE)
    assert f"'{name}'" in told and "1000000" in told


def test_more_elements_than_the_shape_says_are_not_read(little_memory):
    for values in (HUGE, [HUGE], [HUGE[:1], HUGE]):
        assert "expected 2 by its shape" in refused(from_values, "x", "BYTES", (1, 2), values)


@pytest.mark.parametrize("shape", [(0,), (1, 0), (0, 3), (2, 0)])
def test_a_shape_with_a_zero_expects_no_element(shape):
    for values in ([1] * 9, [[1] * 9], [[1] * 4, [1] * 4], [1], [[1]]):
        told = refused(from_values, "x", "INT32", shape, values)
        assert told.endswith(" elements, expected 0 by its shape")
    empty = from_values("x", "INT32", shape, [[]] * shape[0])
    assert empty.shape == shape


def test_a_long_prompt_gets_the_words_of_the_contract():
    told = "Prompt length (1000000) exceeds maximum input length (63)."
    assert refused(TOKENS.check, "input_ids", "INT32", [1, MANY]) == told
    assert refused(TOKENS.shape_of, "input_ids", [0] * MANY) == told


def test_a_bytes_tensor_is_split_as_far_as_its_shape_goes(little_memory):
    assert "expected 3" in refused(from_bytes, "x", "BYTES", (1, 3), EMPTY_TEXTS)


@pytest.mark.parametrize("key", ["inputs", "outputs"])
def test_tensors_of_a_call_are_counted_first(key, monkeypatch):
    many = Counted([{"name": "input_ids"}] * MANY)
    body = {"inputs": [], key: many}
    monkeypatch.setattr(http_messages, "parse_json", lambda text: body)
    told = refused(http_messages.read_request, b"", None, MODEL)
    assert told.startswith("1000000 ") and many.num_read == 0


def test_a_shape_of_many_dimensions_is_not_read(monkeypatch):
    shape = Counted([1] * MANY)
    body = {"inputs": [{"name": "input_ids", "datatype": "INT32", "shape": shape, "data": []}]}
    monkeypatch.setattr(http_messages, "parse_json", lambda text: body)
    assert "at most 8" in refused(http_messages.read_request, b"", None, MODEL)
    assert shape.num_read < 300  # only the part that the error shows


class Message:
    """Replaces a ModelInferRequest. Its fields may have any value."""

    model_name, model_version, id = "tensorrt_llm", "", "x"

    def __init__(self, **parts):
        self.inputs, self.outputs, self.raw_input_contents = (), (), ()
        self.parameters = {}
        self.__dict__.update(parts)


def test_parts_of_a_message_are_counted_first():
    for parts in ({"inputs": Counted([None] * MANY)}, {"outputs": Counted([None] * MANY)}):
        told = refused(read_request, Message(**parts), MODEL, may_have_many=False)
        assert told.startswith("1000000 ")
        assert all(part.num_read == 0 for part in parts.values())
    TOKENS.check_number(len(INPUTS))  # a call may have every input


def test_typed_contents_are_counted_first():
    values = Counted([1] * MANY)
    contents = SimpleNamespace(int_contents=values)
    tensor = SimpleNamespace(
        name="end_id", datatype="INT32", shape=[1, 1], parameters={}, contents=contents
    )
    told = refused(read_request, Message(inputs=[tensor]), MODEL, may_have_many=False)
    assert told == "input 'end_id' has 1000000 elements, expected 1 by its shape"
    assert values.num_read == 0


def test_parameters_without_effect_are_not_read():
    call = message_of(**prompt(9, 30, 71))
    for index in range(1000):
        call.parameters[f"other{index}"].string_param = "x"
    call.parameters["priority"].int64_param = 3
    assert read_request(call, MODEL, may_have_many=False).parameters == {"priority": 3}


# Bytes of messages ----------------------------------------------------------------------------


def filled(**parts):
    call = message_of(**prompt(9, 30, 71))
    call.MergeFrom(pb.ModelInferRequest(**parts))
    return call.SerializeToString()


def tensor(**parts):
    return pb.ModelInferRequest.InferInputTensor(**parts)


@pytest.mark.parametrize(
    "message, told",
    [
        (filled(inputs=[tensor()] * MAX_FIELDS), f"more than {MAX_FIELDS} fields"),
        (filled(raw_input_contents=[b""] * MAX_FIELDS), f"more than {MAX_FIELDS} fields"),
        (
            filled(outputs=[pb.ModelInferRequest.InferRequestedOutputTensor()] * MAX_FIELDS),
            f"more than {MAX_FIELDS} fields",
        ),
        (
            filled(inputs=[tensor(parameters={str(i): pb.InferParameter() for i in range(5000)})]),
            f"more than {MAX_FIELDS} fields",
        ),
        (filled(id="x" * (MAX_SMALL + 1)), f"has {MAX_SMALL + 1} bytes, at most {MAX_SMALL}"),
        (
            b"\x78\x01\x79" + bytes(8) + b"\x7d\xff\xff\xff\xff" + filled(id="x" * (MAX_SMALL + 1)),
            f"has {MAX_SMALL + 1} bytes",
        ),
        (filled(inputs=[tensor(name="x" * (MAX_SMALL + 1))]), f"has {MAX_SMALL + 1} bytes"),
        (filled(inputs=[tensor(shape=[1] * (MAX_SMALL + 1))]), f"has {MAX_SMALL + 1} bytes"),
        (
            filled(
                inputs=[tensor(contents=pb.InferTensorContents(uint64_contents=[1] * MAX_CONTENTS))]
            ),
            f"more than {MAX_CONTENTS} bytes: send large tensors as raw_input_contents",
        ),
    ],
    ids=[
        "inputs",
        "raw",
        "outputs",
        "parameters",
        "id",
        "after others",
        "name",
        "shape",
        "contents",
    ],
)
def test_messages_that_would_take_much_more_memory_than_bytes(message, told, call_with):
    problem = wire_problem(message)
    assert problem is not None and told in problem
    assert call_with(message) == problem


@pytest.fixture(scope="module")
def call_with(front):
    """What a call with these bytes is told."""
    import grpc as grpc_package

    options = [("grpc.max_send_message_length", -1)]
    with grpc_package.insecure_channel(f"127.0.0.1:{front.port}", options) as channel:

        def call(message):
            with pytest.raises(grpc_package.RpcError) as error:
                channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(message)
            assert error.value.code() is grpc_package.StatusCode.INVALID_ARGUMENT
            return error.value.details()

        yield call


def test_large_tensors_and_bytes_of_any_kind_pass():
    assert wire_problem(filled(raw_input_contents=[b"\xff" * (1 << 24)])) is None
    whole = message_of(**prompt(9, 30, 71)).SerializeToString()
    assert wire_problem(whole) is None
    for at in range(len(whole)):  # what is no message is the parser's to refuse
        wire_problem(whole[:at] + b"\xff" + whole[at + 1 :])
        wire_problem(whole[:at])


# JSON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [b"[],", b"{},", b'{"a":[]},'], ids=str)
def test_json_of_many_lists_and_objects_is_not_parsed(part):
    """They would take thirty times their text, and the collector's time."""
    for count, told in ((MAX_CONTAINERS, "lists and objects, at most 65536"), (1000, None)):
        given = b"[" + part * count + b"0]"
        if told is None:
            assert parse_json(given) == orjson.loads(given)
        else:
            assert told in refused(parse_json, given)


def test_json_that_would_take_much_more_memory_than_text():
    assert "MiB of memory" in refused(parse_json, b"[" + b'"ab",' * 2_000_000 + b"0]")


def test_brackets_inside_texts_are_not_structure():
    for code in ('if x["a"] == [{}, {}]:\\n' * 100_000, "," * MAX_VALUES + '\\\\" [' * 1000):
        assert parse_json(orjson.dumps({"prompt": code})) == {"prompt": code}


def test_json_that_would_be_parsed_for_long_is_not():
    """Meanwhile no other thread runs: not the event loop's either."""
    assert "2097153 values, at most 2097152" in refused(parse_json, b"0," * MAX_VALUES + b"0")
    assert "send large tensors as binary" in refused(parse_json, b" " * (MAX_JSON_BYTES + 1))


@hypothesis.given(
    st.lists(st.sampled_from([b'"', b"\\", b"[", b"{", b",", b"a"]), max_size=40).map(b"".join)
)
def test_structure_is_counted_as_a_reader_of_letters_would(text):
    expected, at, is_inside = {"containers": 0, "quotes": 0, "commas": 0}, 0, False
    while at < len(text):
        letter = text[at : at + 1]
        if letter == b"\\" and text[at + 1 : at + 2] in (b"\\", b'"'):
            at += 2
            continue
        expected["quotes"] += letter == b'"'
        is_inside ^= letter == b'"'
        expected["containers"] += letter in (b"[", b"{") and not is_inside
        expected["commas"] += letter == b"," and not is_inside
        at += 1
    assert json_text._counts_outside_strings(text)._asdict() == expected


def test_the_memory_of_a_text_may_be_seven_times_its_size_and_48_mib():
    size = (1 << 20) + 40
    most = ((48 << 20) + 7 * size) // 40  # a comma counts as 40 bytes
    counts = json_text._Counts(0, 0, most)
    assert json_text._problem_of(counts, size) is None
    more = json_text._problem_of(counts._replace(commas=most + 1), size)
    assert more == f"would need about 55 MiB of memory, at most 55 MiB are allowed for {size} bytes"


def test_json_of_many_numbers_is_parsed():
    assert parse_json(b"[" + b"0," * MANY + b"0]") == [0] * (MANY + 1)
    assert refused(parse_json, b"[1").startswith("the body is not JSON")


def test_packed_bodies_unpack_to_a_multiple_of_what_was_sent():
    limit = 1 << 30
    bomb = gzip.compress(b"\0" * (32 << 20))
    assert len(bomb) < 1 << 16
    assert "decompresses to more than" in refused(http_messages.decompressed, bomb, "gzip", limit)
    fair = gzip.compress(np.random.default_rng(0).bytes(1 << 16) * 20)
    assert len(http_messages.decompressed(fair, "gzip", limit)) == 20 << 16


# Calls ----------------------------------------------------------------------------------------


def text(**given):
    return {"text_input": [b"Tom"], "max_tokens": 2, **given}


@pytest.mark.parametrize(
    "model, given, told",
    [
        (
            "tensorrt_llm",
            prompt(9, beam_width=2**31 - 1),
            "beam_width = 2147483647 is outside 1..4",
        ),
        ("ensemble", text(beam_width=2**31 - 1), "beam_width = 2147483647 is outside 1..4"),
        ("ensemble", text(beam_width=-1), "beam_width = -1 is outside 1..4"),
        ("ensemble", text(beam_width=2, num_return_sequences=3), "is outside 1..2, the beam_width"),
        (
            "ensemble",
            text(prompt_embedding_table=np.zeros((2, 128)), prompt_vocab_size=2**31 - 1),
            "prompt_vocab_size = 2147483647 is outside 1..2",
        ),
        (
            "ensemble",
            text(prompt_embedding_table=np.zeros((2, 128)), prompt_vocab_size=0),
            "prompt_vocab_size = 0 is outside 1..2",
        ),
        ("ensemble", text(bad_words=[b"a" * 257]), "bad_words[0] has 257 characters, at most 256"),
        ("ensemble", text(bad_words=[b"a" * 4000]), "bad_words[0] has 4000 bytes, at most 256"),
        ("ensemble", text(bad_words=[b"a" * 256] * 33), "bad_words: 8448 characters are"),
        ("ensemble", text(bad_words=[b"a"] * 1025), "at most [32, 1024], got [1, 1025]"),
        (
            "ensemble",
            text(stop_words=[b"a" * 70_000]),
            "stop_words[0] has 70000 characters, at most",
        ),
        (
            "ensemble",
            text(embedding_bias_words=[b"a"] * 1025, embedding_bias_weights=[0.0] * 1025),
            "at most [32, 1024], got [1, 1025]",
        ),
        (
            "ensemble",
            text(embedding_bias_words=[b"a" * 257], embedding_bias_weights=[0.0]),
            f"embedding_bias_words[0] has 257 characters, at most {MAX_WORD_LETTERS}",
        ),
    ],
    ids=str,
)
def test_what_is_too_much_is_refused_by_name(infer, model, given, told):
    with pytest.raises(InferenceServerException) as error:
        infer(model, **given)
    assert "INVALID_ARGUMENT" in error.value.status() and told in error.value.message()


def test_sequences_of_many_rows_are_counted(stream, server):
    """The number of sequences is checked before memory is allocated for them."""
    rows = {
        name: np.repeat([[value]], 32, 0)
        for name, value in prompt(9).items()
        if name != "input_ids"
    }
    rows["input_ids"] = np.full((32, 1), 9)
    stream.send(**{**rows, "num_return_sequences": np.full((32, 1), 128)})
    assert "makes 1152 requests" in str(stream.next().error)


def test_ids_are_short(grpc, stream):
    stream.send(id="x" * 1025, **prompt(9))
    assert "id has 1025 characters, at most 1024" in str(stream.next().error)
    stream.send(id="x" * 1024, **prompt(9, new=1))
    assert stream.next().error is None


def test_what_is_more_than_the_room_is_lowered_with_a_warning(infer, caplog, monkeypatch):
    monkeypatch.setattr(RareWarnings, "warning", lambda log, *told: log._logger.warning(*told))
    drafts = {"draft_input_ids": [5, 6]}
    with caplog.at_level(logging.WARNING):
        for given, length in (({}, 512), (drafts, 510)):
            arrays = infer(**prompt(*range(1, 501), new=2**31 - 1, **given))
            assert arrays["sequence_length"][0, 0] == length
    start = "request_output_len = 2147483647 lowered to"
    told = [text for text in caplog.messages if text.startswith(start)]
    end = "prompt of 500 tokens, max_seq_len = 512"
    assert told == [f"{start} 12: {end}", f"{start} 10: {end}"]


@pytest.mark.parametrize(
    "given, num_rows",
    [
        ({"return_context_logits": True}, 3),
        ({"return_generation_logits": True}, 5),
        ({"return_context_logits": True, "return_generation_logits": True}, 8),
        ({"return_generation_logits": True, "beam_width": 2}, 10),
        ({"return_context_logits": True, "beam_width": 2}, 3),
    ],
)
def test_logits_have_a_limit(infer, monkeypatch, given, num_rows):
    """They take four bytes for each token and each one of the vocabulary."""
    size = 4 * num_rows * 640
    monkeypatch.setattr(token_model, "MAX_LOGITS_BYTES", size - 1)
    with pytest.raises(InferenceServerException) as error:
        infer(**prompt(5, 6, 7, new=5, **given))
    assert (
        f"of {num_rows} tokens with a vocabulary of 640 have {size} bytes" in error.value.message()
    )
    assert error.value.message().startswith(next(iter(given)))
    monkeypatch.setattr(token_model, "MAX_LOGITS_BYTES", size)
    infer(**prompt(5, 6, 7, new=5, **given))


def test_a_text_without_room_gets_the_words_of_the_contract(infer):
    for length, told in ((600, "Prompt length ("), (10**6, "Prompt length (at least ")):
        with pytest.raises(InferenceServerException) as error:
            infer("ensemble", **text(text_input=[b"a " * length]))
        assert error.value.message().startswith(told)
        assert error.value.message().endswith(") exceeds maximum input length (511).")


def test_limits_are_those_of_the_model(server):
    sizes = sizes_of(server.engine, server.settings)
    assert (sizes.rows, sizes.prompt, sizes.vocabulary, sizes.hidden) == (32, 511, 640, 128)
    assert sizes.adapter_rows == 32 and sizes.adapter_width >= 64 * 256


@pytest.mark.parametrize("is_streaming", [False, True])
def test_calls_of_all_clients_together_have_a_limit(server, infer, stream, is_streaming):
    """Over gRPC a message counts until its call has ended, as its tensors are parts of it."""
    room = server.engine.body_budget
    given = prompt(5, 6, 7, new=2)
    left = room._left
    with room.reserved(left - 10):
        if is_streaming:
            stream.send(**given)
            told = str(stream.next().error)
        else:
            with pytest.raises(InferenceServerException) as error:
                infer(**given)
            assert error.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
            told = error.value.message()
        assert "the bodies that clients send at once would exceed 1073741824 bytes" in told
    infer(**given)
    assert room._left == left
