"""The token loop and the state of active requests. One `iterate()` call runs one iteration."""

from gptmanager.loop.token_loop import TokenLoop

__all__ = ["TokenLoop"]
