"""Cases that schemathesis makes up from the server's OpenAPI document."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import hypothesis
import schemathesis
from hostile_case import Case, head
from schemathesis.generation import GenerationMode

FIRST_NUMBER = 10**9  # cases of a seed from here on are made up from the document
_BATCH = 10
_NO_CHECKS = list(hypothesis.HealthCheck)


def made_up(seed: int, document: Mapping[str, Any]) -> Iterator[Case]:
    """Without end, and each time the same ones."""
    schema = schemathesis.openapi.from_dict(dict(document))
    operations = [
        (path, method) for path, methods in document["paths"].items() for method in methods
    ]
    # without fields there is little to make up
    operations = [it for it in operations for _ in range(6 if it[1] == "post" else 1)]
    number = FIRST_NUMBER
    batch = 0
    while True:
        batch += 1
        path, method = operations[batch * 7919 % len(operations)]
        mode = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)[batch % 2]
        for request in _drawn(schema[path][method], mode, seed * 10**6 + batch):
            number += 1
            yield Case(seed, number, "document", "http", path, (request,), may_time_out=True)


def _drawn(operation: Any, mode: GenerationMode, seed: int) -> list[bytes]:
    found: list[bytes] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=_BATCH,
        database=None,
        deadline=None,
        suppress_health_check=_NO_CHECKS,
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def draw(case: Any) -> None:
        found.append(_request(case))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            draw()
        except hypothesis.errors.Unsatisfiable:  # there is no wrong value for what takes any
            pass
    return found


def _request(case: Any) -> bytes:
    # what is no text of a path or a header is left to the draws of bytes
    path = quote(case.formatted_path, safe="/%?&=")
    body = b""
    if not isinstance(case.body, type(schemathesis.core.NOT_SET)):
        body = case.body if isinstance(case.body, bytes) else _json(case.body)
    return head(case.method, path, None, len(body)) + body


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except TypeError:
        return str(value).encode("utf-8", "replace")
