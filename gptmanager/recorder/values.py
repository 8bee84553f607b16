"""Values of a recording as JSON and back: dataclasses, named tuples, requests with their tensors.

Knows types, not their meaning: a field that is added to `Schedule` or `Row` travels by itself.
A dataclass is an object by field name, a named tuple a list in the order that the recording's
header gives, a set a sorted list.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar, cast

import numpy as np
import orjson
import torch

from gptmanager.api import InferenceRequest
from gptmanager.errors import GptManagerError, response_text
from gptmanager.host_rows import HostRows
from gptmanager.post_processor import RequestProcessor, is_post_processor, read_post_processor

_T = TypeVar("_T")

_DEFAULTS = {  # of a request's attributes
    "is_streaming": False,
    "logits_post_processor": None,
    "client_id": None,
    "priority": 0.5,
    "deadline_s": None,
    "queue_timeout_s": None,
    "cache_salt": None,
    "retention_priority": None,
}
_UNIONS = (typing.Union, types.UnionType)


class RecordingError(GptManagerError, ValueError):
    """A recording cannot be written, read, or understood."""


class RecordedError(Exception):
    """An error that a recording tells of; its text is that of the original, class included."""

    def __str__(self) -> str:
        return str(self.args[0])


class Opaque:
    """Stands for a value that no JSON can hold. Admission refuses it as it refused the original."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


class RecordedProcessor:
    """Stands for a logits post-processor. A replay never calls it: the tokens are recorded."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> None:
        raise RecordingError(f"the logits post-processor {self.name} was not recorded")


class RecordedPreparation(RecordedProcessor):
    """One for which the request waited."""

    def prepare(self, device: str) -> None:
        self()


def to_json(value: Any) -> bytes:
    """One line, without its end."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    return orjson.dumps(value, default=_plain, option=options)


