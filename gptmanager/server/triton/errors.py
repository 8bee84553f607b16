"""Refusals in Triton's protocol: of what a call itself is wrong about."""

from __future__ import annotations

from gptmanager.server.errors import ApiError


def invalid(param: str | None, message: str) -> ApiError:
    """A call that cannot be run as it is: INVALID_ARGUMENT over gRPC, else a 400."""
    return ApiError(400, message, param=param, code="InvalidRequestError")


def unsupported(message: str) -> ApiError:
    """An extension of the protocol that is not here: UNIMPLEMENTED over gRPC, else a 501."""
    return ApiError(501, message)


def not_here(what: str) -> ApiError:
    """The refusal of a part of the protocol that needs files or memory beside the calls."""
    return unsupported(f"{what} is not supported: this server has one model, in this process")
