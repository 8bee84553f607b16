"""`iterate()`, and what it iterates over."""

from gptmanager.loop.token_loop import TokenLoop

__all__ = ["TokenLoop"]
