"""A chat template filled in; and the program that does so in a process of its own.

Templates are Jinja2's, in its sandbox, with what Hugging Face's transformers adds to it: loop
controls, `raise_exception`, `strftime_now`, a `tojson` that escapes nothing, `generation` blocks.

`answerer` is for a `ChildProcess`: with jinja2 alone, it starts in no time.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

CONTINUED = "\ue000 the text goes on from here \ue001 "  # no template would write that itself


class TemplateError(Exception):
    """The template is wrong, or refuses what it is given; says why."""


def fill_in(
    template: str,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    *,
    continue_final_message: bool = False,
) -> str:
    """The text of a conversation, as transformers' `apply_chat_template` gives it.

    `variables`: what the template knows beside `messages`. `continue_final_message`: the text ends
    with that of the last message. TemplateError where that cannot be.
    """
    import jinja2

    if continue_final_message:
        *before, last = messages
        messages = [*before, {**last, "content": last["content"] + CONTINUED}]
    try:
        text: str = _compiled(template).render({**variables, "messages": messages})
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"line {error.lineno}: {error.message}") from None
    except jinja2.TemplateError as error:  # what raise_exception raises, among others
        raise TemplateError(error.message or type(error).__name__) from None
    except MemoryError:
        raise TemplateError("it takes too much memory") from None
    except Exception as error:  # a template may do anything that Python can
        raise TemplateError(f"{type(error).__name__}: {error}") from None
    return _cut(text) if continue_final_message else text


def _cut(text: str) -> str:
    """Where the last message ends; a template may have stripped the message's own spaces."""
    at = text.rfind(CONTINUED.strip())
    if at < 0:
        raise TemplateError("it does not give back the last message, so nothing can continue it")
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
        """`{% generation %}` marks what the assistant said: for training, without effect here."""

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
    """The function that answers in a process of its own."""
    _environment()
    return lambda question: fill_in(**question)
