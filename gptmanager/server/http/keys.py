"""Check the key of `--api-key` or `--api-key-file`.

HTTP clients send it as `Authorization: Bearer KEY`. A browser opens the live page once with
`?key=KEY` and then uses a cookie, which does not contain the key itself.
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
    """The key that clients must send; `value` is None if the server has no key."""

    def __init__(self, access: AccessSettings) -> None:
        self._access = access
        self.value = access.read_key()

    def reload(self) -> None:
        """Read the key file again. On an error, log it and keep the current key."""
        try:
            self.value = self._access.read_key()
        except ConfigError as error:
            _logger.error("the key was not reloaded and stays as it is: %s", error)
        else:
            _logger.info("the key has been reloaded")


def is_key(given: str | bytes | None, key: str | None) -> bool:
    """Return whether `given` equals `key`, in constant time; True if `key` is None.

    gRPC clients send the key as metadata: `authorization` with "Bearer KEY".
    """
    if key is None:
        return True
    if given is None:
        return False
    return hmac.compare_digest(_bytes(given), _bytes(key))


def bearer(header: str | bytes | None) -> bytes | None:
    """Return the key in the value of an authorization header, or None."""
    if header is None:
        return None
    scheme, _, key = _bytes(header).partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None


class KeyGuard:
    """ASGI middleware that answers 401 to requests without the key, except on OPEN_PATHS."""

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
                "the key is missing or wrong: send the header Authorization: Bearer KEY",
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
        """Return the cookie's value, which only a client with the key can have received."""
        return hmac.new(_bytes(self._key.value or ""), b"live page", hashlib.sha256).hexdigest()

    def _is_in_query(self, query: bytes) -> bool:
        given = parse_qs(query.decode("latin-1")).get("key", [])
        return bool(given) and is_key(given[0], self._key.value)

    def _to_page(self, scope: Scope) -> RedirectResponse:
        """Redirect to the same page without the key, to keep it out of histories and logs.

        The location is relative and the cookie has no path: a proxy may serve this server below a
        prefix, and browsers then limit the cookie to that prefix.
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
