"""The token loop: one `iterate()` call runs one iteration. Also the state of active requests."""

from gptmanager.loop.token_loop import TokenLoop

__all__ = ["TokenLoop"]
