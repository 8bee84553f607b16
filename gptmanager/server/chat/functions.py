"""The deprecated fields `functions` and `function_call`, read as `tools` and `tool_choice`.

`ChatAnswer` writes the answer in the deprecated shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gptmanager.callbacks.answers.tools import Tools
from gptmanager.server.chat.tools import MAX_TOOLS, read_tools
from gptmanager.server.errors import ApiError
from gptmanager.server.fields import bad_request, must_be, outside_quotes


def has_functions(given: Mapping[str, Any]) -> bool:
    """Return whether a request uses the deprecated fields.

    Raises ApiError (400) if it uses a deprecated field and also the field that replaces it.
    """
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if old in given and new in given:
            raise bad_request(old, f"pass either {old} or {new}, not both")
    return "functions" in given or "function_call" in given


def read_functions(functions: Any, function_call: Any) -> Tools | None:
    """Return the functions as tools for at most one call; None if no function may be called.

    Raises ApiError (400) for an invalid field. The error has the name of the deprecated field.
    """
    listed = [] if functions is None else functions
    if not isinstance(listed, list) or len(listed) > MAX_TOOLS:
        raise must_be("functions", f"a list of at most {MAX_TOOLS} functions", functions)
    tools = [{"type": "function", "function": one} for one in listed]
    choice = function_call
    if isinstance(function_call, Mapping):
        choice = {"type": "function", "function": function_call}
    with named_as_functions():
        return read_tools(tools, choice, False)


@contextmanager
def named_as_functions() -> Iterator[None]:
    """Replace the names of fields in ApiErrors of the block by those of the deprecated fields."""
    try:
        yield
    except ApiError as error:
        if error.param is None or not error.param.startswith("tool"):
            raise
        param, message = _renamed(error.param), outside_quotes(error.message, _renamed)
        raise ApiError(error.status, message, param=param, code=error.code) from None


def _renamed(text: str) -> str:
    for new, old in (
        ("tool_choice.function", "function_call"),
        ("tool_choice", "function_call"),
        ("].function", "]"),
        ("tools", "functions"),
    ):
        text = text.replace(new, old)
    return text
