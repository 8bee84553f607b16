"""Requests and named tensors, with the constructors of `tensorrt_llm.bindings`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import gptmanager


class InferenceRequest(gptmanager.InferenceRequest):
    """`InferenceRequest(request_id, logits_post_processor_callback=None)`.

    The id -1 means 2**64 - 1. The second argument may be a dict of tensors instead of a callback.
    Each tensor is a property, which is None until it is set.
    """

    def __init__(
        self,
        request_id: int,
        logits_post_processor_callback: Callable[..., Any] | Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        given = logits_post_processor_callback
        if isinstance(given, Mapping):
            keywords["tensors"] = given
        elif given is not None:
            keywords["logits_post_processor"] = given
        super().__init__(as_id(request_id), **keywords)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if str(error).startswith("Undefined tensor"):
                return None
            raise


@dataclass(slots=True, eq=False)
class NamedTensor:
    """A tensor of a response."""

    tensor: torch.Tensor
    name: str


def as_id(request_id: int) -> int:
    """Return the request id, with -1 converted to 2**64 - 1 as in C++."""
    return 2**64 - 1 if request_id == -1 else request_id
