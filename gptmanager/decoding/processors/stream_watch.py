"""`watched`: finds logits post-processors that work on another stream than the model's.

It is for debugging. Work on another stream may read logits before they are computed, or write to
them after tokens were sampled, but in most runs neither happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gptmanager.kernels.torch_operations import TorchOperations

_HELD_CYCLES = 500_000_000  # cycles of the device's clock, about a quarter of a second
_SETTLED_S = 0.02  # seconds; work on other streams has finished by then


def watched(call: Callable[[], Any], logits: Tensor) -> tuple[Any, str]:
    """Return the result of `call()`, and a description of its work on another stream, or ''.

    torch's operations are inspected one by one. Operations of other libraries, such as CuPy, are
    found by their effect: the model's stream is busy during the call, so only work on another
    stream can change the logits. On the CPU the description is ''.
    """
    device = logits.device
    if device.type != "cuda":
        return call(), ""
    own = torch.cuda.current_stream(device)
    before = logits.clone()
    own.synchronize()
    torch.cuda._sleep(_HELD_CYCLES)  # type: ignore[no-untyped-call]
    with _Operations(device, own.cuda_stream) as operations:
        result = call()
    if operations.elsewhere:
        return result, f"ran {operations.elsewhere} on another stream than the model's"
    if own.query():  # the call has waited for the model's stream, which is allowed
        return result, ""
    time.sleep(_SETTLED_S)
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        changed = not torch.equal(logits, before) and not own.query()
    return result, "changed the logits on another stream than the model's" if changed else ""


class _Operations(TorchOperations):  # type: ignore[no-untyped-call]
    """Records the first operation that runs on another stream of `device` than `own`."""

    def __init__(self, device: torch.device, own: int) -> None:
        super().__init__()
        self._device = device
        self._own = own
        self.elsewhere = ""

    def see(self, function: Any, args: Sequence[Any], result: Any) -> Any:
        if not self.elsewhere and torch.cuda.current_stream(self._device).cuda_stream != self._own:
            self.elsewhere = str(function)
        return result
