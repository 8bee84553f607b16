"""`ChatSettings`: how the server makes prompts of messages, and messages of answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """Options of chats.

    `chat_template`: a file that replaces the checkpoint's template. `trust_request_chat_template`:
    requests may contain a template. `reasoning_parser`: the format of thoughts in answers, by its
    name, and `tool_call_parser` that of calls; auto: that of the chat template.
    `no_special_tokens_in_text`: clients' texts never become special tokens.
    `no_store`: responses are not kept for later requests.
    """

    chat_template: Path | None = None
    trust_request_chat_template: bool = False
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"
    no_special_tokens_in_text: bool = False
    no_store: bool = False