def _plain(value: Any) -> Any:
    """What orjson does not know, in what it knows."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, InferenceRequest):
        return plain_request(value)
    if isinstance(value, BaseException):
        return str(value) if isinstance(value, RecordedError) else response_text(value)
    if isinstance(value, RequestProcessor):
        return {"processor": value.name, "prepares": value.prepares}
    if isinstance(value, HostRows):
        return value.digest
    if isinstance(value, np.ndarray):  # not contiguous, or of a dtype that orjson lacks
        return value.tolist()
    raise RecordingError(f"a {type(value).__name__} cannot be recorded: {value!r}")


def plain_fields(value: Any) -> Any:
    """A dataclass as JSON values, and those in its fields; enums by name, to be legible."""
    if dataclasses.is_dataclass(value):
        names = (f.name for f in dataclasses.fields(value))
        return {name: plain_fields(getattr(value, name)) for name in names}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [plain_fields(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def from_json(hint: type[_T], data: Any, names: Mapping[str, list[str]]) -> _T:
    """A value of type `hint`; `names`: the fields of each named tuple when it was written.

    A field that the recording does not know yet has its default, one that is gone is dropped.
    """
    return cast(_T, _decode(hint, data, names))


def _decode(hint: Any, data: Any, names: Mapping[str, list[str]]) -> Any:
    origin = typing.get_origin(hint)
    if data is None and hint is float:
        return -math.inf  # a log probability: JSON has no such number
    if data is None or hint in (int, float, bool, str, Any):
        return data
    if origin in _UNIONS:
        inner = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        return _decode(inner[0], data, names) if len(inner) == 1 else data
    if origin in (tuple, frozenset):
        kinds = typing.get_args(hint)
        if origin is tuple and kinds[-1] is not ...:
            pairs = zip(kinds, data, strict=True)
            return tuple(_decode(kind, item, names) for kind, item in pairs)
        return origin(_decode_all(kinds[0], data, names))
    if hint is np.ndarray:
        return np.array(data, dtype=np.int32)
    if hint is InferenceRequest:
        return request_from_plain(data)
    if hint is RequestProcessor:
        return read_post_processor(_value_of(data))
    if hint is HostRows:
        return HostRows(None, data)
    if hint is BaseException:
        return RecordedError(data)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint[data] if isinstance(data, str) else hint(data)
    if hasattr(hint, "_fields"):
        given = dict(zip(names.get(hint.__name__, hint._fields), data, strict=False))
        return hint(**_fields(hint, given, names))
    if dataclasses.is_dataclass(hint):
        return cast(Any, hint)(**_fields(hint, data, names))
    return data


def _decode_all(hint: Any, items: list[Any], names: Mapping[str, list[str]]) -> list[Any]:
    """As `_decode` of each; quickly where they are plain named tuples, which most values are."""
    if hasattr(hint, "_fields") and names.get(hint.__name__) == list(hint._fields):
        if all(kind in (int, bool, str) for kind in _hints(hint).values()):
            return list(map(hint._make, items))
    return [_decode(hint, item, names) for item in items]


def _fields(cls: Any, given: Mapping[str, Any], names: Mapping[str, list[str]]) -> dict[str, Any]:
    hints = _hints(cls)
    known = [name for name in given if name in hints]
    return {name: _decode(hints[name], given[name], names) for name in known}


@functools.lru_cache(maxsize=64)
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def field_names(*classes: Any) -> dict[str, list[str]]:
    """The fields of the named tuples that `classes` hold, however deep, by class name."""
    found: dict[str, list[str]] = {}
    waiting = list(classes)
    seen: set[Any] = set()
    while waiting:
        hint = waiting.pop()
        if hint in seen:
            continue
        seen.add(hint)
        waiting.extend(typing.get_args(hint))
        if hasattr(hint, "_fields"):
            found[hint.__name__] = list(hint._fields)
        if hasattr(hint, "_fields") or dataclasses.is_dataclass(hint):
            waiting.extend(_hints(hint).values())
    return dict(sorted(found.items()))


# Requests ----------------------------------------------------------------------------------


def plain_request(request: InferenceRequest) -> dict[str, Any]:
    """A request as JSON values; what is None or the default is left out."""
    plain: dict[str, Any] = {"request_id": request.request_id}
    plain["tensors"] = {
        str(name): plain_tensor(value) for name, value in list(request.tensors.items())
    }
    for name, default in _DEFAULTS.items():
        value = getattr(request, name)
        if type(value) is not type(default) or value != default:
            plain[name] = _plain_value(value)
    processor = request.logits_post_processor
    if is_post_processor(processor):
        plain["logits_post_processor"] = _plain(RequestProcessor(processor))
    return plain


def request_from_plain(plain: Mapping[str, Any]) -> InferenceRequest:
    attributes = {name: _value_of(plain[name]) for name in _DEFAULTS if name in plain}
    tensors = {name: tensor_from_plain(value) for name, value in plain["tensors"].items()}
    return InferenceRequest(plain["request_id"], tensors, **attributes)


def plain_tensor(value: Any) -> Any:
    """`{"torch" | "numpy": dtype, "shape": [...], "data": [...]}`, or a plain value.

    "data" is flat; "fill" stands for many equal values.
    """
    if isinstance(value, torch.Tensor):
        kind, dtype = "torch", str(value.dtype).removeprefix("torch.")
        value = value.detach().cpu()
        array = (value.float() if dtype == "bfloat16" else value).numpy()
    elif isinstance(value, np.ndarray):
        kind, dtype, array = "numpy", str(value.dtype), value
    else:
        return _plain_value(value)
    if array.dtype.kind not in "biuf":
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


def tensor_from_plain(plain: Any) -> Any:
    kind = next((k for k in ("torch", "numpy") if isinstance(plain, dict) and k in plain), None)
    if kind is None:
        return _value_of(plain)
    dtype = plain[kind]
    storage = "float32" if dtype == "bfloat16" else dtype
    if "fill" in plain:
        array = np.full(plain["shape"], _value_of(plain["fill"]), dtype=storage)
    else:
        data = [_value_of(number) for number in plain["data"]]
        array = np.array(data, dtype=storage).reshape(plain["shape"])
    if kind == "numpy":
        return array
    return torch.from_numpy(array).to(getattr(torch, dtype))


def _plain_value(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        fits = not isinstance(value, int) or -(2**63) <= value < 2**64
        return value if fits else _opaque(value)
    if isinstance(value, (list, tuple)):
        return [_plain_value(item) for item in value]
    return _opaque(value)


def _opaque(value: Any) -> dict[str, str]:
    return {"opaque": type(value).__name__}


def _value_of(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value_of(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if "processor" in plain:
        kind = RecordedPreparation if plain.get("prepares") else RecordedProcessor
        return kind(str(plain["processor"]))
    return float(plain["float"]) if "float" in plain else Opaque(str(plain.get("opaque")))
