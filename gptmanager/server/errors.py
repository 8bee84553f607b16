"""`ApiError`: an error response, which is an HTTP status and one JSON object."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from typing import Any

from gptmanager.errors import (
    AdapterError,
    CapacityError,
    ConfigError,
    InvalidRequestError,
    LogitsError,
    ManagerDeadError,
)

# Status of an error -> OpenAI's name for this kind of error, and a description for clients.
STATUSES = {
    400: ("invalid_request_error", "a field is wrong: `param` names it"),
    401: ("authentication_error", "the key is wrong or missing"),
    403: ("permission_error", "this client is not allowed to do that"),
    404: ("not_found_error", "the model, adapter or response does not exist"),
    405: ("invalid_request_error", "the path does not have this method"),
    408: ("timeout_error", "the request did not arrive in time"),
    413: ("invalid_request_error", "the body is too large"),
    415: ("invalid_request_error", "the body is compressed"),
    422: ("invalid_request_error", "the `Idempotency-Key` was used with another body"),
    429: ("rate_limit_error", "too many requests wait; try again after `Retry-After` seconds"),
    431: ("invalid_request_error", "the headers are too large"),
    500: ("internal_server_error", "the server failed"),
    501: ("not_implemented_error", "this server cannot do that"),
    503: (
        "service_unavailable_error",
        "the server is shutting down, has failed, or lacks a resource",
    ),
    504: ("timeout_error", "the request took longer than its `deadline_s` or the server's limit"),
}
CONNECTION_STATUSES = (408, 431)  # sent by the connection, in OpenAI's format at every path
_STATUS_OF: tuple[tuple[type[BaseException], int], ...] = (
    (ManagerDeadError, 503),
    (queue.Full, 429),
    (InvalidRequestError, 400),
    (CapacityError, 400),
    (AdapterError, 400),
    (ConfigError, 400),
    (TimeoutError, 504),
)
# how a CapacityError begins that the same request may not meet later
_SHORTAGES = ("the journal cannot be written", "no memory for one token")
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"  # the `code` of a request that is too long
RETRY_AFTER_S = 1
LONGEST = 1000  # characters of a message or `param` before it is cut


class ApiError(Exception):
    """An error response with `status`.

    `type`: OpenAI's name for the kind of error, by default from `STATUSES`. `param`: the name of
    the wrong field. `code`: a machine-readable name or number. `headers`: further response headers.
    `details`: an object that Anthropic's clients read.
    """

    def __init__(  # noqa: B042 - it is never pickled
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | int | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _cut(message)
        self.type = type or STATUSES.get(status, STATUSES[500])[0]
        self.param = param and _cut(param)
        self.code = code
        self.headers = dict(headers or {})
        self.details = details
        if status in (429, 503):
            self.headers.setdefault("Retry-After", str(RETRY_AFTER_S))

    @property
    def is_transient(self) -> bool:
        """Whether the same call may succeed later, so that clients repeat it."""
        return self.status in (408, 429) or (self.status >= 500 and self.status != 501)

    def body(self) -> dict[str, Any]:
        """Return the error object for the client, as JSON values."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


def described_error(status: int, schema: str) -> dict[str, Any]:
    """Return the description of the response with `status` for the OpenAPI document.

    `schema`: the name of the body's schema. For `CONNECTION_STATUSES` the schema is always "Error".
    """
    name = "Error" if status in CONNECTION_STATUSES else schema
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {"description": STATUSES[status][1], "content": content}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Return the error object for clients of Anthropic's API, as JSON values."""
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    message = error.message
    if error.code == CONTEXT_LENGTH_EXCEEDED:  # clients match Anthropic's words to shorten a chat
        message = f"prompt is too long: {message}"
    own: dict[str, Any] = {"type": _ANTHROPIC_TYPES.get(error.status, kind), "message": message}
    if error.details is not None:
        own["details"] = error.details
    return {"type": "error", "error": own}


def _cut(text: str) -> str:
    """Shorten a text that may quote a client's input, to limit the size of the response."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def api_error(error: BaseException) -> ApiError:
    """Convert an error to an ApiError, with status 500 if its class is unexpected."""
    if isinstance(error, ApiError):
        return error
    status = next((status for cls, status in _STATUS_OF if isinstance(error, cls)), 500)
    message = str(error) or type(error).__name__
    if isinstance(error, LogitsError) and "NaN" not in message:
        status = 400  # the request itself bans every token
    if isinstance(error, CapacityError) and message.startswith(_SHORTAGES):
        status = 503
    return ApiError(status, message, code=type(error).__name__)
