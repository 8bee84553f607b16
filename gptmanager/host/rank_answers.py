"""The answers of one rank's host, as data that two ranks can compare.

Ranks compare texts and checksums instead of whole tensors. Differences are described in words.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from gptmanager.host.packed_requests import ALIGNMENT, PackedRequests
from gptmanager.request.inference_request import InferenceRequest

_MOST_SHOWN = 8  # tensor values or request ids quoted in an error
_LONGEST = 80  # characters quoted of any other value


class Answers(NamedTuple):
    """The answers of one rank's callbacks.

    `requests`, from GetInferenceRequests, has the id of each request and, for each of its fields, a
    text and a checksum. `stops` are the ids from PollStopSignal.
    """

    requests: list[tuple[int, dict[str, tuple[str, int]]]]
    stops: list[int]


def answers_of(requests: Iterable[InferenceRequest], stops: Iterable[int]) -> Answers:
    """Return the answers of this rank's callbacks in a form to compare."""
    return Answers([(it.request_id, _fields(it)) for it in requests], sorted(stops))


def answers_difference(first: Answers, other: Any) -> str:
    """Describe how `other`, the answers of a rank as JSON values, differs from rank 0's `first`."""
    requests, stops = other
    if [*stops] != first.stops:
        return f"PollStopSignal returned {_shown(stops)}, not {_shown(first.stops)}"
    ids, first_ids = [it[0] for it in requests], [it[0] for it in first.requests]
    if ids != first_ids:
        found = f"{_shown(ids)}, not {_shown(first_ids)}"
        return f"GetInferenceRequests returned the requests {found}"
    for (request_id, fields), (_, first_fields) in zip(requests, first.requests, strict=True):
        for name in dict.fromkeys((*first_fields, *fields)):
            here, there = fields.get(name), first_fields.get(name)
            if (here and tuple(here)) != there:
                here_text, there_text = (it[0] if it else "nothing" for it in (here, there))
                if here_text == there_text:
                    there_text = "the same first values, but different later ones"
                return (
                    f"GetInferenceRequests returned request {request_id} with {name} = "
                    f"{here_text}, not {there_text}"
                )
    return "its host gave the same answers"


def _fields(request: InferenceRequest) -> dict[str, tuple[str, int]]:
    packed = PackedRequests([request], with_processors=False)
    _, found, *more = packed.entries[0]
    arrays = iter(packed.arrays)
    fields: dict[str, tuple[str, int]] = {}
    for name, dtype, shape in zip(found[::3], found[1::3], found[2::3], strict=True):
        data = bytes(next(arrays))
        if len(data) % ALIGNMENT:
            next(arrays)  # padding
        fields[name] = f"{_values(data, dtype)} ({dtype} {[*shape]})", zlib.crc32(data)
    for others in more:
        for name, value in others.items():
            text = repr(value)
            fields[name] = text[:_LONGEST], zlib.crc32(text.encode(errors="replace"))
    return fields


def _values(data: bytes, dtype: str) -> str:
    """Quote the values of a tensor. torch reads its own dtypes, because NumPy may not know them."""
    if not data:
        return "[]"
    name = dtype.removeprefix("torch.")
    if name == dtype:
        return _shown(np.frombuffer(data, dtype).tolist())
    return _shown(torch.frombuffer(bytearray(data), dtype=getattr(torch, name)).tolist())


def _shown(values: Iterable[Any]) -> str:
    listed = [*values]
    more = ", ..." if len(listed) > _MOST_SHOWN else ""
    return f"[{', '.join(map(str, listed[:_MOST_SHOWN]))}{more}]"
