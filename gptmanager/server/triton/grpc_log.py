"""`CallLog`: the log of calls over gRPC."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import grpc

from gptmanager.errors import GptManagerError
from gptmanager.server.errors import ApiError, api_error
from gptmanager.server.http.keys import ServerKeys
from gptmanager.server.http.request_log import CLIENT_GONE, RequestLog, RequestRecord

_logger = logging.getLogger(__name__)


class CallLog:
    """A log with one line for each call over gRPC; also counts refusals."""

    def __init__(self, keys: ServerKeys, log: RequestLog) -> None:
        self._keys = keys
        self._log = log

    @contextlib.contextmanager
    def record(self, name: str, context: grpc.aio.ServicerContext) -> Iterator[RequestRecord]:
        """Yield the record of a call of the method `name`, and log it at the end of the block.

        An error in the block is raised as an ApiError, unless the client has disconnected. The
        record has the status that a response over HTTP would have.
        """
        metadata = [
            (str(key).encode(), value if isinstance(value, bytes) else value.encode())
            for key, value in context.invocation_metadata() or ()
        ]
        path = f"/inference.GRPCInferenceService/{name}"
        record = self._log.begin({"method": "gRPC", "path": path, "headers": metadata})
        record.key = "" if self._keys.current is None else self._keys.current.name
        record.status = CLIENT_GONE
        try:
            yield record
            record.status = 200
        except grpc.aio.BaseError:
            raise
        except Exception as error:
            refused = refusal(error)
            record.status, record.code = refused.status, str(refused.code or refused.type)
            raise refused from error
        finally:
            self._log.end(record)


def refusal(error: Exception) -> ApiError:
    """Return `error` as an ApiError, and log it if it is unexpected."""
    if isinstance(error, (ApiError, GptManagerError)):
        return api_error(error)
    _logger.error("a call over gRPC failed", exc_info=error)
    return ApiError(500, "the server failed; its log has the details")
