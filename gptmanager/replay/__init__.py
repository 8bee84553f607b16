"""Runs a recording again without its model, and finds where the new run differs."""

from typing import TYPE_CHECKING

from gptmanager.environment.lazy_names import lazy_names

if TYPE_CHECKING:
    from gptmanager.recorder.difference import difference
    from gptmanager.replay.replaying import completed, replay

__all__ = ["completed", "difference", "replay"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "gptmanager.recorder.difference": ("difference",),
        "gptmanager.replay.replaying": (
            "completed",
            "replay",
        ),
    },
)
