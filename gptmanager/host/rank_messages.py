"""Conversion of an intake of rank 0 to a message for the other ranks, and back.

Messages contain only data, no pickled objects. Most intakes have only a time, or a time and
requests. Other fields are JSON, as in a recording.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import orjson

from gptmanager import errors
from gptmanager.errors import GptManagerError, RankError, response_text
from gptmanager.host.packed_requests import ALIGNMENT, PackedRequests, read_requests
from gptmanager.recorder.requests import RecordedError
from gptmanager.recorder.values import Decoder, field_names, to_json
from gptmanager.request.inference_request import InferenceRequest
from gptmanager.step import Failure, Intake, Schedule

_LENGTH = struct.Struct("<I")
# length of the JSON, time, the two digests, `is_empty`, whether cached blocks are stale
_HEAD = struct.Struct("<IdII??2x")


class IntakeMessage(NamedTuple):
    """The message that rank 0 sends to the others at the start of an iteration.

    If each rank's own host provides requests and stop signals, the intake contains neither;
    `requests` is then a digest of the requests, and `stops` a digest of the stop signals. Otherwise
    both digests are 0. `is_empty` means that GetInferenceRequests returned no requests.
    """

    intake: Intake
    requests: int
    stops: int
    is_empty: bool


def pack(message: IntakeMessage) -> bytes:
    """Pack a message: numbers, among them the length of the JSON; then the JSON; then the arrays.

    The JSON is empty if the intake has only its time and `clears_cache`.
    """
    intake = message.intake
    is_bare = intake == Intake(intake.now, intake.requests, clears_cache=intake.clears_cache)
    head, arrays = b"", []
    if intake.requests or not is_bare:
        packed = PackedRequests(intake.requests)
        others = None if is_bare else replace(intake, requests=())
        head, arrays = _aligned(_HEAD.size, to_json((packed.entries, others))), packed.arrays
    numbers = _HEAD.pack(len(head), intake.now, *message[1:], intake.clears_cache)
    return b"".join((numbers, head, *arrays))


class Unpacker:
    """Function from bytes to an `IntakeMessage`. Raises RankError if the bytes are malformed."""

    def __init__(self) -> None:
        self._decoder = Decoder(field_names(Intake))

    def __call__(self, data: bytes) -> IntakeMessage:
        try:
            size, now, *rest, clears_cache = _HEAD.unpack_from(data)
            arrays = memoryview(data)[_HEAD.size + size :]
            if not size and not arrays:
                return IntakeMessage(Intake(now, clears_cache=clears_cache), *rest)
            entries, others = orjson.loads(memoryview(data)[_HEAD.size : _HEAD.size + size])
            requests = tuple(read_requests(entries, arrays))
            if others is None:
                return IntakeMessage(Intake(now, requests, clears_cache=clears_cache), *rest)
            return IntakeMessage(replace(self._others(others), requests=requests), *rest)
        except Exception as error:  # malformed bytes may raise anything
            text = response_text(error)
            raise RankError(f"a message of rank 0 cannot be read: {text}") from error

    def _others(self, plain: Any) -> Intake:
        """Read the fields of an intake other than requests; restore errors from their texts."""
        intake: Intake = self._decoder.decode(Intake, plain)
        failures = tuple(Failure(it.request_id, _error(it.error)) for it in intake.failures)
        done = tuple(
            it if it.error is None else it._replace(error=_error(it.error))
            for it in intake.adapters
        )
        return replace(intake, failures=failures, adapters=done)


def pack_requests(requests: Iterable[InferenceRequest]) -> bytes:
    """Pack requests alone, for hosts that send requests between ranks themselves."""
    packed = PackedRequests(requests)
    head = _aligned(_LENGTH.size, to_json(packed.entries))
    return b"".join((_LENGTH.pack(len(head)), head, *packed.arrays))


def unpack_requests(data: bytes) -> list[InferenceRequest]:
    """Read the bytes of `pack_requests`. Raise RankError if they are malformed."""
    try:
        (size,) = _LENGTH.unpack_from(data)
        start = _LENGTH.size + size
        entries = orjson.loads(memoryview(data)[_LENGTH.size : start])
        return read_requests(entries, memoryview(data)[start:])
    except Exception as error:  # malformed bytes may raise anything
        raise RankError(f"requests of rank 0 cannot be read: {response_text(error)}") from error


def requests_digest(requests: Iterable[InferenceRequest]) -> int:
    """Return a digest that is equal on all ranks if the requests are equal."""
    packed = PackedRequests(requests, with_processors=False)
    return zlib.crc32(b"".join((to_json(packed.entries), *packed.arrays))) if packed.entries else 0


def _aligned(start: int, head: bytes) -> bytes:
    """Return `head` padded with spaces, so that the array after it is aligned."""
    return head + b" " * (-(start + len(head)) % ALIGNMENT)


def stops_digest(stops: Iterable[int]) -> int:
    """Return a digest that is equal on all ranks if the stop signals are equal."""
    return zlib.crc32(to_json(sorted(stops)))


def schedule_digest(schedule: Schedule) -> int:
    """Return a digest of a schedule, equal on all ranks if the schedules are equal.

    Only integers are hashed, because their hashes are equal in all processes.
    """
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


def _error(error: BaseException) -> BaseException:
    """Restore an error from the text of `error`, which begins with the name of a class and ": ".

    If the class is unknown, return a RecordedError or a RankError with the whole text.
    """
    name, _, text = str(error).partition(": ")
    known = getattr(errors, name, None)
    if isinstance(known, type) and issubclass(known, GptManagerError):
        return known(text)
    return error if isinstance(error, RecordedError) else RankError(str(error))
