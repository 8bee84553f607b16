"""`HostGuard`: refuses requests of foreign web pages to a server on loopback without a key.

A page can let its own host name resolve to this machine (DNS rebinding): the header `Host` of its
requests then has this name. A page can also post text to a local address: the header `Origin` then
names the page's host. So the guard checks the hosts in both headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from gptmanager.environment.machine.loopback import is_loopback
from gptmanager.errors import quoted
from gptmanager.server.errors import ApiError
from gptmanager.server.http.access import AccessSettings
from gptmanager.server.http.responses import error_response


def needs_guard(host: str, access: AccessSettings) -> bool:
    """Return whether a server that listens at `host` must check the headers of requests."""
    return bool(access.allowed_hosts) or (not access.has_key and is_loopback(host))


def is_foreign_origin(origin: str) -> bool:
    """Return whether `origin` is neither localhost nor a loopback address."""
    return not is_loopback(_host(origin.partition("://")[2]))


def _host(authority: str) -> str:
    """Return the host in "host:port"; "" if it is invalid."""
    try:
        return (urlsplit(f"//{authority}").hostname or "").rstrip(".")
    except ValueError:
        return ""


class HostGuard:
    """ASGI middleware that answers 403 to requests with a foreign `Host` or `Origin`.

    Both headers may name localhost, a loopback address or a host in `allowed`. `Origin` may also be
    in `origins`, where "*" allows all origins. A cross-site request without `Origin` is refused
    unless it follows a link. A request without `Host` is accepted, because no browser sends one.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str], origins: Sequence[str] = ()) -> None:
        self._app = app
        self._allowed = {host.lower() for host in allowed}
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await error_response(refusal, scope["path"])(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = dict(scope["headers"])
        for name, value in scope["headers"]:
            text = value.decode("latin-1")
            if name == b"host" and not self._is_allowed(text):
                return _refused("Host", text)
            if name == b"origin" and not self._is_allowed_origin(text):
                return _refused("Origin", text)
        is_foreign = headers.get(b"sec-fetch-site") == b"cross-site" and b"origin" not in headers
        if is_foreign and headers.get(b"sec-fetch-mode") != b"navigate":  # following a link is fine
            return _refused("Sec-Fetch-Site", "cross-site")
        return None

    def _is_allowed_origin(self, origin: str) -> bool:
        is_listed = bool({"*", origin} & self._origins)
        return is_listed or self._is_allowed(origin.partition("://")[2])

    def _is_allowed(self, authority: str) -> bool:
        host = _host(authority)
        return host in self._allowed or is_loopback(host)


def _refused(header: str, value: str) -> ApiError:
    return ApiError(
        403,
        f"{header} {quoted(value)} is not allowed: this server accepts localhost, loopback "
        "addresses, and what --allowed-host or --cors-origin adds",
        code="host_not_allowed",
    )
