"""Whether the server lives, whether it takes requests, and which version it is."""

from __future__ import annotations

import sys

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gptmanager import __version__
from gptmanager.server.engine import Engine
from gptmanager.server.responses import json_response
from gptmanager.server.settings import ServerSettings


def routes(engine: Engine, settings: ServerSettings) -> list[BaseRoute]:
    """/health and /health/ready: requests are taken; /health/live: the loop runs; /version."""

    async def live(request: Request) -> Response:
        health = engine.manager.health()
        is_well = health.alive and health.progressing
        return json_response({"status": "live" if is_well else "dead"}, 200 if is_well else 503)

    async def ready(request: Request) -> Response:
        is_ready = engine.is_ready
        status = "ready" if is_ready else "draining" if engine.is_draining else "dead"
        return json_response({"status": status}, 200 if is_ready else 503)

    async def version(request: Request) -> Response:
        python = ".".join(map(str, sys.version_info[:3]))
        return json_response({"version": __version__, "python": python})

    return [
        Route("/health", ready),
        Route("/health/ready", ready),
        Route("/health/live", live),
        Route("/version", version),
    ]
