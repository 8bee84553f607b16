"""Converts requests to JSON and back, with the tensors that the host passed.

Numbers that only an executor reads may be written as a digest. An adapter's weights are written as
their shape and dtype. A host may pass any object; if JSON cannot represent it, only its type is
written. A recording may be from a stranger, so reading it creates only numbers, strings, lists of
these, tensors of known dtypes, digests, and this module's replacements for other objects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from gptmanager.errors import RecordingError, RequestError
from gptmanager.request.arrays import ROW_INPUTS, is_too_large
from gptmanager.request.inference_request import KEYWORDS, InferenceRequest
from gptmanager.request.input_rows import HostRows
from gptmanager.request.post_processor import RequestProcessor, is_post_processor

_NUMBERS = (
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
)  # dtypes of both torch and NumPy
_DTYPES = {"torch": (*_NUMBERS, "bfloat16"), "numpy": (*_NUMBERS, "uint16", "uint32", "uint64")}
# Python types of the items, by kind of dtype
_ITEMS: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}}
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_DEFAULT = InferenceRequest(0)  # has the default of each keyword
# values of a tensor; torch and NumPy cannot count the bytes of far larger tensors
_MOST_VALUES = 1 << 48
_LONGEST = (1 << 31) - 1  # the highest length of a dimension
_MAX_DEPTH = 32  # the most levels of nested lists, and the most dimensions of a shape
# `Allowance` counts 16 numbers of a ROW_INPUTS tensor as one, because they never become a list.
_CHEAP = 16


class RecordedError(Exception):
    """An error read from a recording. Its text has the class and message of the original error."""

    def __str__(self) -> str:
        return str(self.args[0])


class Opaque:
    """Replaces a value that JSON cannot represent. Admission refuses the value and an `Opaque`."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


class RecordedProcessor:
    """Replaces a logits post-processor. A replay never calls it, because tokens are recorded."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> None:
        raise RecordingError(f"the logits post-processor {self.name} was not recorded")


class RecordedPreparation(RecordedProcessor):
    """Replaces a logits post-processor that had a `prepare` method."""

    def prepare(self, device: str) -> None:
        self()


def recorded_processor(name: str, prepares: bool) -> RecordedProcessor:
    return RecordedPreparation(name) if prepares else RecordedProcessor(name)


class Allowance:
    """The remaining number of values that the "fill" entries of a recording may expand to."""

    def __init__(self, left: int = 1 << 20) -> None:
        self.left = left

    def take(self, name: str, count: int) -> None:
        """Subtract `count` values of tensor `name`; raise RecordingError if too few are left."""
        if name in ("lora_weights", "lora_config"):
            return  # weights are not expanded, and the number of config rows is limited
        self.left -= count // _CHEAP if name in ROW_INPUTS else count
        if self.left < 0:
            raise RecordingError(
                f"{name} expands to {count} equal values: too many for a recording of this size"
            )


def without_weights(value: Any) -> Any:
    """Return `lora_weights` as a recording keeps them: zeros of the same shape and dtype.

    The digest of the weights is recorded later, after they have been read.
    """
    if isinstance(value, (list, tuple)):
        value = np.asarray(value)  # admission converts it, too
    if isinstance(value, np.ndarray):
        return np.broadcast_to(np.zeros((), dtype=value.dtype), value.shape)
    is_tensor = isinstance(value, torch.Tensor) and value.layout is torch.strided
    if is_tensor and not (value.is_nested or value.is_meta):
        return torch.zeros((), dtype=value.dtype).expand(value.shape)
    return value


def plain_request(request: InferenceRequest) -> dict[str, Any]:
    """Return a request as JSON values. Keywords with their default value are left out."""
    plain: dict[str, Any] = {"request_id": request.request_id}
    plain["tensors"] = {
        str(name): plain_or_opaque(name, value) for name, value in list(request.tensors.items())
    }
    return plain | plain_keywords(request)


def plain_keywords(request: InferenceRequest) -> dict[str, Any]:
    """Return the request's keywords that differ from the defaults, as JSON values."""
    plain: dict[str, Any] = {}
    for name in KEYWORDS:
        value, default = getattr(request, name), getattr(_DEFAULT, name)
        if type(value) is not type(default) or value != default:
            plain[name] = _value_or_opaque(value)
    with suppress(BaseException):  # after an error, the processor stays opaque
        processor = request.logits_post_processor
        if is_post_processor(processor):
            named = RequestProcessor(processor)
            plain["logits_post_processor"] = {"processor": named.name, "prepares": named.prepares}
    return plain


