"""Reads the fields of a request, and collects warnings about ignored ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gptmanager.server.fields import Field, read_fields
from gptmanager.server.http.warning_header import Warnings


class NotSupported(NamedTuple):
    """The kind of a field that has no effect. It may have any JSON value.

    The client gets a warning, unless the value is one of `neutral`.
    """

    neutral: tuple[Any, ...] = ()

    def read(self, where: str, value: Any) -> Any:
        return value

    def schema(self) -> dict[str, Any]:
        return {}


def read_request(
    body: Mapping[str, Any], fields: Mapping[str, Field], *, lenient: bool
) -> tuple[dict[str, Any], Warnings]:
    """Return the given values by name, and the warnings for the client.

    Raises ApiError like `read_fields`.
    """
    given, unknown = read_fields(body, fields, lenient=lenient)
    warnings = Warnings()
    warnings.add_ignored(unknown, "unknown fields are ignored")
    warnings.add_ignored(_without_effect(given, fields), "fields that have no effect here")
    return given, warnings


def _without_effect(given: Mapping[str, Any], fields: Mapping[str, Field]) -> list[str]:
    """Return the names of the given fields that the server accepts but does not act on."""
    found = []
    for name, value in given.items():
        kind = fields[name].kind
        if isinstance(kind, NotSupported) and value not in kind.neutral:
            found.append(name)
    return found
