"""A file of requests, run by a manager."""

from gptmanager.run.command import add_command

__all__ = ["add_command"]