def request_from_plain(plain: Any, allowance: Allowance) -> InferenceRequest:
    """Return the request that the JSON values `plain` describe.

    Raise RecordingError if `plain` is invalid.
    """
    if not isinstance(plain, dict) or not isinstance(plain.get("tensors"), dict):
        raise RecordingError("a request must be an object with tensors")
    attributes = {name: value_from_plain(plain[name]) for name in KEYWORDS if name in plain}
    tensors = {
        name: tensor_from_plain(name, value, allowance) for name, value in plain["tensors"].items()
    }
    request_id = plain.get("request_id")
    try:
        if type(request_id) is not int:
            raise TypeError("it must be an integer")
        return InferenceRequest(request_id, tensors, **attributes)
    except (RequestError, TypeError, ValueError) as error:
        raise RecordingError(f"request_id: {error}") from error


def plain_or_opaque(name: str, value: Any) -> Any:
    """Return the tensor `name` as JSON values, or only its type if JSON cannot represent it."""
    try:
        if name == "lora_weights":
            return _plain_weights(without_weights(value))
        return _opaque(value) if is_too_large(name, value) else plain_tensor(value)
    except BaseException:  # noqa: B036 - raised by an object of the host
        return _opaque(value)


def _value_or_opaque(value: Any) -> Any:
    try:
        return _plain_value(value)
    except BaseException:  # noqa: B036 - raised by an object of the host
        return _opaque(value)


def plain_tensor(value: Any) -> Any:
    """Return `{"torch" | "numpy": dtype, "shape": [...], "data": [...]}`, or a plain value.

    "data" is a flat list. If a tensor has more than 8 elements and all are equal, "fill" has their
    value, and there is no "data". A HostRows becomes `{"rows": digest, "count": n}`.
    """
    if isinstance(value, HostRows):
        return {"rows": value.digest, "count": value.count}
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return _opaque(value)
        kind, dtype, value = "torch", str(value.dtype).removeprefix("torch."), value.detach().cpu()
        is_narrow = value.dtype.is_floating_point and dtype not in _DTYPES["numpy"]
        array = (value.float() if is_narrow else value).numpy(force=True)
        if dtype not in _DTYPES[kind]:  # 8-bit floats, or unsigned integers
            kind, dtype = "numpy", array.dtype.name
    elif isinstance(value, np.ndarray):
        value = np.asarray(value)  # no np.matrix and no masked array
        array = value.astype(np.float64) if value.dtype == np.longdouble else value
        kind, dtype = "numpy", array.dtype.name
    else:
        return _plain_value(value)
    if array.dtype.kind == "O":  # may be large integers
        return _plain_value(array.tolist())
    if array.dtype.name not in _DTYPES["numpy"]:
        return _opaque(value)
    flat = array.reshape(-1)
    plain: dict[str, Any] = {kind: dtype, "shape": list(array.shape)}
    if flat.size > 8 and (flat == flat[0]).all():
        plain["fill"] = _plain_value(flat[0].item())
    elif array.dtype.kind == "f" and not np.isfinite(flat).all():
        plain["data"] = [_plain_value(number) for number in flat.tolist()]
    else:
        plain["data"] = flat.tolist()
    return plain


def tensor_from_plain(name: str, plain: Any, allowance: Allowance) -> Any:
    """Return the value of tensor `name` that `plain_tensor` wrote as `plain`.

    Raise RecordingError if `plain` is invalid.
    """
    if isinstance(plain, dict) and "rows" in plain:
        count = plain.get("count")
        if name not in ROW_INPUTS or type(count) is not int or not 0 <= count < 1 << 31:
            raise RecordingError(f"{name}: invalid rows")
        return HostRows(None, _text(plain["rows"]), count)
    kind = next((kind for kind in _DTYPES if isinstance(plain, dict) and kind in plain), None)
    if kind is None:
        return value_from_plain(plain)
    dtype, shape = plain[kind], _shape(name, plain.get("shape"))
    if not isinstance(dtype, str) or dtype not in _DTYPES[kind]:
        raise RecordingError(f"{name}: a recording must not have {kind} tensors of that dtype")
    storage = np.dtype("float32" if dtype == "bfloat16" else dtype)
    is_filled = "fill" in plain
    data = [plain["fill"]] if is_filled else plain.get("data")
    size = 1 if is_filled else math.prod(shape)
    array = _array(name, data, storage, size)
    if is_filled:
        allowance.take(name, math.prod(shape))
    if kind == "numpy":
        return np.broadcast_to(array[0], shape) if is_filled else array.reshape(shape)
    tensor = torch.from_numpy(array).to(getattr(torch, dtype))
    return tensor[0].expand(shape) if is_filled else tensor.reshape(shape)


