"""A server whose model says a given text, unless a rule of the request forbids that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from running_server import running_server, settings_of
from scripted_texts import ScriptedTexts

from gptmanager import GptManager
from gptmanager.server import serving


@contextmanager
def scripted_server(
    folder: Path,
    template: Path,
    *,
    messages: Sequence[Any],
    tools: Sequence[Any] = (),
    tags: Sequence[str] = (),
    special: Sequence[str] = (),
    **fields: Any,
) -> Iterator[Any]:
    """`ask(text, **fields)` asks such a server by OpenAI's client, and `ask.post` by httpx. Others
    set the texts of the next answers with `ask.says`, and find the server at `ask.url`.

    `messages`, `tools`: if a call names none. `tags`, `special`: those of `ScriptedTexts`.
    """
    script = ScriptedTexts(folder, template, tags=tags, special=special)

    def manager(path: str, *rest: Any) -> GptManager:
        return GptManager(script.model(), *rest)

    settings = settings_of(model=folder, served_model_name="scripted", **fields)
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # not of servers that start later
            patch.setattr(serving, "GptManager", manager)
            server = stack.enter_context(running_server(settings))
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        stack.enter_context(client)

        def ask(text: str, **given: Any) -> Any:
            script.say(text)
            given = {"messages": messages, **({"tools": tools} if tools else {}), **given}
            return client.chat.completions.create(model="scripted", **given)

        ask.says, ask.url = script.say, server.url
        ask.post = lambda path, **given: httpx.post(server.url + path, timeout=30, **given)
        yield ask
