"""Final responses for a world that listens to nothing but why a request ended.

A true one holds as many tokens as were asked for, whoever asked: nobody reads them here.
"""

from __future__ import annotations

import torch

from gptmanager.config import FinishReason
from gptmanager.loop.active_request import ActiveRequest
from gptmanager.loop.extras import HeldExtras
from gptmanager.loop.responses import final_beams
from gptmanager.request.inference_request import NamedTensor


def finish_reasons(
    request: ActiveRequest, reason: FinishReason, end: int, extras: HeldExtras
) -> list[NamedTensor]:
    """Of a final response only `finish_reasons` is made."""
    reasons = [reason]
    if request.search is not None:
        reasons = final_beams(request, request.search, reason).reasons
    return [NamedTensor("finish_reasons", torch.tensor([reasons], dtype=torch.int32))]
