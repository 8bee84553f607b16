"""`InferRequest` and `InferResponse`: a call and its answers, whatever has carried them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Union

import numpy as np

from gptmanager.server.errors import ApiError

Parameter = Union[bool, int, float, str]
PARAMETERS = ("priority", "timeout")  # of a call; others have no effect and are not read
MAX_ID = 1024  # characters of a call's id, which each of its responses repeats


class InputTensor(NamedTuple):
    """`datatype` by Triton's name; `array` has the batch as its first dimension."""

    datatype: str
    array: np.ndarray


@dataclass(slots=True)
class InferRequest:
    """`outputs` None: the client does not say which it wants, so it gets all.

    `may_have_many`: the client can take several responses.
    """

    model_name: str
    inputs: Mapping[str, InputTensor]
    model_version: str = ""
    id: str = ""
    outputs: Sequence[str] | None = None
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    may_have_many: bool = False


class InferResponse(NamedTuple):
    """One answer of several. `is_final`: none comes after it. `error`: a row of it has failed."""

    request: InferRequest
    outputs: Mapping[str, np.ndarray]
    is_final: bool
    error: ApiError | None = None
