"""Runs a command on a rank other than 0.

Only rank 0 takes requests and prints results. The other ranks compute their parts of the model.
"""

from __future__ import annotations

from typing import Any

from gptmanager.callbacks import broadcast
from gptmanager.config import ModelType, OptionalParams, SchedulerConfig
from gptmanager.lifecycle.log import logger
from gptmanager.manager.gpt_manager import GptManager
from gptmanager.ranks.world import find_world, launched_size
from gptmanager.request.inference_request import NamedTensor


def is_follower(params: OptionalParams) -> bool:
    """Return whether this process is a rank other than 0.

    Warn if a launcher has started several processes that are not ranks of one model.
    """
    size = launched_size()
    if params.parallel_config is None and size > 1:
        logger.warning(
            "a launcher has started %d processes, and each of them runs everything: pass "
            "--tensor-parallel-size or --pipeline-parallel-size, so that they share one model",
            size,
        )
    return find_world(params.parallel_config).layout.rank > 0


def follow(
    source: Any,
    params: OptionalParams,
    scheduler: SchedulerConfig,
    model_type: ModelType,
    max_beam_width: int = 1,
) -> None:
    """Run this rank until rank 0's manager ends. Raise the error with which this rank fails."""
    get, poll = broadcast()
    params.on_progress = None
    given = source, model_type, max_beam_width, scheduler
    with GptManager(*given, get, _send, poll, None, params) as manager:
        manager.wait()
    if manager.exception is not None:
        raise manager.exception


def _send(request_id: int, tensors: list[NamedTensor], is_final: bool, error: str) -> None:
    """Do nothing: rank 0 sends the responses."""
