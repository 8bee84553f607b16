"""Endpoints that report whether the server is alive and ready, and its version."""

from __future__ import annotations

import sys

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gptmanager import __version__
from gptmanager.server.engine.engine import Engine
from gptmanager.server.errors import RETRY_AFTER_S
from gptmanager.server.http.responses import json_response
from gptmanager.server.settings import ServerSettings


def routes(engine: Engine, settings: ServerSettings) -> list[BaseRoute]:
    """Return the routes of the health checks, and of /version.

    /health and /health/ready check that requests are accepted. /health/live checks that the loop
    runs and makes progress.
    """

    async def live(request: Request) -> Response:
        is_live = engine.is_live
        return _status_response("live" if is_live else "dead", is_live)

    async def ready(request: Request) -> Response:
        is_ready = engine.is_ready
        status = "ready" if is_ready else "draining" if engine.is_draining else "dead"
        return _status_response(status, is_ready)

    async def version(request: Request) -> Response:
        python = ".".join(map(str, sys.version_info[:3]))
        return json_response({"version": __version__, "python": python})

    return [
        Route("/health", ready),
        Route("/health/ready", ready),
        Route("/health/live", live),
        Route("/version", version),
    ]


def _status_response(status: str, is_well: bool) -> Response:
    headers = {} if is_well else {"Retry-After": str(RETRY_AFTER_S)}
    return json_response({"status": status}, 200 if is_well else 503, headers)