def _shape(name: str, shape: Any) -> list[int]:
    is_list = isinstance(shape, list) and len(shape) <= _MAX_DEPTH
    if not is_list or any(type(n) is not int or not 0 <= n <= _LONGEST for n in shape):
        raise RecordingError(f"{name} must have a valid shape")
    lengths: list[int] = shape
    if math.prod(lengths) > _MOST_VALUES:
        raise RecordingError(f"{name} must have a valid shape, of at most {_MOST_VALUES} values")
    return lengths


def _array(name: str, data: Any, dtype: np.dtype[Any], size: int) -> np.ndarray:
    """Return `data`, the recorded numbers of the tensor `name`, as an array."""
    if not isinstance(data, list) or len(data) != size:
        raise RecordingError(f"{name} must have {size} values, as its shape says")
    if dtype.kind == "f" and dict in set(map(type, data)):
        data = [_not_finite(item) if isinstance(item, dict) else item for item in data]
    if not set(map(type, data)) <= _ITEMS[dtype.kind]:
        raise RecordingError(f"{name} must have values of dtype {dtype}")
    try:
        with np.errstate(over="ignore"):
            return np.array(data, dtype=dtype)
    except OverflowError as error:
        raise RecordingError(f"{name}: {error}") from error


def _plain_value(value: Any, depth: int = 0) -> Any:
    if isinstance(value, np.longdouble):
        value = float(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (np.ndarray, torch.Tensor)):
        if is_too_large("", value):
            return _opaque(value)
        # a keyword may be an array of one element; a list is read alike, but a number may not be:
        # an infinite `deadline_s` means no limit, an array of it is refused
        value = value.tolist() if depth else [value.item()]
    if value is None or isinstance(value, bool):
        return value
    # Values of subclasses are converted, because JSON would lack them, or depend on their own code.
    if isinstance(value, float):
        number = float.__pos__(value)
        return number if math.isfinite(number) else {"float": str(number)}
    if isinstance(value, int):
        integer = int.__index__(value)
        return integer if -(2**63) <= integer < 2**64 else {"int": hex(integer)}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (list, tuple)) and depth < _MAX_DEPTH:
        return [_plain_value(item, depth + 1) for item in value]
    return _opaque(value)


def _plain_weights(value: Any) -> Any:
    """Return the result of `without_weights` as JSON values, without reading every weight."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested or value.is_meta:
            return _opaque(value)
        kind, is_float = "torch", value.dtype.is_floating_point
    elif isinstance(value, np.ndarray):
        kind, is_float = "numpy", value.dtype.kind == "f"
    else:
        return plain_tensor(value)
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in _DTYPES[kind] or dtype == "bool":
        dtype = "float32" if is_float else "int32"
    shape = [min(length, _LONGEST) for length in value.shape]
    return {kind: dtype, "shape": shape, "fill": 0}


def _opaque(value: Any) -> dict[str, str]:
    return {"opaque": type(value).__name__}


def value_from_plain(plain: Any, depth: int = 0) -> Any:
    """Return a number, a string, a list of these, or an object that replaces the original."""
    if isinstance(plain, list):
        if depth >= _MAX_DEPTH:
            raise RecordingError(f"lists are nested more than {_MAX_DEPTH} deep")
        return [value_from_plain(item, depth + 1) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if "processor" in plain:
        return recorded_processor(_text(plain["processor"]), plain.get("prepares") is True)
    if "int" in plain:
        return _integer(plain["int"])
    return _not_finite(plain) if "float" in plain else Opaque(_text(plain.get("opaque")))


def _integer(digits: Any) -> int:
    try:
        return int(digits, 16)
    except (TypeError, ValueError):
        raise RecordingError('{"int": ...} must be a hexadecimal number') from None


def _not_finite(plain: Mapping[str, Any]) -> float:
    name = plain.get("float")
    if not isinstance(name, str) or name not in _NOT_FINITE:
        raise RecordingError('{"float": ...} must be "nan", "inf" or "-inf"')
    return _NOT_FINITE[name]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise RecordingError("the replacement of an object must have a string as its name")
    return value
