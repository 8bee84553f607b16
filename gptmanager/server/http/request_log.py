"""`RequestLog`: writes one line for each request, with an id that the client also receives."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from starlette.types import Message

logger = logging.getLogger("gptmanager.requests")
RECORD = "gptmanager.record"  # the key in a request's scope that holds its `RequestRecord`
CLIENT_GONE = 499  # the status in the log if the client has disconnected
MAX_ID_LETTERS = 128
MAX_LOGGED_LETTERS = 4096  # characters of a prompt or an output
MAX_PATH_LETTERS = 200

_HEADER = b"x-request-id"
_OF_ANTHROPIC = b"request-id"  # the name that clients of Anthropic's API read
_ID = re.compile(rb"[A-Za-z0-9._:/+=@~-]{1,%d}" % MAX_ID_LETTERS)
_PLAIN = re.compile(r'[^\s"=\\]+')
# Probes and web pages request these paths again and again: only errors are logged.
_QUIET = re.compile(r"/|/live/.*|/metrics|/(v2/)?health(/.*)?|/inference\..*/Server(Live|Ready)")


class RequestRecord:
    """The facts about a request that the log reports.

    `id`: the value of the header `X-Request-Id` if that value consists of 1 to 128 letters, digits
    or `._:/+=@~-`, otherwise a random id. `key`: the name of the client's key. `code`: the error's
    code if the request was refused. `details`: a function that returns further fields. Endpoints
    set this function, and the log calls it at the end of the request.
    """

    __slots__ = ("began", "code", "details", "id", "key", "method", "path", "status")

    def __init__(self, scope: Mapping[str, Any]) -> None:
        given = dict(scope["headers"]).get(_HEADER, b"")
        self.id = given.decode() if _ID.fullmatch(given) else uuid.uuid4().hex
        self.method, self.path = str(scope["method"]), str(scope["path"])
        self.began = time.monotonic()
        self.status = 0  # 0: no status has been sent
        self.code = ""
        self.key = ""
        self.details: Callable[[], Mapping[str, Any]] = dict

    def start(self, message: Message) -> Message:
        """Note the status of a response that starts, and return it with the id in its headers."""
        self.status = int(message["status"])
        headers = [*message.get("headers", ()), (_HEADER, self.id.encode())]
        if self.path.startswith("/v1/messages"):
            headers.append((_OF_ANTHROPIC, self.id.encode()))
        return {**message, "headers": headers}

    def fields(self) -> dict[str, Any]:
        """Return the fields of the log line; times are in seconds."""
        path = self.path[:MAX_PATH_LETTERS]
        fields = {"id": self.id, "method": self.method, "route": path, "status": self.status}
        fields |= {name: getattr(self, name) for name in ("key", "code") if getattr(self, name)}
        total = round(time.monotonic() - self.began, 4)
        return {**fields, **self.details(), "total_s": total}


class RequestLog:
    """Writes a log line for each request except successful probes, and counts refusals.

    `arrival` is the time, by `time.monotonic`, when the request arrived that the running task
    answers; None outside of requests.
    """

    def __init__(self) -> None:
        self.refusals: Counter[tuple[str, str]] = Counter()
        self.arrival: ContextVar[float | None] = ContextVar("arrival", default=None)

    def begin(self, scope: Mapping[str, Any]) -> RequestRecord:
        """Return the record of a request that has arrived."""
        record = RequestRecord(scope)
        self.arrival.set(record.began)
        return record

    def count(self, status: int, code: str) -> None:
        """Count a refusal without writing a log line."""
        self.refusals[str(status), code] += 1

    def end(self, record: RequestRecord) -> None:
        """Log a request that has ended. If it was refused, count it by status and code."""
        if record.status >= 400 and record.status != CLIENT_GONE:
            self.count(record.status, record.code or "none")
        is_quiet = record.status < 400 and _QUIET.fullmatch(record.path)
        if not is_quiet and logger.isEnabledFor(logging.INFO):
            fields = record.fields()
            logger.info("%s", as_text(fields), extra={"fields": {"event": "request", **fields}})


def as_text(fields: Mapping[str, Any]) -> str:
    """Return fields as `name=value ...`, without the fields that are None.

    A value that needs quotes is written as a Python string in ASCII.
    """
    return " ".join(
        f"{name}={_value(str(value))}" for name, value in fields.items() if value is not None
    )


def _value(text: str) -> str:
    return text if _PLAIN.fullmatch(text) and text.isprintable() else ascii(text)
