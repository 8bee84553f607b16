"""`TorchOperations`: a context manager that sees each torch operation of the calling thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class TorchOperations(TorchDispatchMode, ABC):  # type: ignore[no-untyped-call]
    """A context manager. A subclass handles each operation in `see`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @abstractmethod
    def see(self, function: Any, args: Sequence[Any], result: Any) -> Any:
        """Return the value that replaces the `result` of `function(*args)`, an `OpOverload`."""


def _run(
    self: TorchOperations,
    function: Any,
    types: Sequence[type],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    return self.see(function, args, function(*args, **(kwargs or {})))


# Assigned after the class: torch wraps a `__torch_dispatch__` that the class body defines, and the
# first call of the wrapper imports torch's compiler (1 s).
TorchOperations.__torch_dispatch__ = _run  # type: ignore[assignment]
