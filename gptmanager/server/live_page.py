"""The live page: shows the schedule of the running server in a browser, next to a chat."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from gptmanager.callbacks import LivePage
from gptmanager.callbacks.live_page.page_server import page_headers
from gptmanager.server.engine.engine import Engine
from gptmanager.server.errors import ApiError
from gptmanager.server.settings import ServerSettings


def routes(engine: Engine, settings: ServerSettings) -> list[BaseRoute]:
    """Return the routes `/` (the page) and `/live/events` (the events that the page shows).

    Without viewers, the loop does no work for the page.
    """
    live_page = LivePage(num_outside=lambda: engine.counts.waiting)
    live_page.attach(engine.manager)

    chat = files("gptmanager.server").joinpath("chat_box.html").read_bytes()
    html = live_page.html.replace(b"</body>", chat + b"</body>")
    headers = page_headers(html)

    async def page(request: Request) -> Response:
        return Response(html, media_type="text/html", headers=headers)

    async def events(request: Request) -> Response:
        headers = {"Cache-Control": "no-store"}
        if request.method == "HEAD":  # not a viewer
            return Response(media_type="text/event-stream", headers=headers)
        if live_page.is_full:
            message = "the live page has its maximum number of viewers: close one, or try later"
            raise ApiError(503, message, headers={"Retry-After": "10"})
        return StreamingResponse(until_drained(), media_type="text/event-stream", headers=headers)

    async def until_drained() -> AsyncIterator[bytes]:
        async for event in live_page.events():
            yield event
            if engine.is_draining and not engine.counts.running:  # shutdown waits for this stream
                return

    return [Route("/", page), Route("/live/events", events)]
