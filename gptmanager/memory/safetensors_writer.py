"""`SafetensorsWriter`: writes a safetensors file tensor by tensor, in slices.

The safetensors library can only write tensors that are all in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}


class SafetensorsWriter:
    """A context manager that writes a file. `tensors`: the shape and dtype of each tensor.

    The tensors are written in this order, each by one or more calls of `write`, from its first
    element to its last.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, (shape, dtype) in tensors.items():
            end = offset + math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [offset, end],
            }
            offset = end
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        self._file = path.open("xb")
        self._file.write(len(encoded).to_bytes(8, "little") + encoded)

    def write(self, values: Tensor) -> None:
        """Append the next elements, in the dtype that was announced."""
        self._file.write(values.contiguous().flatten().view(torch.uint8).numpy().data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
