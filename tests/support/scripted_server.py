"""A server whose model says a given text, unless a rule of the request forbids that."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import copy
from typing import Any

import httpx
import pytest
from openai import OpenAI
from running_server import MODEL, running_server, settings_of

from gptmanager import GptManager
from gptmanager.callbacks import load_tokenizer
from gptmanager.server import serving
from gptmanager.testing import ScriptedModel

_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json")
_LENGTH, _VOCABULARY = 4096, 700


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

    `messages`, `tools`: if a call names none. `tags`, `special`: tokens of their own in the
    vocabulary; special ones are left out of texts.
    """
    for name in _FILES:
        copy(MODEL / name, folder)
    copy(template, folder / "chat_template.jinja")
    tokenizer = load_tokenizer(folder)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", *special])
    tokenizer.add_tokens(list(tags))
    tokenizer.save(str(folder / "tokenizer.json"))
    says: dict[str, Any] = {"prompt": 0, "script": [], "length": 0, "next": []}

    def next_token(history: Any) -> int:
        if len(history) != says["length"] + 1:  # of another request
            says["prompt"] = len(history)
            says["script"] = says["next"].pop(0) if says["next"] else says["script"]
        says["length"] = len(history)
        done = len(history) - says["prompt"]
        return says["script"][done] if done < len(says["script"]) else 0

    def manager(path: str, *rest: Any) -> GptManager:
        model = ScriptedModel(next_token, vocab_size=_VOCABULARY, max_position_embeddings=_LENGTH)
        return GptManager(model, *rest)

    config = json.loads((folder / "config.json").read_text())
    config.update(max_position_embeddings=_LENGTH, vocab_size=_VOCABULARY)
    (folder / "config.json").write_text(json.dumps(config))
    settings = settings_of(model=folder, served_model_name="scripted", **fields)
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # not of servers that start later
            patch.setattr(serving, "GptManager", manager)
            server = stack.enter_context(running_server(settings))
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        stack.enter_context(client)

        def say(*texts: str) -> None:
            says.update(length=-2, next=[tokenizer.encode(text).ids for text in texts])

        def ask(text: str, **given: Any) -> Any:
            say(text)
            given = {"messages": messages, **({"tools": tools} if tools else {}), **given}
            return client.chat.completions.create(model="scripted", **given)

        ask.says, ask.url = say, server.url
        ask.post = lambda path, **given: httpx.post(server.url + path, timeout=30, **given)
        yield ask
