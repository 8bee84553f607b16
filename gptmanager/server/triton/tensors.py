"""`TensorSpec`: a tensor that a model takes or gives. `read_rows`: a call's inputs, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from gptmanager.memory.checkpoint_files import shown
from gptmanager.server.triton.errors import invalid
from gptmanager.server.triton.messages import InputTensor

_FLOATS = ("FP16", "FP32", "BF16")


class TensorSpec(NamedTuple):
    """`dims`: without the batch, -1 for any size. `is_of_model`: in any float datatype."""

    name: str
    datatype: str
    dims: tuple[int, ...] = (1,)
    is_optional: bool = True
    is_of_model: bool = False

    @property
    def is_scalar(self) -> bool:
        return self.dims == (1,) and self.datatype != "BYTES"


def table(*rows: tuple[Any, ...]) -> dict[str, TensorSpec]:
    """Specs by name. A row: the names, divided by spaces, and the rest of a spec."""
    specs = [TensorSpec(name, *rest) for names, *rest in rows for name in names.split()]
    return {spec.name: spec for spec in specs}


def read_rows(
    model: str,
    specs: Mapping[str, TensorSpec],
    inputs: Mapping[str, InputTensor],
    most_rows: int,
) -> list[dict[str, Any]]:
    """For each row of the batch its inputs by name: arrays without the batch dimension, and what
    is a scalar as Python's. ApiError for an input that `specs` does not know, or that does not fit.
    """
    for name, tensor in inputs.items():
        if name not in specs:
            raise invalid(
                name, f"unexpected inference input {shown(name)} for model {shown(model)}"
            )
        _check(model, specs[name], tensor)
    for spec in specs.values():
        if not spec.is_optional and spec.name not in inputs:
            raise invalid(
                spec.name, f"input {shown(spec.name)} is missing for model {shown(model)}"
            )
    first, count = next((name, len(it.array)) for name, it in inputs.items())
    for name, tensor in inputs.items():
        if len(tensor.array) != count:
            raise invalid(
                name,
                f"input {shown(name)} has batch size {len(tensor.array)} for model "
                f"{shown(model)}, while {shown(first)} has {count}",
            )
    if not 1 <= count <= most_rows:
        raise invalid(
            None,
            f"inference request batch-size must be from 1 to {most_rows} for model "
            f"{shown(model)}, it is {count}",
        )
    return [
        {name: _of_row(specs[name], tensor.array[row]) for name, tensor in inputs.items()}
        for row in range(count)
    ]


def _check(model: str, spec: TensorSpec, tensor: InputTensor) -> None:
    if tensor.datatype != spec.datatype and not (spec.is_of_model and tensor.datatype in _FLOATS):
        raise invalid(
            spec.name,
            f"inference input {shown(spec.name)} data-type is {shown(tensor.datatype)}, but model "
            f"{shown(model)} expects '{spec.datatype}'",
        )
    shape = tensor.array.shape
    fits = len(shape) == len(spec.dims) + 1 and all(
        size in (-1, given) for size, given in zip(spec.dims, shape[1:], strict=True)
    )
    if not fits:
        raise invalid(
            spec.name,
            f"unexpected shape for input {shown(spec.name)} for model {shown(model)}. "
            f"Expected {[-1, *spec.dims]}, got {list(shape)}",
        )


def _of_row(spec: TensorSpec, array: np.ndarray) -> Any:
    return array.reshape(-1)[0].item() if spec.is_scalar else array
