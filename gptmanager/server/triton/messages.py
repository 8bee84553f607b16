"""`InferRequest` and `InferResponse`: a call and its responses, independent of HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Union

import numpy as np

from gptmanager.server.engine.call import Call
from gptmanager.server.errors import ApiError

Parameter = Union[bool, int, float, str]
PARAMETERS = ("priority", "timeout")  # parameters of a call that change how it runs
MAX_ID = 1024  # characters of a call's id, which each of its responses repeats


class InputTensor(NamedTuple):
    """An input, with Triton's name of its datatype. The first dimension of `array` is the batch."""

    datatype: str
    array: np.ndarray


@dataclass(slots=True)
class InferRequest:
    """A call. `outputs` are the names of the requested outputs; None means all.

    If `may_have_many`, the client accepts several responses. `call`: the engine's handle of the
    call; None until the requests are submitted.
    """

    model_name: str
    inputs: Mapping[str, InputTensor]
    model_version: str = ""
    id: str = ""
    outputs: Sequence[str] | None = None
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    may_have_many: bool = False
    call: Call | None = None

    def log_fields(self) -> dict[str, Any]:
        """Return the fields of the log line about the call, as far as they are known."""
        fields = {"answer": self.id or None, "model": self.model_name}
        return fields if self.call is None else {**fields, **self.call.log_fields()}


class InferResponse(NamedTuple):
    """One response to a call; the last one has `is_final`. `error`: why a batch row failed."""

    request: InferRequest
    outputs: Mapping[str, np.ndarray]
    is_final: bool
    error: ApiError | None = None
