"""Another rank's part in a command: rank 0 does what it says, the others compute with it."""

from __future__ import annotations

from typing import Any

from gptmanager.callbacks import broadcast
from gptmanager.config import ModelType, OptionalParams, SchedulerConfig
from gptmanager.manager.gpt_manager import GptManager
from gptmanager.ranks.world import find_world
from gptmanager.request.inference_request import NamedTensor


def is_follower(params: OptionalParams) -> bool:
    """Is this another rank than 0?"""
    return find_world(params.parallel_config).layout.rank > 0


def follow(
    source: Any,
    params: OptionalParams,
    scheduler: SchedulerConfig,
    model_type: ModelType,
    max_beam_width: int = 1,
) -> None:
    """Until rank 0's manager ends. Raises what ended this rank, if it failed."""
    get, poll = broadcast()
    params.on_progress = None
    given = source, model_type, max_beam_width, scheduler
    with GptManager(*given, get, _send, poll, None, params) as manager:
        manager.wait()
    if manager.exception is not None:
        raise manager.exception


def _send(request_id: int, tensors: list[NamedTensor], is_final: bool, error: str) -> None:
    """Rank 0 answers."""
