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
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}
_ALIGNMENT = 64


class SafetensorsWriter:
    """A context manager that writes a new file.

    `tensors` maps the name of each tensor to its shape and dtype. The file has the tensors in the
    order of this mapping. The first tensor begins at a multiple of 64 bytes, the size of a CPU
    cache line. One or more calls of `write` write each tensor, from its first element to its last.
    Raises FileExistsError if the file exists.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        self._next: dict[str, int] = {}
        for name, (shape, dtype) in tensors.items():
            end = offset + math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [offset, end],
            }
            self._next[name], offset = offset, end
        encoded = json.dumps(header).encode()
        encoded += b" " * (-(8 + len(encoded)) % _ALIGNMENT)
        self._file, self._start = path.open("xb"), 8 + len(encoded)
        self._file.write(len(encoded).to_bytes(8, "little") + encoded)

    def write(self, name: str, values: Tensor) -> None:
        """Write the next elements of a tensor: `values`, on the CPU, in the tensor's dtype."""
        self._file.seek(self._start + self._next[name])
        self._next[name] += self._file.write(
            values.contiguous().flatten().view(torch.uint8).numpy().data
        )

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
