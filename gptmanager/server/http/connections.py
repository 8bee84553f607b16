"""`Connections`: limits the open connections, in total and per address, and logs refusals."""

from __future__ import annotations

import ipaddress
import logging
import resource
from collections import Counter
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from gptmanager.lifecycle.log import RareWarnings
from gptmanager.server.errors import ApiError
from gptmanager.server.http.access import networks_of
from gptmanager.server.http.responses import error_response

PEER = "gptmanager.peer"  # ASGI scope key: the address of the connection's other end
_MAX_CONNECTIONS = 1 << 16
_MIN_CONNECTIONS = 16
_logger = logging.getLogger(__name__)


def default_max_connections() -> int:
    """Return three quarters of the limit on file descriptors, at least 16 and at most 65536.

    Files and pipes need the rest.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else soft * 3 // 4
    return max(_MIN_CONNECTIONS, min(most, _MAX_CONNECTIONS))


class Proxies:
    """Addresses of trusted proxies. `X-Forwarded-For` is trusted only in requests from them."""

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
    """Counts open connections, and limits them.

    `most`: the limit in total. `most_per_address`: the limit for one address, or None. Connections
    from `proxies` carry the requests of many clients and are exempt from the limit for one address:
    `AddressLimit` counts their requests instead. `count` is called with the status and the code of
    each refusal.
    """

    def __init__(
        self,
        most: int,
        most_per_address: int | None,
        proxies: Proxies,
        count: Callable[[int, str], None] = lambda status, code: None,
    ) -> None:
        self._count = count
        self._most = most
        self._most_per_address = most_per_address
        self._proxies = proxies
        self._num_open = 0
        self._by_address: Counter[str] = Counter()
        self._log = RareWarnings(_logger)

    def enter(self, host: str) -> ApiError | None:
        """Count one more connection. Return an error if it exceeds a limit, otherwise None.

        The caller must call `leave` in both cases.
        """
        self._num_open += 1
        self._by_address[host] += 1
        if self._num_open > self._most:
            return ApiError(
                503,
                f"the server already has --max-connections = {self._most} connections",
                code="too_many_connections",
            )
        limit = self._most_per_address
        if limit is not None and self._by_address[host] > limit and host not in self._proxies:
            return _too_many_of_address(limit, "connections")
        return None

    def log_refusal(self, host: str, error: ApiError) -> None:
        """Count a connection that is refused; log at most one refusal in ten seconds."""
        self._count(error.status, str(error.code or error.type))
        self._log.warning("a connection from %s was refused: %s", host, error.message)

    def leave(self, host: str) -> None:
        """Subtract a connection that has been closed."""
        self._num_open -= 1
        self._by_address[host] -= 1
        if not self._by_address[host]:
            del self._by_address[host]


class AddressLimit:
    """ASGI middleware that limits each client behind a proxy to `most` requests at once."""

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
            refusal = _too_many_of_address(self._most, "running requests")
            await error_response(refusal, scope["path"])(scope, receive, send)
            return
        self._running[client[0]] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running[client[0]] -= 1
            if not self._running[client[0]]:
                del self._running[client[0]]


def _too_many_of_address(limit: int, what: str) -> ApiError:
    return ApiError(
        429,
        f"this address already has --max-connections-per-address = {limit} {what}",
        code="too_many_connections",
    )
