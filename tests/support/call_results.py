"""The results of a call of the server's engine, for tests that need nothing else of it."""

from __future__ import annotations

from gptmanager.callbacks import GenerationResult
from gptmanager.server.engine.call import Call, check_in_time


async def results_of(call: Call) -> list[GenerationResult]:
    """All results, in the order of the requests; an error if one fails or times out."""
    found: dict[int, GenerationResult] = {}
    async for index, part in call.parts():
        if part.result is not None:
            found[index] = part.result
            check_in_time(part.result)
    return [found[index] for index in sorted(found)]
