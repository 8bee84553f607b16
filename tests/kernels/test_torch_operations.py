"""Torch's operations as they are told to those who watch."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gptmanager.decoding.processors.stream_watch import _Operations
from gptmanager.kernels.torch_operations import TorchOperations


def test_operations_are_seen_and_their_results_may_be_replaced() -> None:
    class Doubled(TorchOperations):
        seen: tuple[Any, ...] = ()

        def see(self, function: Any, args: Sequence[Any], result: Any) -> Any:
            self.seen += (function, *args)
            return result * 2

    x = torch.ones(3)
    with Doubled() as doubled:
        result = x.add(x, alpha=3)
    assert torch.equal(result, torch.full((3,), 8.0)) and torch.equal(x + x, 2 * x)
    assert doubled.seen[0] is torch.ops.aten.add.Tensor
    assert doubled.seen[1] is x and doubled.seen[2] is x and len(doubled.seen) == 3


def test_the_first_operation_on_another_stream_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = iter([7, 8, 7, 9])
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=next(streams))
    )
    x = torch.ones(3)
    with _Operations(torch.device("cuda"), 7) as operations:
        y = x + 1
        assert operations.elsewhere == ""
        z = y * 2
        z - 1
    assert operations.elsewhere == "aten.mul.Tensor" and torch.equal(z, torch.full((3,), 4.0))
