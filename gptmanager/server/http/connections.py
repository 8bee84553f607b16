"""`Connections`: how many connections there may be, in all and from one address.

Also decides what the log hears of connections that are refused.
"""

from __future__ import annotations

import ipaddress
import logging
import resource
from collections import Counter
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from gptmanager.lifecycle.log import RareWarnings
from gptmanager.server.errors import ApiError
from gptmanager.server.http.access import networks_of
from gptmanager.server.http.responses import error_response

PEER = "gptmanager.peer"  # in a request's scope: the address of the connection's other end
_MOST = 1 << 16
_LEAST = 16
_logger = logging.getLogger(__name__)


def default_max_connections() -> int:
    """Three quarters of the descriptors that the process may open: files and pipes need others."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if soft == resource.RLIM_INFINITY else soft * 3 // 4
    return max(_LEAST, min(most, _MOST))


class Proxies:
    """Addresses of proxies, whose `X-Forwarded-For` is believed."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._networks = networks_of(allowed)

    def __contains__(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        address = getattr(address, "ipv4_mapped", None) or address
        return any(address in network for network in self._networks)


class Connections:
    """Counts open connections. `most` at once; `most_per_address`: from one address, None: any
    number. Connections from `proxies` have many clients, so they count for no address:
    `AddressLimit` counts their requests.
    """

    def __init__(self, most: int, most_per_address: int | None, proxies: Proxies) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._proxies = proxies
        self._num_open = 0
        self._by_address: Counter[str] = Counter()
        self._log = RareWarnings(_logger)

    def enter(self, host: str) -> ApiError | None:
        """Count one more connection; the refusal if there are as many as there may be. `leave`
        follows in either case.
        """
        self._num_open += 1
        self._by_address[host] += 1
        if self._num_open > self._most:
            return ApiError(
                503,
                f"the server has --max-connections = {self._most} connections already",
                code="too_many_connections",
            )
        limit = self._most_per_address
        if limit is not None and self._by_address[host] > limit and host not in self._proxies:
            return _too_many_of_address(limit)
        return None

    def log_refusal(self, host: str, why: str) -> None:
        self._log.warning("a connection from %s was refused: %s", host, why)

    def leave(self, host: str) -> None:
        self._num_open -= 1
        self._by_address[host] -= 1
        if not self._by_address[host]:
            del self._by_address[host]


class AddressLimit:
    """ASGI middleware: at most `most` requests at once of one client behind a proxy."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._running: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client")
        if client is None or client[0] == scope.get(PEER, client[0]):
            await self._app(scope, receive, send)
            return
        if self._running[client[0]] >= self._most:
            refusal = _too_many_of_address(self._most)
            await error_response(refusal, scope["path"])(scope, receive, send)
            return
        self._running[client[0]] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running[client[0]] -= 1
            if not self._running[client[0]]:
                del self._running[client[0]]


def _too_many_of_address(limit: int) -> ApiError:
    return ApiError(
        429,
        f"this address has --max-connections-per-address = {limit} connections already",
        code="too_many_connections",
    )
