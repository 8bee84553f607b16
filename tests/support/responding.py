"""Responses as a manager would send them, and a manager's part played by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from gptmanager import FinishReason, NamedTensor

METRICS = [0.25, 0.5, 0.75, 1.0, 0.0, 3.0, 2.0, 1.0, 1.0]


def streamed(tokens: Sequence[int], offset: int = 0) -> list[NamedTensor]:
    """A streaming response that is not final."""
    return [
        NamedTensor("output_ids", torch.tensor([[list(tokens)]], dtype=torch.int32)),
        NamedTensor("sequence_length", torch.tensor([[len(tokens)]], dtype=torch.int32)),
        NamedTensor("output_offset", torch.tensor([offset], dtype=torch.int32)),
    ]


def ending(reason: FinishReason = FinishReason.LENGTH, beams: int = 1) -> list[NamedTensor]:
    """What a final response adds."""
    return [
        NamedTensor("finish_reasons", torch.tensor([[reason] * beams], dtype=torch.int32)),
        NamedTensor("request_metrics", torch.tensor(METRICS, dtype=torch.float64)),
    ]


def whole(
    *beams: Sequence[int], pad: int = 0, width: int = 12, reason: FinishReason = FinishReason.LENGTH
) -> list[NamedTensor]:
    """The final response to a request that does not stream; `beams` as `output_ids` holds them."""
    rows = [[*beam, *[pad] * (width - len(beam))] for beam in beams]
    return [
        NamedTensor("output_ids", torch.tensor([rows], dtype=torch.int32)),
        NamedTensor("sequence_length", torch.tensor([[len(b) for b in beams]], dtype=torch.int32)),
        *ending(reason, beams=len(beams)),
    ]


def in_thread(function: Callable[..., Any], *args: Any, **keywords: Any) -> Future[Any]:
    """A future of a call that runs in a thread of its own."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **keywords))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run).start()
    return future


class ManagerStub:
    """What an attached queue sees of a manager; `end` makes it stop or die."""

    def __init__(self) -> None:
        self.exception: BaseException | None = None
        self.notified = threading.Semaphore(0)
        self._ended = threading.Event()

    def notify(self) -> None:
        self.notified.release()

    def wait(self, timeout: float | None = None) -> bool:
        return self._ended.wait(timeout)

    def end(self, exception: BaseException | None = None) -> None:
        self.exception = exception
        self._ended.set()
