"""`Idempotency-Key`: a client that repeats a call with this header receives the same answer.

The key is bound to the client's API key and to the bytes of the body.
"""

from __future__ import annotations

import hashlib
import re
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gptmanager.server.errors import ApiError
from gptmanager.server.http.keys import ServerKeys
from gptmanager.server.http.request_log import RECORD
from gptmanager.server.http.responses import error_response

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
MAX_KEY_LETTERS = 255
_HEADER = b"idempotency-key"
_KEY = re.compile(rb"[\x21-\x7e]{1,%d}" % MAX_KEY_LETTERS)
_KEYED = 1 << 63  # a bit that is set only in the ids of requests with a key
_LOW = (1 << 32) - 1


class CallKey:
    """The key of one call: `name` is a digest of the header's value, `body` a digest of the body.

    Both digests use the API key as secret, so a client with another API key cannot join the call.
    """

    def __init__(self, api_key: str, given: bytes) -> None:
        secret = hashlib.blake2b(api_key.encode()).digest()
        self.name = hashlib.blake2b(given, key=secret, digest_size=16).digest()
        self._body = hashlib.blake2b(key=secret, digest_size=16)

    def add(self, data: bytes) -> None:
        """Add the next bytes of the body."""
        self._body.update(data)

    @property
    def body(self) -> bytes:
        """The digest of the body so far."""
        return self._body.digest()

    @property
    def seed(self) -> int:
        """The seed of a call that names none. It is the same in each process."""
        return int.from_bytes(self.name[-8:], "big")

    def request_id(self, index: int) -> int:
        """Return the id of the call's request `index`, which is the same in each process."""
        name = int.from_bytes(self.name[:4], "big") >> 1
        return _KEYED | name << 32 | (int.from_bytes(self.body[:4], "big") + index) & _LOW

    def has_name_of(self, request_id: int) -> bool:
        """Return whether the request with this id has this key, with this or another body."""
        return request_id >> 32 == self.request_id(0) >> 32


def is_keyed(request_id: int) -> bool:
    """Return whether a request with this id has an Idempotency-Key."""
    return request_id >= _KEYED


def reused() -> ApiError:
    """Return the error for a key that belongs to a call with another body."""
    text = "this Idempotency-Key was used with another body: send the same bytes, or a new key"
    return ApiError(422, text, code="idempotency_key_reused")


class IdempotencyGuard:
    """ASGI middleware that sets `current` to the key of a call with the header Idempotency-Key.

    For all other calls, `current` is None.
    """

    def __init__(self, app: ASGIApp, keys: ServerKeys, current: ContextVar[CallKey | None]) -> None:
        self._app, self._keys, self._current = app, keys, current

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A task may inherit the context of an earlier request of its connection: uvicorn starts the
        # next pipelined request, and resumes reading, in the task that has sent an answer.
        self._current.set(None)
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        given = headers.get(_HEADER)
        if given is None or scope["method"] != "POST" or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            return
        if not _KEY.fullmatch(given):
            text = f"Idempotency-Key must have 1 to {MAX_KEY_LETTERS} visible ASCII characters"
            error = ApiError(400, text, code="invalid_idempotency_key")
            await error_response(error, scope["path"])(scope, receive, send)
            return
        own = self._keys.current
        key = CallKey("" if own is None else own.value, given)
        self._current.set(key)
        if RECORD in scope and b"x-request-id" not in headers:
            scope[RECORD].id = key.name.hex()  # so that answers to repeated calls have equal ids

        async def listen() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                key.add(message.get("body", b""))
            return message

        await self._app(scope, listen, send)
