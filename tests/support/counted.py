"""Lists that count how often an item of theirs is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Counted(list[Any]):
    """`num_read`: items read so far."""

    num_read = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self.num_read += 1
            yield item

    def __getitem__(self, index: Any) -> Any:
        self.num_read += 1
        return super().__getitem__(index)
