"""The standard health service of gRPC, which probes of Kubernetes and load balancers call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

_SERVICES = ("", "inference.GRPCInferenceService")  # "" is the whole server
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"  # messages HealthCheckResponse


def health_service(is_ready: Callable[[], bool]) -> grpc.GenericRpcHandler:
    """Return the service `grpc.health.v1.Health` with the method Check.

    Messages have one field, so that they are compared as bytes, and no package parses them.
    """
    known = [b"\n%c%b" % (len(name), name.encode()) if name else b"" for name in _SERVICES]

    async def check(request: Any, context: grpc.aio.ServicerContext) -> bytes:
        if request not in known:
            names = " and ".join(map(repr, _SERVICES))
            await context.abort(grpc.StatusCode.NOT_FOUND, f"the services are {names}")
        return _SERVING if is_ready() else _NOT_SERVING

    method = grpc.unary_unary_rpc_method_handler(check, request_deserializer=bytes)
    return grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": method})
