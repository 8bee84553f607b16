"""Checks the keys of `--api-key` and `--api-key-file`, and their quotas.

HTTP clients send their key as `Authorization: Bearer KEY` or `X-Api-Key: KEY`. A browser opens the
live page once with `?key=KEY` and then uses a cookie, which does not contain the key itself.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, parse_qsl, urlencode

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gptmanager.errors import ConfigError
from gptmanager.server.errors import ApiError
from gptmanager.server.http.access import AccessSettings
from gptmanager.server.http.key_file import ApiKey
from gptmanager.server.http.request_log import RECORD
from gptmanager.server.http.responses import error_response

_logger = logging.getLogger(__name__)
OPEN_PATHS = (
    *("/health", "/health/live", "/health/ready"),
    *("/v2/health/live", "/v2/health/ready"),
)
PAGE_PATHS = ("/", "/live/events")
_COOKIE = "gptmanager_key"


class ServerKeys:
    """The keys that clients may send, and for each key the number of requests that run or wait.

    Keys are looked up by digests with a secret of this process, so the time of a look-up reveals
    nothing about a key.
    """

    def __init__(self, access: AccessSettings) -> None:
        self._access = access
        self._secret = os.urandom(32)
        self._current: ContextVar[ApiKey | None] = ContextVar("gptmanager_key", default=None)
        self._num_open: Counter[str] = Counter()  # by name, so that the counts outlive a reload
        self._set(access.read_keys())

    def _set(self, keys: Sequence[ApiKey]) -> None:
        self._by_digest = {self._digest(key.value): key for key in keys}
        self._by_cookie = {self._digest(cookie_of(key)): key for key in keys}
        self._by_name = {key.name: key for key in keys}

    def reload(self) -> None:
        """Read the key file again, and log the result. On an error, keep the current keys."""
        try:
            self._set(self._access.read_keys())
        except ConfigError as error:
            _logger.error("the keys were not reloaded and stay as they are: %s", error)
        else:
            _logger.info("the keys have been read; the server has %d", len(self._by_name))

    def find(self, given: str | bytes | None) -> ApiKey | None:
        """Return the key that a client has sent, or None if the server does not have this key."""
        return None if given is None else self._by_digest.get(self._digest(given))

    def find_cookie(self, given: str) -> ApiKey | None:
        """Return the key from which this cookie was made, or None."""
        return self._by_cookie.get(self._digest(given))

    def enter(self, key: ApiKey) -> None:
        """Make `key` the current key of this task and of the tasks that it starts."""
        self._current.set(key)

    @property
    def current(self) -> ApiKey | None:
        """The key of the request that the running task answers; None if the request has no key."""
        return self._current.get()

    def reserve(self, number: int) -> str | None:
        """Count `number` more requests of the current key, and return the key's name for `release`.

        Raise ApiError if the key's requests would exceed its quota: 400 if `number` alone exceeds
        the quota, else 429.
        """
        key = self._current.get()
        if key is None:
            return None
        most = self._by_name.get(key.name, key).max_requests  # the quota of the current file
        num_open = self._num_open[key.name]
        if most is not None and num_open + number > most:
            raise ApiError(
                400 if number > most else 429,
                f"{num_open} requests of the key {key.name} run or wait; {number} more would "
                f"exceed its quota of {most}",
                code="quota_exceeded",
            )
        self._num_open[key.name] += number
        return key.name

    def release(self, name: str | None, number: int) -> None:
        """Subtract `number` requests that `reserve` has counted for the key `name`."""
        if name is not None:
            self._num_open[name] -= number
            if not self._num_open[name]:
                del self._num_open[name]

    def _digest(self, text: str | bytes) -> bytes:
        return hashlib.blake2b(_bytes(text), key=self._secret).digest()


def cookie_of(key: ApiKey) -> str:
    """Return the cookie of the live page. Only a client that has sent the key receives it."""
    return hmac.new(_bytes(key.value), b"live page", hashlib.sha256).hexdigest()


def bearer(header: str | bytes | None) -> bytes | None:
    """Return the key in the value of an authorization header, or None."""
    if header is None:
        return None
    scheme, _, key = _bytes(header).partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None


class KeyGuard:
    """ASGI middleware that answers 401 to requests without a valid key, except on OPEN_PATHS."""

    def __init__(self, app: ASGIApp, keys: ServerKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers, is_page = dict(scope["headers"]), scope["path"] in PAGE_PATHS
        given = bearer(headers.get(b"authorization")) or headers.get(b"x-api-key")
        key = self._keys.find(given)
        if key is None and is_page:
            key = self._key_of_cookie(headers.get(b"cookie", b""))
        if key is not None:
            self._keys.enter(key)
            if RECORD in scope:
                scope[RECORD].key = key.name
            await self._app(scope, receive, send)
            return
        key = self._key_in_query(scope["query_string"]) if is_page else None
        if key is not None:
            await self._to_page(scope, key)(scope, receive, send)
        else:
            error = ApiError(
                401,
                "the key is missing or wrong: send the header Authorization: Bearer KEY "
                "or X-Api-Key: KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error_response(error, scope["path"])(scope, receive, send)

    def _key_of_cookie(self, header: bytes) -> ApiKey | None:
        try:
            found = SimpleCookie(header.decode("latin-1")).get(_COOKIE)
        except CookieError:
            return None
        return None if found is None else self._keys.find_cookie(found.value)

    def _key_in_query(self, query: bytes) -> ApiKey | None:
        given = parse_qs(query.decode("latin-1")).get("key", [])
        return self._keys.find(given[0]) if given else None

    def _to_page(self, scope: Scope, key: ApiKey) -> RedirectResponse:
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
            _COOKIE, cookie_of(key), path=None, secure=is_https, httponly=True, samesite="strict"
        )
        return response


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
