"""An intake of rank 0 comes to the other ranks as it was, whatever a host has put into it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from fuzz import FUZZ
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st
from odd_requests import hostile_values, processor
from rank_digests import OTHERS, SCHEDULE, digests
from rank_links import at_once, linked

from gptmanager import InferenceRequest, errors
from gptmanager.errors import RankError
from gptmanager.host.rank_messages import (
    IntakeMessage,
    Unpacker,
    pack,
    requests_digest,
    schedule_digest,
    stops_digest,
)
from gptmanager.peft_cache.work import AdapterDone
from gptmanager.ranks.links import Message
from gptmanager.request.inference_request import KEYWORDS, TENSORS
from gptmanager.step import Failure, Intake

IDS = st.integers(0, 2**64 - 1)
FLAT = st.sampled_from(
    ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
)
UNSIGNED = st.sampled_from(["uint16", "uint32", "uint64"])
SHAPES = numpy_st.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9)


@st.composite
def tensors(draw):
    """A NumPy array or torch tensor of any kind that a request may have."""
    is_torch = draw(st.booleans())
    dtype = draw(FLAT if is_torch else FLAT | UNSIGNED)
    array = draw(numpy_st.arrays(dtype, draw(SHAPES)))
    layout = draw(st.sampled_from(["plain", "transposed", "strided", "reversed", "expanded"]))
    if layout == "transposed":
        array = array.T
    elif layout == "strided" and array.ndim:
        array = array[::2]
    elif layout == "reversed" and array.ndim and not is_torch:
        array = array[::-1]
    elif layout == "expanded":
        array = np.broadcast_to(array, (draw(st.integers(0, 90)), *array.shape))
    if not is_torch:
        return array
    if layout == "expanded":
        base = torch.from_numpy(array[:1].copy())
        tensor = base.expand(array.shape) if len(array) else base[:0]
    elif layout == "transposed":
        tensor = torch.from_numpy(array.T.copy()).permute(list(reversed(range(array.ndim))))
    else:
        tensor = torch.from_numpy(array.copy())
    if tensor.is_floating_point():
        tensor = tensor.to(draw(st.sampled_from([tensor.dtype, torch.bfloat16])))
        tensor.requires_grad_(draw(st.booleans()))
    return tensor


@st.composite
def requests(draw):
    names = st.sampled_from(sorted(TENSORS))
    values = tensors() | st.integers(-(2**63), 2**64 - 1) | st.lists(st.integers(-9, 9), max_size=9)
    plain = draw(st.dictionaries(names, values, max_size=5))
    keywords = {
        "is_streaming": draw(st.booleans()),
        "client_id": draw(st.none() | IDS),
        "priority": draw(st.floats(allow_nan=False)),
        "deadline_s": draw(st.none() | st.floats(0, 1e9)),
        "cache_salt": draw(st.none() | st.text()),
    }
    return InferenceRequest(draw(IDS), plain, **keywords)


@st.composite
def turns(draw):
    ids = st.lists(IDS, max_size=3).map(tuple)
    texts = st.sampled_from(
        [
            errors.AdapterError("no such"),
            errors.CallbackError("SendResponse raised ValueError: x"),
            errors.StepError(""),
        ]
    )
    done = st.builds(AdapterDone, st.integers(0, 2**40), st.text(max_size=9), st.none() | texts)
    intake = Intake(
        draw(st.floats(allow_nan=False, allow_infinity=False)),
        tuple(draw(st.lists(requests(), max_size=3))),
        draw(st.frozensets(IDS, max_size=3)),
        draw(ids),
        tuple(draw(st.lists(st.builds(Failure, IDS, texts), max_size=2))),
        draw(st.booleans()),
        tuple(draw(st.lists(done, max_size=2))),
        draw(ids),
    )
    crc = st.integers(0, 2**32 - 1)
    return IntakeMessage(intake, draw(crc), draw(crc), draw(st.booleans()))


def told(value):
    """A value by what can be said of it: that of a tensor is kind, dtype, shape, and bytes."""
    if isinstance(value, torch.Tensor):
        dense = torch.empty(value.numel(), dtype=value.dtype).copy_(value.detach().reshape(-1))
        return "torch", value.dtype, value.shape, dense.view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return "numpy", value.dtype, value.shape, value.tobytes()
    if isinstance(value, InferenceRequest):
        keywords = {name: getattr(value, name) for name in KEYWORDS}
        found = dict(value.tensors)
        if isinstance(found.get("lora_weights"), list):
            found["lora_weights"] = np.asarray(found["lora_weights"])
        return value.request_id, keywords, {name: told(it) for name, it in found.items()}
    if isinstance(value, BaseException):
        return type(value), str(value)
    if isinstance(value, AdapterDone):
        return value.job, value.digest, told(value.error)
    if isinstance(value, Failure):
        return value.request_id, told(value.error)
    if isinstance(value, Intake):
        return [told(getattr(value, name)) for name in Intake.__slots__]
    if isinstance(value, (tuple, list)):
        return [told(item) for item in value]
    return value


@settings(max_examples=75 * FUZZ)
@given(turns())
def test_a_turn_comes_as_it_was(turn):
    data = pack(turn)
    assert told(Unpacker()(data)) == told(turn)
    ids = [request.request_id for request in turn.intake.requests]
    again = Unpacker()(data).intake.requests
    assert [request.request_id for request in again] == ids
    assert requests_digest(again) == requests_digest(turn.intake.requests)


def test_what_has_nothing_to_say_is_short():
    for clears, is_empty in [(False, False), (True, False), (False, True)]:
        turn = IntakeMessage(Intake(1.25, clears_cache=clears), 1, 2, is_empty)
        data = pack(turn)
        assert len(data) < 40
        assert Unpacker()(data) == turn
        full = replace(turn.intake, ready=(1,))
        assert Unpacker()(pack(turn._replace(intake=full))).intake.clears_cache is clears


@pytest.mark.parametrize("dtype", ["uint16", "float8_e4m3fn", "bfloat16"])
def test_tensors_of_unusual_dtypes_come_as_they_were(dtype):
    weights = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype))
    request = InferenceRequest(1, {"lora_weights": weights})
    turn = IntakeMessage(Intake(0.0, (request,)), 0, 0, False)
    assert told(Unpacker()(pack(turn))) == told(turn)


def test_weights_in_lists_come_as_an_array():
    request = InferenceRequest(1, {"lora_weights": [[0.5, 1.5], [2.5, 3.5]]})
    (again,) = Unpacker()(pack(IntakeMessage(Intake(0.0, (request,)), 0, 0, False))).intake.requests
    assert again.lora_weights.tolist() == request.lora_weights


@pytest.mark.parametrize("value", [np.zeros, torch.zeros])
def test_weights_of_an_adapter_come_whole(value):
    weights = value((3, 1 << 20))
    weights[1] = 2.5
    request = InferenceRequest(1, {"lora_weights": weights, "lora_config": value((0, 3))})
    request.tensors["draft_logits"] = value((0, 4))
    turn = IntakeMessage(Intake(0.0, (request,)), 0, 0, False)
    assert told(Unpacker()(pack(turn))) == told(turn)


@pytest.mark.slow
def test_an_adapter_of_200_megabytes_comes_in_an_intake():
    """And nobody is taken for dead meanwhile."""
    weights = np.arange(25_000_000, dtype=np.float64).reshape(5, -1)
    request = InferenceRequest.from_tokens(1, [1, 2], 5, lora_weights=weights)
    data = pack(IntakeMessage(Intake(1.0, (request,)), 0, 0, False))

    def exchanged(links):
        if links.rank == 0:
            links.send(Message.INTAKE, data)
            return links.receive(from_rank=1).payload
        (came,) = Unpacker()(links.receive().payload).intake.requests
        links.send(Message.RESULT, b"it came")
        return came

    with linked(2, timeout_s=5.0) as both:
        said, came = at_once(exchanged, both)
    assert said == b"it came"
    assert np.array_equal(came.lora_weights, weights) and came.input_ids.tolist() == [1, 2]
    came.lora_weights[0, 0] = 1.0  # it is the request's own
    assert came.input_ids.base is None  # and does not hold what came with it


@pytest.mark.filterwarnings("ignore")  # NumPy's, about conversions
def test_what_no_host_should_give_harms_no_other_request():
    """It is packed as what admission refuses."""
    chance, unpack = random.Random(1), Unpacker()
    good = InferenceRequest.from_tokens(2**63, list(range(100)), 5)
    for number in range(1500 * FUZZ):
        bad = InferenceRequest(number, {"input_ids": [1]})
        for _ in range(2):
            bad.tensors[chance.choice(sorted(TENSORS))] = hostile_values(chance)
        keyword = chance.choice(KEYWORDS)
        is_processor = keyword == "logits_post_processor"
        bad.__dict__[keyword] = (processor if is_processor else hostile_values)(chance)
        turn = IntakeMessage(Intake(0.0, (bad, good)), 0, 0, False)
        first, second = unpack(pack(turn)).intake.requests
        assert first.request_id == number
        assert told(second) == told(good)


@pytest.mark.filterwarnings("ignore")
def test_masked_and_matrix_are_arrays():
    values = [np.ma.masked_array([1, 2, 3], [0, 1, 0]), np.matrix([1, 2])]
    for value in values:
        request = InferenceRequest(1, {"input_ids": value})
        turn = IntakeMessage(Intake(0.0, (request,)), 0, 0, False)
        (again,) = Unpacker()(pack(turn)).intake.requests
        assert told(again.input_ids) == told(np.asarray(value))


SAMPLE = pack(
    IntakeMessage(
        Intake(
            1.5,
            (
                InferenceRequest.from_tokens(2**64 - 1, list(range(200)), 5),
                InferenceRequest(
                    3,
                    {
                        "lora_weights": torch.ones(4, 4),
                        "embedding_bias": np.ones(20),
                        "stop_words_list": object(),
                    },
                    client_id=4,
                ),
            ),
            frozenset({4}),
            failures=(Failure(3, errors.StepError("x")),),
            adapters=(AdapterDone(1, "a", errors.AdapterError("y")),),
        ),
        1,
        2,
        False,
    )
)


def read(data):
    """A message is a turn, or a RankError."""
    try:
        assert isinstance(Unpacker()(bytes(data)), IntakeMessage)
        return True
    except RankError as error:
        assert str(error).startswith("a message of rank 0 cannot be read: ")
        return False


def test_an_error_of_an_unknown_class_keeps_its_text():
    class Unknown(errors.AdapterError):
        """Such as that of a host."""

    failures = (Failure(3, Unknown("x")), Failure(4, errors.AdapterError("x")))
    message = Unpacker()(pack(IntakeMessage(Intake(0.0, failures=failures), 0, 0, False)))
    unknown, known = (it.error for it in message.intake.failures)
    assert str(unknown) == "Unknown: x"
    assert isinstance(known, errors.AdapterError) and str(known) == "x"


def test_a_message_that_is_cut_off_is_a_rank_error():
    assert read(SAMPLE)
    assert not any(read(SAMPLE[:end]) for end in range(len(SAMPLE)))
    bare = pack(IntakeMessage(Intake(0.0), 0, 0, False))
    assert not any(read(bare[:end]) for end in range(len(bare)))
    assert not read(bare + b"x")


@settings(max_examples=200 * FUZZ)
@given(
    st.lists(
        st.tuples(st.integers(0, len(SAMPLE) - 1), st.binary(max_size=3), st.integers(0, 3)),
        min_size=1,
        max_size=4,
    )
)
def test_a_mangled_message_is_a_turn_or_a_rank_error(changes):
    data = bytearray(SAMPLE)
    for start, piece, gone in changes:
        data[start : start + gone] = piece
    read(data)


@settings(max_examples=50 * FUZZ)
@given(st.binary(max_size=200))
def test_noise_is_a_turn_or_a_rank_error(noise):
    read(noise)


def with_head(data, change):
    """A message whose JSON is another one."""
    (size,) = np.frombuffer(data[:4], dtype="<u4")
    head = data[24 : 24 + size]
    changed = head.replace(*change)
    if changed == head:
        pytest.fail(f"the sample has no {change[0]!r}: {head!r}")
    return np.uint32(len(changed)).tobytes() + data[4:24] + changed + data[24 + size :]


@pytest.mark.parametrize(
    "change",
    [
        (b'{"opaque":"object"}', b'{"numpy":"float32","shape":[99999,99999],"fill":1}'),
        (b"[4,4]", b"[2147483647,2147483647]"),
        (b"[4,4]", b"[2,4]"),
        (b"[200]", b"[20000000000]"),
        (b"[20]", b"[-1]"),
        (b"[200]", b"[4611686018427387904,0]"),
        (b"[3,[", b"[-3,["),
        (b'"torch.float32"', b'"torch.float33"'),
        (b'"<i8"', b'"|O"'),
        (b'"<i8"', b'"<M8[s]"'),
        (b'"client_id"', b'"customer"'),
        (b'"<i8",', b""),
    ],
)
def test_no_message_asks_for_memory_without_bound(change):
    assert read(with_head(SAMPLE, (b" ", b"")))
    assert not read(with_head(SAMPLE, change))


# Digests ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_digests_are_the_same_in_every_process():
    run = subprocess.run(
        [sys.executable, "tests/support/rank_digests.py"],
        env={**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [int(number) for number in run.stdout.split()] == digests()


def test_a_digest_shows_what_differs():
    found = [schedule_digest(it) for it in (SCHEDULE, *OTHERS)]
    assert len(set(found)) == len(found)
    request = InferenceRequest.from_tokens(5, list(range(100)), 3)
    others = [
        InferenceRequest.from_tokens(6, list(range(100)), 3),
        InferenceRequest.from_tokens(5, [*range(99), 0], 3),
        InferenceRequest.from_tokens(5, list(range(100)), 4),
        InferenceRequest.from_tokens(5, list(range(100)), 3, cache_salt="a"),
    ]
    found = [requests_digest(it) for it in ([], [request], [request, request])]
    found += [requests_digest([it]) for it in others]
    assert len(set(found)) == len(found)
    assert stops_digest({1, 2}) == stops_digest([2, 1]) != stops_digest({1})


def test_equal_keywords_are_equal_in_a_digest():
    tensors, priority = {"input_ids": np.ones(1, "i4")}, float("0.5")  # which is another object
    given = [InferenceRequest(1, tensors), InferenceRequest(1, tensors, priority=priority)]
    assert requests_digest(given[:1]) == requests_digest(given[1:])


def test_processors_of_hosts_do_not_count_in_a_digest():
    tensors = {"input_ids": np.ones(1, "i4")}
    with_one = InferenceRequest(1, tensors, logits_post_processor=print)
    assert requests_digest([with_one]) == requests_digest([InferenceRequest(1, with_one.tensors)])
