"""`TorchOperations`: told of each operation of torch that the calling thread runs meanwhile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class TorchOperations(TorchDispatchMode, ABC):  # type: ignore[no-untyped-call]
    """Enter it; a subclass says in `see` what it makes of an operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @abstractmethod
    def see(self, function: Any, result: Any) -> Any:
        """`function`, an overload, gave `result`. The caller gets what this returns."""


def _run(
    self: TorchOperations,
    function: Any,
    types: Sequence[type],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    return self.see(function, function(*args, **(kwargs or {})))


# In a class's body torch would wrap it, and import its compiler (a second) at the first call.
TorchOperations.__torch_dispatch__ = _run  # type: ignore[assignment]
