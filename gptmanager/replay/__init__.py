"""A recorded run, once more and without its model: where does it go another way?"""

from gptmanager.recorder.difference import difference
from gptmanager.replay.command import add_command
from gptmanager.replay.replaying import completed, replay

__all__ = ["add_command", "completed", "difference", "replay"]
