"""An intake of rank 0 as a message to the other ranks, and back: data only.

A recording's JSON says all of it but large tensors of requests, which follow as they are. A logits
post-processor travels by name: who called for it has it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import orjson
import torch

from gptmanager import errors
from gptmanager.errors import GptManagerError, RankError, response_text
from gptmanager.recorder.requests import (
    Allowance,
    RecordedError,
    plain_request,
    request_from_plain,
)
from gptmanager.recorder.values import Decoder, field_names, to_json
from gptmanager.request.inference_request import KEYWORDS, InferenceRequest
from gptmanager.request.read_tensors import is_too_large
from gptmanager.step import Failure, Intake, Schedule

_SMALL_BYTES = 256  # of a tensor that is written as JSON
_MOST_VIEW_BYTES = 1 << 28  # of weights of which some are views of others
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    )
}
_LENGTH = struct.Struct("<I")
_BARE = struct.Struct("<IdII??")  # no JSON, the time, the rest of a turn, whether caches are stale


class Turn(NamedTuple):
    """What rank 0 tells the others at the start of an iteration.

    `requests`, `stops`: digests, where each rank's own host gives them; then the intake has none.
    `is_empty`: Get had nothing.
    """

    intake: Intake
    requests: int
    stops: int
    is_empty: bool


def pack(turn: Turn) -> bytes:
    """As one message: the length of its JSON, the JSON, then large tensors one after another.

    Of an intake that has nothing but its time, as most of them: no JSON, and numbers.
    """
    if turn.intake == Intake(turn.intake.now, clears_cache=turn.intake.clears_cache):
        return _BARE.pack(0, turn.intake.now, *turn[1:], turn.intake.clears_cache)
    raw: list[bytes] = []
    requests = [_plain(request, raw) for request in turn.intake.requests]
    head = to_json(
        {
            "intake": Intake(
                turn.intake.now,
                stops=turn.intake.stops,
                ready=turn.intake.ready,
                failures=turn.intake.failures,
                clears_cache=turn.intake.clears_cache,
                adapters=turn.intake.adapters,
                forgotten_adapters=turn.intake.forgotten_adapters,
            ),
            "requests": requests,
            "digests": [turn.requests, turn.stops],
            "is_empty": turn.is_empty,
        }
    )
    return b"".join((_LENGTH.pack(len(head)), head, *raw))


class Unpacker:
    """Makes a `Turn` of a message. RankError for what is none."""

    def __init__(self) -> None:
        self._decoder = Decoder(field_names(Intake))

    def __call__(self, data: bytes) -> Turn:
        try:
            (size,) = _LENGTH.unpack_from(data)
            if size == 0:
                _, now, *rest, clears_cache = _BARE.unpack(data)
                return Turn(Intake(now, clears_cache=clears_cache), *rest)
            start = _LENGTH.size
            head = orjson.loads(memoryview(data)[start : start + size])
            intake = self._decoder.decode(Intake, head["intake"])
            requests = _requests(head["requests"], memoryview(data)[start + size :])
            own, stops = map(int, head["digests"])
            failures = tuple(Failure(it.request_id, _error(it.error)) for it in intake.failures)
            done = tuple(
                it if it.error is None else it._replace(error=_error(it.error))
                for it in intake.adapters
            )
            whole = Intake(
                intake.now,
                tuple(requests),
                intake.stops,
                intake.ready,
                failures,
                intake.clears_cache,
                done,
                intake.forgotten_adapters,
            )
            return Turn(whole, own, stops, bool(head["is_empty"]))
        except Exception as error:  # whatever it is, it is none of rank 0's
            text = response_text(error)
            raise RankError(f"a message of rank 0 cannot be read: {text}") from error


def pack_requests(requests: Iterable[InferenceRequest]) -> bytes:
    """Requests alone, for hosts that send them by means of their own."""
    raw: list[bytes] = []
    head = to_json([_plain(request, raw) for request in requests])
    return b"".join((_LENGTH.pack(len(head)), head, *raw))


def unpack_requests(data: bytes) -> list[InferenceRequest]:
    """Raises RankError for what `pack_requests` has not made."""
    try:
        (size,) = _LENGTH.unpack_from(data)
        start = _LENGTH.size + size
        return _requests(orjson.loads(data[_LENGTH.size : start]), memoryview(data)[start:])
    except Exception as error:  # whatever it is, it is none of rank 0's
        raise RankError(f"requests of rank 0 cannot be read: {response_text(error)}") from error


def requests_digest(requests: Iterable[InferenceRequest]) -> int:
    """Equal for equal requests, on every rank."""
    raw: list[bytes] = []
    plain = [_plain(request, raw, with_processor=False) for request in requests]
    return zlib.crc32(b"".join((to_json(plain), *raw))) if plain else 0


def stops_digest(stops: Iterable[int]) -> int:
    return zlib.crc32(to_json(sorted(stops)))


def schedule_digest(schedule: Schedule) -> int:
    """Of all that is decided: integers alone, whose hashes are the same in every process."""
    starts = tuple(
        (it.slot, len(it.tokens), it.beam_width, it.adapter_slot) for it in schedule.starts
    )
    return hash(
        (
            schedule.iteration,
            schedule.context_rows,
            schedule.generation_rows,
            starts,
            schedule.block_appends,
            schedule.block_copies,
            schedule.beam_forks,
            schedule.drafts,
            schedule.paused,
            schedule.micro_batch_id,
        )
    )


def _plain(
    request: InferenceRequest, raw: list[bytes], with_processor: bool = True
) -> dict[str, Any]:
    """As JSON, but for what goes to `raw`."""
    small, large = {}, []
    for name, value in request.tensors.items():
        array = _dense(name, value)
        if array is None:
            small[name] = value
            continue
        kind, dtype, shape, data = array
        large.append((name, kind, dtype, shape, len(data)))
        raw.append(data)
    keywords = {name: getattr(request, name) for name in KEYWORDS}
    if not with_processor:
        keywords["logits_post_processor"] = None
    plain = plain_request(InferenceRequest(request.request_id, small, **keywords))
    plain["large"] = large
    return plain


def _dense(name: str, value: Any) -> tuple[str, str, list[int], bytes] | None:
    """Kind, dtype, shape and bytes of a tensor that is large enough to go as it is."""
    try:
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            is_plain = value.layout is torch.strided and not (value.is_meta or value.is_nested)
            if not is_plain or dtype not in _DTYPES or _claims_too_much(name, value):
                return None
            if value.nbytes <= _SMALL_BYTES and name != "lora_weights":
                return None
            dense = value.detach().cpu().contiguous()
            flat = dense.as_strided((dense.numel(),), (1,))  # strides of what is 1 long may be any
            data = flat.view(torch.uint8).numpy().tobytes()
            return "torch", dtype, list(value.shape), data
        if isinstance(value, (list, tuple)) and name == "lora_weights":
            value = np.asarray(value)  # as admission does
        if isinstance(value, np.ndarray) and _is_number(value.dtype):
            is_large = value.nbytes > _SMALL_BYTES or name == "lora_weights"
            if is_large and not _claims_too_much(name, value):
                data = np.ascontiguousarray(value).tobytes()
                return "numpy", value.dtype.str, list(value.shape), data
    except BaseException:  # noqa: B036 - a host's object; admission tells what is wrong with it
        return None
    return None


def _requests(plain: Iterable[dict[str, Any]], raw: memoryview) -> list[InferenceRequest]:
    requests, end = [], 0
    for one in plain:
        request, end = _request(one, raw, end)
        requests.append(request)
    return requests


def _claims_too_much(name: str, value: Any) -> bool:
    """Admission refuses it, whatever it holds: nothing is made of it before."""
    if name == "lora_weights":
        strides = value.stride() if isinstance(value, torch.Tensor) else value.strides
        return 0 in strides and value.nbytes > _MOST_VIEW_BYTES
    return is_too_large(name, value)


def _request(plain: dict[str, Any], raw: memoryview, end: int) -> tuple[InferenceRequest, int]:
    request = request_from_plain(plain, Allowance())
    for name, kind, dtype, shape, size in plain["large"]:
        data, end = bytearray(raw[end : end + size]), end + size
        if len(data) != size:
            raise ValueError(f"tensor {name} is cut off")
        read = _array if kind == "numpy" else _tensor
        request.tensors[name] = read(data, dtype, shape)
    return request, end


def _array(data: bytearray, dtype: str, shape: list[int]) -> np.ndarray:
    if not _is_number(np.dtype(dtype)):
        raise ValueError(f"dtype {dtype}")
    return np.frombuffer(data, dtype).reshape(shape)


def _tensor(data: bytearray, dtype: str, shape: list[int]) -> torch.Tensor:
    known = _DTYPES[dtype]
    if not data:  # of which torch makes no tensor
        return torch.empty(shape, dtype=known) if 0 in shape else torch.empty(0).reshape(shape)
    return torch.frombuffer(data, dtype=known).reshape(shape)


def _is_number(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biuf"


def _error(error: BaseException) -> BaseException:
    """With the class and text that it has on rank 0, as far as a response shows them."""
    name, _, text = str(error).partition(": ")
    known = getattr(errors, name, None)
    if isinstance(known, type) and issubclass(known, GptManagerError):
        return known(text)
    return error if isinstance(error, RecordedError) else RankError(str(error))
