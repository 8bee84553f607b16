"""The key that clients need: that of `--api-key`, or of `--api-key-file`.

HTTP brings it as `Authorization: Bearer KEY`. The live page is opened with `?key=KEY` once; then a
cookie stands for it, which does not hold the key itself.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, parse_qsl, urlencode

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gptmanager.errors import ConfigError
from gptmanager.server.errors import ApiError
from gptmanager.server.http.access import AccessSettings
from gptmanager.server.http.responses import error_response

_logger = logging.getLogger(__name__)
OPEN_PATHS = (
    *("/health", "/health/live", "/health/ready"),
    *("/v2/health/live", "/v2/health/ready"),
)
PAGE_PATHS = ("/", "/live/events")
_COOKIE = "gptmanager_key"


class ServerKey:
    """The key that clients must bring; `value` None: there is none."""

    def __init__(self, access: AccessSettings) -> None:
        self._access = access
        self.value = access.read_key()

    def reload(self) -> None:
        """Read the file anew. What is wrong with it is logged, and the key stays."""
        try:
            self.value = self._access.read_key()
        except ConfigError as error:
            _logger.error("the key stays as it is: %s", error)
        else:
            _logger.info("the key has been read anew")


def is_key(given: str | bytes | None, key: str | None) -> bool:
    """Whether `given` is the server's key, in a time that tells nothing of it; True without one.

    For every front: gRPC brings it as metadata, "authorization" with "Bearer KEY".
    """
    if key is None:
        return True
    if given is None:
        return False
    return hmac.compare_digest(_bytes(given), _bytes(key))


def bearer(header: str | bytes | None) -> bytes | None:
    """The key in the value of an authorization header."""
    if header is None:
        return None
    scheme, _, key = _bytes(header).partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None


class KeyGuard:
    """ASGI middleware: a 401 for every path but those of health without the key."""

    def __init__(self, app: ASGIApp, key: ServerKey) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers = {name: value for name, value in scope["headers"]}
        if is_key(bearer(headers.get(b"authorization")), self._key.value):
            await self._app(scope, receive, send)
        elif scope["path"] in PAGE_PATHS and self._has_cookie(headers.get(b"cookie", b"")):
            await self._app(scope, receive, send)
        elif scope["path"] in PAGE_PATHS and self._is_in_query(scope["query_string"]):
            await self._to_page(scope)(scope, receive, send)
        else:
            error = ApiError(
                401,
                "the key is missing or wrong: Authorization: Bearer KEY is needed",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error_response(error, scope["path"])(scope, receive, send)

    def _has_cookie(self, header: bytes) -> bool:
        try:
            found = SimpleCookie(header.decode("latin-1")).get(_COOKIE)
        except CookieError:
            return False
        return found is not None and is_key(found.value, self._cookie())

    def _cookie(self) -> str:
        """Return the cookie's value, which proves that its holder had the key."""
        return hmac.new(_bytes(self._key.value or ""), b"live page", hashlib.sha256).hexdigest()

    def _is_in_query(self, query: bytes) -> bool:
        given = parse_qs(query.decode("latin-1")).get("key", [])
        return bool(given) and is_key(given[0], self._key.value)

    def _to_page(self, scope: Scope) -> RedirectResponse:
        """The same page without the key, so that no history and no log keeps it.

        The place is relative: a proxy may serve this server below a prefix, which is then the
        cookie's path, too.
        """
        query: Iterable[tuple[str, str]] = parse_qsl(scope["query_string"].decode("latin-1"))
        rest = urlencode([(name, value) for name, value in query if name != "key"])
        place = "./" + scope["path"].rpartition("/")[2]
        response = RedirectResponse(place + ("?" + rest if rest else ""), 303)
        is_https = scope.get("scheme") == "https"
        response.set_cookie(
            _COOKIE, self._cookie(), path=None, secure=is_https, httponly=True, samesite="strict"
        )
        return response


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
