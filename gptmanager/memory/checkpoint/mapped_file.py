"""`MappedFile`: maps a safetensors file, and returns its tensors without copying them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import orjson
import torch
from torch import Tensor

_LENGTH_BYTES = 8  # a file begins with the length of its header, in this many bytes


class MappedFile:
    """A mapped safetensors file. The caller must have checked the file.

    Pages are read when they are first used, and shared with other processes that map the file.
    Writes to the tensors do not change the file.
    """

    def __init__(self, file: Path) -> None:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            header = orjson.loads(opened.read(length))
        self._bytes = torch.from_file(
            str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8
        )
        self._places: dict[str, tuple[int, int]] = {}
        for name, info in header.items():
            if name != "__metadata__":
                first, end = (_LENGTH_BYTES + length + at for at in info["data_offsets"])
                self._places[name] = first, end

    def joined(self, names: Sequence[str], dtype: torch.dtype) -> Tensor | None:
        """Return the tensors `names`, which follow each other in the file, as one 1-D tensor.

        Return None if the tensors do not follow each other in this order, if all are empty, if
        they extend past the end of the file, or if their address is not a multiple of the dtype's
        size.
        """
        places = [self._places[name] for name in names]
        first, end = places[0][0], places[-1][1]
        ends_meet = all(one[1] == other[0] for one, other in zip(places, places[1:], strict=False))
        if not ends_meet or first % dtype.itemsize or not first < end <= len(self._bytes):
            return None
        return self._bytes[first:end].view(dtype)
