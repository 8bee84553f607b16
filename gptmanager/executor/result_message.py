"""`pack` and `unpack`: a `StepResult` as bytes, which rank 0 sends to the other ranks.

The bytes are a header of fixed size, JSON for the parts that few steps have, and the raw arrays.
They are plain data, so reading them runs no code.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from gptmanager import errors
from gptmanager.errors import GptManagerError, RankError, response_text
from gptmanager.step import (
    BeamCandidates,
    ContextLogits,
    Extras,
    Failure,
    PromptLogProbs,
    StepResult,
    TopLogProbs,
)

# iteration of the schedule, clock, rows and columns of tokens, flags, number of bytes of JSON
_HEADER = struct.Struct("<qdIIBI")
_COUNTED, _STALE = 1, 2
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
_CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, GptManagerError)
}


def pack(iteration: int, result: StepResult, *, with_extras: bool = False) -> bytes:
    """Return the result of the schedule of `iteration` as bytes.

    `with_extras`: log probabilities and logits are included.
    """
    rows, columns = result.tokens.shape
    flags = _STALE if result.stale else 0
    arrays = [_bytes(result.tokens, _INT32)]
    if result.num_tokens is not None:
        flags |= _COUNTED
        arrays.append(_bytes(result.num_tokens, _INT32))
    rest = b""
    extras = result.extras if with_extras else None
    if result.beams or result.failures or extras is not None:
        rest, more = _rest(result, extras)
        arrays += more
    header = _HEADER.pack(iteration, result.now, rows, columns, flags, len(rest))
    return b"".join((header, rest, *arrays))


def unpack(message: bytes, iteration: int, num_rows: int) -> StepResult:
    """Return the `StepResult` in a message.

    Raises RankError if the message is malformed, if its result is not for the schedule of
    `iteration`, or if the result does not have `num_rows` rows.
    """
    try:
        number, now, rows, columns, flags, num_bytes = _HEADER.unpack_from(message)
        if (number, rows) != (iteration, num_rows):
            raise RankError(
                f"rank 0 sent the result of step {number} with {rows} rows, expected that of step "
                f"{iteration} with {num_rows}: the ranks have drifted apart"
            )
        rest: dict[str, Any] = {}
        reader = _Reader(message, _HEADER.size + num_bytes)
        if num_bytes:
            rest = orjson.loads(reader.before(num_bytes))
        tokens = reader.array(_INT32, rows, columns)
        counts = reader.array(_INT32, rows) if flags & _COUNTED else None
        if counts is not None and counts.size and not 0 <= counts.min() <= counts.max() <= columns:
            raise ValueError(f"counts of tokens are not within 0..{columns}")
        beams = tuple(_read_beams(reader, lengths) for lengths in rest.get("beams", ()))
        extras = _read_extras(reader, rest["extras"], tokens.shape) if "extras" in rest else None
        failures = tuple(Failure(id_, _error(*text)) for id_, *text in rest.get("failures", ()))
        reader.end()
    except (struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
        text = f"the result of step {iteration} cannot be read: {response_text(error)}"
        raise RankError(text) from error
    return StepResult(tokens, now, counts, beams, failures, bool(flags & _STALE), extras)


class _Reader:
    """Reads the arrays of a message in order, from byte `start` on."""

    def __init__(self, message: bytes, start: int) -> None:
        self._message = message
        self._at = start

    def before(self, num_bytes: int) -> memoryview:
        """Return the `num_bytes` bytes before the next array."""
        if self._at > len(self._message):
            raise ValueError("the message is cut off")
        return memoryview(self._message)[self._at - num_bytes : self._at]

    def array(self, dtype: np.dtype[Any], *shape: int) -> np.ndarray:
        """Read the next array, as a copy that the caller may write to."""
        if any(type(size) is not int or size < 0 for size in shape):
            raise ValueError(f"an array must have nonnegative integer sizes, got {shape}")
        count = 1
        for size in shape:
            count *= size
        end = self._at + count * dtype.itemsize
        if end > len(self._message):
            raise ValueError("the message is cut off")
        found = np.frombuffer(self._message, dtype, count, self._at).reshape(shape).copy()
        self._at = end
        return found

    def end(self) -> None:
        """Raise ValueError if the message has further bytes."""
        if self._at != len(self._message):
            raise ValueError(f"{len(self._message) - self._at} bytes too many")


def _bytes(array: np.ndarray, dtype: np.dtype[Any]) -> bytes:
    return np.ascontiguousarray(array, dtype=dtype).tobytes()


def _rest(result: StepResult, extras: Extras | None) -> tuple[bytes, list[bytes]]:
    """Return the JSON part of a message, and the arrays that it describes."""
    arrays: list[bytes] = []
    rest: dict[str, Any] = {}
    if result.beams:
        rest["beams"] = [[len(own) for own in beam.tokens] for beam in result.beams]
        for beam in result.beams:
            arrays.append(_bytes(np.array([t for own in beam.tokens for t in own]), _INT32))
            arrays.append(_bytes(np.array([p for own in beam.log_probs for p in own]), _FLOAT32))
    if extras is not None:
        rest["extras"], more = _of_extras(extras)
        arrays += more
    if result.failures:
        rest["failures"] = [
            [failure.request_id, type(failure.error).__name__, _legible(failure.error)]
            for failure in result.failures
        ]
    return orjson.dumps(rest), arrays


def _legible(error: BaseException) -> str:
    """Return the text of an error without its class name; surrogates are escaped for UTF-8."""
    return response_text(error).removeprefix(type(error).__name__).removeprefix(": ")


def _error(name: str, text: str) -> BaseException:
    """Return an error of the class `name` with this text. An unknown class is created."""
    known = _CLASSES.get(name)
    if known is None:
        known = type(name if name.isidentifier() else "Error", (GptManagerError,), {})
    return known(text)


def _read_beams(reader: _Reader, lengths: list[int]) -> BeamCandidates:
    count = sum(lengths)
    tokens = reader.array(_INT32, count).tolist()
    log_probs = reader.array(_FLOAT32, count).tolist()
    ends = np.cumsum(lengths).tolist()
    parts = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    return BeamCandidates(
        tuple(tuple(tokens[part]) for part in parts),
        tuple(tuple(log_probs[part]) for part in parts),
    )


def _of_extras(extras: Extras) -> tuple[dict[str, Any], list[bytes]]:
    arrays: list[bytes] = []
    if extras.log_probs is not None:
        arrays.append(_bytes(extras.log_probs, _FLOAT32))
    generation = [(row, *logits.shape) for row, logits in extras.generation_logits]
    context = [
        (part.request_id, part.epoch, part.position, *part.logits.shape)
        for part in extras.context_logits
    ]
    tensors = [logits for _, logits in extras.generation_logits]
    tensors += [part.logits for part in extras.context_logits]
    arrays += [_bytes(tensor.numpy(), _FLOAT32) for tensor in tensors]
    for top in extras.top_log_probs:
        arrays += [_bytes(top.log_probs, _FLOAT32), _bytes(top.ids, _INT32)]
    for own in extras.prompt_log_probs:
        arrays += [_bytes(scores.numpy(), _FLOAT32) for scores in own[3:5]]
        arrays.append(_bytes(own.top_ids.numpy(), _INT32))
    layout = {
        "log_probs": extras.log_probs is not None,
        "generation": generation,
        "context": context,
        "top": [(own.row, *own.ids.shape) for own in extras.top_log_probs],
        "prompt": [(*own[:3], *own.top_ids.shape) for own in extras.prompt_log_probs],
    }
    return layout, arrays


def _read_extras(reader: _Reader, layout: dict[str, Any], shape: tuple[int, ...]) -> Extras:
    def tensor(*sizes: int) -> Tensor:
        return torch.from_numpy(reader.array(_FLOAT32, *sizes))

    log_probs = reader.array(_FLOAT32, *shape) if layout["log_probs"] else None
    generation = tuple((row, tensor(*sizes)) for row, *sizes in layout["generation"])
    context = tuple(
        ContextLogits(request_id, epoch, position, tensor(*sizes))
        for request_id, epoch, position, *sizes in layout["context"]
    )
    top = tuple(
        TopLogProbs(row, reader.array(_FLOAT32, *sizes), reader.array(_INT32, *sizes))
        for row, *sizes in layout["top"]
    )
    prompt = tuple(
        PromptLogProbs(
            *(request_id, epoch, position, tensor(count), tensor(count, num_top)),
            torch.from_numpy(reader.array(_INT32, count, num_top)),
        )
        for request_id, epoch, position, count, num_top in layout["prompt"]
    )
    return Extras(log_probs, generation, context, top, prompt)
