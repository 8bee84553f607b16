"""Errors of Triton's protocol for calls that are wrong or not supported."""

from __future__ import annotations

from gptmanager.server.errors import ApiError


def invalid(param: str | None, message: str) -> ApiError:
    """Return the error for a wrong call: INVALID_ARGUMENT over gRPC, 400 over HTTP."""
    return ApiError(400, message, param=param, code="InvalidRequestError")


def unsupported(message: str) -> ApiError:
    """Return the error for an unsupported extension: UNIMPLEMENTED over gRPC, 501 over HTTP."""
    return ApiError(501, message)


def unsupported_extension(what: str) -> ApiError:
    """Return the error for a method of an unsupported extension. `what`: what the method does."""
    return unsupported(f"this server does not support {what}")
