"""Rendering of chat templates, in this process or in a `ChildProcess` that imports this module.

Templates run in Jinja2's sandbox, with the additions of Hugging Face's transformers: loop controls,
`raise_exception`, `strftime_now`, a `tojson` that escapes neither HTML nor non-ASCII characters,
and `generation` blocks. This module imports only jinja2 and the standard library, so that the child
process starts quickly.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

CONTINUED = "\ue000 the text continues here \ue001 "  # no message contains this marker


class TemplateError(Exception):
    """The error for a template that is invalid or refuses its messages; the text is the reason."""


def fill_in(
    template: str,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    *,
    continue_final_message: bool = False,
) -> str:
    """Return the text of a conversation, as transformers' `apply_chat_template` returns it.

    `variables` are the template's variables in addition to `messages`. With
    `continue_final_message`, the text ends with the content of the last message. Raise
    TemplateError if the template fails.
    """
    import jinja2

    if continue_final_message:
        *before, last = messages
        messages = [*before, {**last, "content": last["content"] + CONTINUED}]
    try:
        text: str = _compiled(template).render({**variables, "messages": messages})
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"line {error.lineno}: {error.message}") from None
    except jinja2.TemplateError as error:  # also from `raise_exception`
        raise TemplateError(error.message or type(error).__name__) from None
    except MemoryError:
        raise TemplateError("it takes too much memory") from None
    except Exception as error:  # an expression of a template may raise any exception
        raise TemplateError(f"{type(error).__name__}: {error}") from None
    return _cut(text) if continue_final_message else text


def _cut(text: str) -> str:
    """Return the text up to the end of the last message, where the marker CONTINUED is.

    If the template strips messages, remove white space at the end of the text too.
    """
    at = text.rfind(CONTINUED.strip())
    if at < 0:
        raise TemplateError(
            "it does not write the last message, which therefore cannot be continued"
        )
    return text[:at] if text.startswith(CONTINUED, at) else text[:at].rstrip()


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


@functools.lru_cache(maxsize=1)
def _environment() -> Any:
    from jinja2 import TemplateError as Refused
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block `{% generation %}`, which marks text for training and has no effect here."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise Refused(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def answerer() -> Callable[[dict[str, Any]], str]:
    """Return the function that a `ChildProcess` calls for each request to render a template.

    The argument of the function is a dict with the arguments of `fill_in`.
    """
    _environment()
    return lambda arguments: fill_in(**arguments)
