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
from gptmanager.errors import GptManagerError, RankError, RecordingError
from gptmanager.recorder.requests import (
    Allowance,
    RecordedError,
    plain_request,
    request_from_plain,
)
from gptmanager.recorder.values import Decoder, field_names, to_json
from gptmanager.request.inference_request import KEYWORDS, InferenceRequest
from gptmanager.step import Failure, Intake, Schedule

_SMALL_BYTES = 256  # of a tensor that is written as JSON
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}
_LENGTH = struct.Struct("<I")


class Turn(NamedTuple):
    """What rank 0 tells the others at the start of an iteration.

    `requests`, `stops`: digests, where each rank's own host gives them; then the intake has none.
    `schedule`: digest of the last one that rank 0 decided. `is_empty`: Get had nothing.
    """

    intake: Intake
    requests: int
    stops: int
    schedule: int
    is_empty: bool


def pack(turn: Turn) -> bytes:
    """As one message: the length of its JSON, the JSON, then large tensors one after another."""
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
            "digests": [turn.requests, turn.stops, turn.schedule],
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
            start = _LENGTH.size
            head = orjson.loads(memoryview(data)[start : start + size])
            intake = self._decoder.decode(Intake, head["intake"])
            requests = _requests(head["requests"], memoryview(data)[start + size :])
            own, stops, schedule = map(int, head["digests"])
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
            return Turn(whole, own, stops, schedule, bool(head["is_empty"]))
        except (RecordingError, KeyError, TypeError, ValueError, struct.error) as error:
            raise RankError(f"a message of rank 0 cannot be read: {error}") from error


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
    except (RecordingError, KeyError, TypeError, ValueError, struct.error) as error:
        raise RankError(f"requests of rank 0 cannot be read: {error}") from error


def requests_digest(requests: Iterable[InferenceRequest]) -> int:
    """Equal for equal requests, on every rank."""
    raw: list[bytes] = []
    plain = [_plain(request, raw, with_processor=False) for request in requests]
    return zlib.crc32(b"".join((to_json(plain), *raw))) if plain else 0


def stops_digest(stops: Iterable[int]) -> int:
    return zlib.crc32(to_json(sorted(stops)))


def schedule_digest(schedule: Schedule | None) -> int:
    """Of all that is decided: integers alone, whose hashes are the same in every process."""
    if schedule is None:
        return 0
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
        kind, dtype, data = array
        large.append((name, kind, dtype, list(value.shape), len(data)))
        raw.append(data)
    keywords = {name: getattr(request, name) for name in KEYWORDS}
    if not with_processor:
        keywords["logits_post_processor"] = None
    plain = plain_request(InferenceRequest(request.request_id, small, **keywords))
    plain["large"] = large
    return plain


def _dense(name: str, value: Any) -> tuple[str, str, bytes] | None:
    """Kind, dtype and bytes of a tensor that is large enough to go as it is."""
    try:
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            if value.layout is not torch.strided or value.is_meta or dtype not in _DTYPES:
                return None
            if value.nbytes <= _SMALL_BYTES and name != "lora_weights":
                return None
            dense = value.detach().cpu().contiguous()
            return "torch", dtype, dense.view(-1).view(torch.uint8).numpy().tobytes()
        if isinstance(value, np.ndarray) and value.dtype.name in _DTYPES:
            if value.nbytes > _SMALL_BYTES or name == "lora_weights":
                return "numpy", value.dtype.name, np.ascontiguousarray(value).tobytes()
    except (RuntimeError, ValueError, TypeError):  # admission tells what is wrong with it
        return None
    return None


def _requests(plain: Iterable[dict[str, Any]], raw: memoryview) -> list[InferenceRequest]:
    requests, end = [], 0
    for one in plain:
        request, end = _request(one, raw, end)
        requests.append(request)
    return requests


def _request(plain: dict[str, Any], raw: memoryview, end: int) -> tuple[InferenceRequest, int]:
    request = request_from_plain(plain, Allowance())
    for name, kind, dtype, shape, size in plain["large"]:
        data, end = bytearray(raw[end : end + size]), end + size
        if len(data) != size:
            raise ValueError(f"tensor {name} is cut off")
        tensor = torch.frombuffer(data, dtype=_DTYPES[dtype]).reshape(shape)
        request.tensors[name] = tensor.numpy() if kind == "numpy" else tensor
    return request, end


def _error(error: BaseException) -> BaseException:
    """With the class and text that it has on rank 0, as far as a response shows them."""
    name, _, text = str(error).partition(": ")
    known = getattr(errors, name, None)
    if isinstance(known, type) and issubclass(known, GptManagerError):
        return known(text)
    return error if isinstance(error, RecordedError) else RankError(str(error))
