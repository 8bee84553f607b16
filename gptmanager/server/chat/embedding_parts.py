"""Parts of messages that are embeddings: rows of floats, each in place of a token's embedding.

In the text that the chat template renders, a unique mark stands for each part. In the prompt, each
row becomes a token id of `vocab_size` or more. The request's `prompt_embedding_table` has the rows.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from gptmanager.errors import quoted
from gptmanager.server.engine.model_card import ModelCard
from gptmanager.server.fields import field_error

EMBEDDINGS = ("image_embeds", "prompt_embeds")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_MARK_BYTES = 16


class EmbeddingParts:
    """Reads the embeddings in a request's messages.

    `table`: all rows as float32, `[rows, hidden_size]`, or None if the messages have none.
    """

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        # random, so that a client cannot put the mark into a text
        self._mark = f"embeds{secrets.token_hex(_MARK_BYTES)}"
        self._parts: list[torch.Tensor] = []

    @property
    def table(self) -> torch.Tensor | None:
        return torch.cat(self._parts) if self._parts else None

    def marked(self, messages: Any) -> Any:
        """Return the messages with each part of embeddings replaced by a text part, its mark.

        Raises ApiError (400) for an invalid part. Everything else in the messages is unchanged.
        """
        if not isinstance(messages, list):
            return messages
        return [self._message(one, f"messages[{index}]") for index, one in enumerate(messages)]

    def pieces(self, text: str) -> Iterator[str | list[int]]:
        """Split a rendered text at the marks; in place of each, yield the token ids of its rows.

        Raises ApiError (400) unless the template has written each mark once, in order.
        """
        if not self._parts:
            yield text
            return
        ids, first = [], self._card.vocab_size
        for rows in self._parts:
            ids.append(list(range(first, first + len(rows))))
            first += len(rows)
        words = re.split(f"{self._mark}_([0-9]+)_", text)
        if [int(word) for word in words[1::2]] != list(range(len(ids))):
            raise field_error("messages", "the chat template must write each part once, in order")
        for index, word in enumerate(words):
            if index % 2:
                yield ids[int(word)]
            elif word:
                yield word

    def _message(self, message: Any, where: str) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            return message
        parts = [
            self._part(part, f"{where}.content[{index}]") if _is_embeddings(part) else part
            for index, part in enumerate(content)
        ]
        return {**message, "content": parts}

    def _part(self, part: Mapping[str, Any], where: str) -> dict[str, str]:
        kind = part["type"]
        rows = self._rows(part.get(kind), part.get("dtype", "float32"), where, kind)
        self._parts.append(rows)
        return {"type": "text", "text": f"{self._mark}_{len(self._parts) - 1}_"}

    def _rows(self, text: Any, dtype: Any, where: str, kind: str) -> torch.Tensor:
        width, where_text = self._card.hidden_size, f"{where}.{kind}"
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            allowed = ", ".join(_DTYPES)
            raise field_error(f"{where}.dtype", f"{quoted(dtype)} must be one of {allowed}")
        if not isinstance(text, str):
            raise field_error(where_text, f"{quoted(text)} must be rows in base64")
        row_bytes = width * _DTYPES[dtype].itemsize
        most = self._card.max_model_len - sum(map(len, self._parts))
        if len(text) > -(-most * row_bytes // 3) * 4:
            raise field_error(where_text, f"has more rows than the {most} that fit")
        try:
            content = base64.b64decode(text, validate=True)
        except ValueError as error:
            raise field_error(where_text, f"must be rows in base64: {error}") from None
        if not content or len(content) % row_bytes:
            raise field_error(
                where_text,
                f"has {len(content)} bytes; a row of {width} values of {dtype} has {row_bytes}",
            )
        rows = torch.frombuffer(bytearray(content), dtype=_DTYPES[dtype]).reshape(-1, width)
        if not torch.isfinite(rows).all():
            raise field_error(where_text, "must have finite values only")
        return rows.float()


def _is_embeddings(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in EMBEDDINGS


def has_embeddings(messages: Sequence[Any]) -> bool:
    """Return whether any message has a part of embeddings."""
    return any(
        _is_embeddings(part)
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
    )
