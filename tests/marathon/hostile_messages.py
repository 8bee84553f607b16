"""Draws calls of the gRPC service, and bytes on its port that are no HTTP/2."""

from __future__ import annotations

import random
from typing import Any

import tritonclient.grpc as grpcclient
from triton_calls import message_of, prompt

from gptmanager.server.triton.datatypes import NUMPY

pb = grpcclient.service_pb2
SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
METHODS = tuple(it.name for it in SERVICE.methods)
STREAM = "ModelStreamInfer"
_SIZES = (-1, 0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
_MODELS = ("tensorrt_llm", "tensorrt_llm", "ensemble", "tensorrt_llm_bls")


def draw_message(chance: random.Random) -> dict[str, Any]:
    """One call, or a stream of several, that the client may cancel."""
    method = chance.choice(["ModelInfer", "ModelInfer", "ModelInfer", STREAM, STREAM, *METHODS])
    count = chance.choice([1, 1, 2, 9]) if method == STREAM else 1
    return {
        "front": "grpc",
        "route": method,
        "pieces": tuple(_message(chance, method) for _ in range(count)),
        "cut": chance.choice([None, None, None, 0.0, 0.003, 0.05]),
        "may_time_out": True,  # a call's `timeout` is one of the fields that are drawn
    }


def draw_wire(chance: random.Random) -> dict[str, Any]:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    frame = chance.randbytes(chance.choice([9, 40, 2000]))
    ping = b"\0\0\x08\6\0\0\0\0\0" + b"a" * 8
    settings = b"\0\0\0\4\0\0\0\0\0"
    raw = chance.choice(
        [
            frame,
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
            preface + frame,
            preface + settings + ping * chance.choice([5, 5000]),
            preface + settings + b"\xff\xff\xff\1\4\0\0\0\1" + frame,
        ]
    )
    return {"front": "wire", "route": "wire", "pieces": (raw,), "cut": 0.3, "may_close": True}


def _message(chance: random.Random, method: str) -> bytes:
    if method not in ("ModelInfer", STREAM):
        return _other(chance, method)
    call = _good(chance)
    for _ in range(chance.choice([0, 1, 1, 2, 4])):
        _change(chance, call)
    raw = call.SerializeToString()
    if chance.random() < 0.1:
        raw = raw[: chance.randrange(len(raw) + 1)]
    if chance.random() < 0.1 and raw:
        at = chance.randrange(len(raw))
        raw = raw[:at] + chance.randbytes(chance.choice([1, 4])) + raw[at + 1 :]
    return raw


def _good(chance: random.Random) -> Any:
    model = chance.choice(_MODELS)
    if model == "tensorrt_llm":
        ids = [chance.randrange(2, 600) for _ in range(chance.choice([1, 3, 60]))]
        values = prompt(*ids, new=chance.choice([1, 4, 100]))
        if chance.random() < 0.3:
            values["beam_width"] = 2
        if chance.random() < 0.1:
            values["stop"] = True
    else:
        values = {"text_input": [b"Tom had"], "max_tokens": 4}
    if chance.random() < 0.4:
        values["streaming" if model == "tensorrt_llm" else "stream"] = True
    call = message_of(model, **values)
    call.id = chance.choice(["x", "", "1", "y"])
    return call


def _change(chance: random.Random, call: Any) -> None:
    kind = chance.randrange(9)
    if not call.inputs or not call.raw_input_contents:
        return
    index = chance.randrange(min(len(call.inputs), len(call.raw_input_contents)))
    tensor, raw = call.inputs[index], call.raw_input_contents[index]
    if kind == 0:
        tensor.shape[:] = [chance.choice(_SIZES) for _ in range(chance.choice([0, 1, 2, 2, 3, 40]))]
    elif kind == 1:
        tensor.datatype = chance.choice([*NUMPY, "", "x", "é" * 1000])
    elif kind == 2:
        call.raw_input_contents[index] = chance.choice(
            [b"", raw[:-1], raw + b"a", raw * 100, chance.randbytes(len(raw)), b"\xff" * len(raw)]
        )
    elif kind == 3:
        del call.raw_input_contents[index]
        if chance.random() < 0.5:
            del call.inputs[index]
    elif kind == 4:
        for _ in range(chance.choice([1, 3000])):
            call.inputs.add(name=tensor.name, datatype="INT32", shape=[1, 1])
    elif kind == 5:
        tensor.name = chance.choice(
            ["", "x", "lora_weights", "draft_input_ids", "a" * 10**5, "stop"]
        )
    elif kind == 6:
        key = chance.choice(
            ["timeout", "priority", "sequence_id", "triton_enable_empty_final", "a"]
        )
        parameter = call.parameters[key]
        field = chance.choice(["int64_param", "string_param", "double_param", "bool_param"])
        value = {
            "int64_param": chance.choice(_SIZES),
            "string_param": chance.choice(["1", "a" * 99]),
            "double_param": float("nan"),
            "bool_param": True,
        }
        setattr(parameter, field, value[field])
    elif kind == 7:
        call.outputs.add(name=chance.choice(["output_ids", "x", "", "text_output"]))
        call.outputs[-1].parameters["classification"].int64_param = chance.choice(_SIZES)
    else:
        _add_large(chance, call)


def _add_large(chance: random.Random, call: Any) -> None:
    """A large tensor that may be taken."""
    name = chance.choice(["embedding_bias", "bad_words_list", "stop_words_list", "draft_input_ids",
                          "prompt_embedding_table", "input_ids", "lora_weights"])  # fmt: skip
    datatype, width = chance.choice([("INT32", 4), ("FP32", 4), ("FP16", 2), ("INT64", 8)])
    size = chance.choice([2, 640, 10_000, 250_000])
    shape = chance.choice([[1, size], [1, 2, size // 2], [1, 1, size]])
    call.inputs.add(name=name, datatype=datatype, shape=shape)
    fill = chance.choice([b"\0" * width, b"\xff" * width, b"\1" + b"\0" * (width - 1)])
    call.raw_input_contents.append(fill * size)


def _other(chance: random.Random, method: str) -> bytes:
    message = chance.choice(
        [
            b"",
            chance.randbytes(chance.choice([1, 20, 300])),
            b"\x0a\x0ctensorrt_llm",
            b"\x0a\x03abc",
            b"\x0a\xff\xff\xff\xff\x0f",
            b"\x0a\x80\x89\x7a" + b"a" * 2_000_000,
        ]
    )
    return message if chance.random() < 0.9 else message * 50
