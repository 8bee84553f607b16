"""A host that pauses its manager when a certain response arrives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gptmanager.testing import RecordingCallbacks


class PausingHost(RecordingCallbacks):
    """Pauses its manager at each response for which `pauses` returns True.

    `pauses(of_all, of_request, is_final)` gets the number of responses to all requests and to this
    request, with this one. A test that sees the response finds its manager paused: if the host
    recorded first, the test could call `resume_generation` before `pause_generation` has run.
    """

    def __init__(self, pauses: Callable[[int, int, bool], bool]) -> None:
        super().__init__()
        self.pauses = pauses

    def send_response(self, request_id: int, tensors: Any, is_final: bool, error: str) -> None:
        if self.pauses(len(self.responses) + 1, len(self.of(request_id)) + 1, is_final):
            assert self.manager is not None
            self.manager.pause_generation()
        super().send_response(request_id, tensors, is_final, error)
