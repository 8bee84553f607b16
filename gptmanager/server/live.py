"""The live page of the server: its schedule while it runs, in a browser."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from gptmanager.callbacks import LivePage
from gptmanager.server.engine.engine import Engine
from gptmanager.server.errors import ApiError
from gptmanager.server.settings import ServerSettings


def routes(engine: Engine, settings: ServerSettings) -> list[BaseRoute]:
    """/: the page; /live/events: its events. The loop does nothing for it while nobody looks."""
    live_page = LivePage(num_outside=lambda: engine.counts.waiting)
    live_page.attach(engine.manager)

    async def page(request: Request) -> Response:
        return Response(live_page.html, media_type="text/html", headers=live_page.headers)

    async def events(request: Request) -> Response:
        headers = {"Cache-Control": "no-store"}
        if request.method == "HEAD":  # nobody looks
            return Response(media_type="text/event-stream", headers=headers)
        if live_page.is_full:
            message = "as many browsers as may look at the live page do so"
            raise ApiError(503, message, headers={"Retry-After": "10"})
        return StreamingResponse(until_drained(), media_type="text/event-stream", headers=headers)

    async def until_drained() -> AsyncIterator[bytes]:
        async for event in live_page.events():
            yield event
            if engine.is_draining and not engine.counts.running:  # the server waits for its streams
                return

    return [Route("/", page), Route("/live/events", events)]
