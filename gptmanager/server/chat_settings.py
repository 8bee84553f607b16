"""`ChatSettings`: how the server converts messages to prompts, and answers to messages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """Options of chats.

    `chat_template`: a file that replaces the checkpoint's template. `trust_request_chat_template`:
    requests may contain a template. `reasoning_parser` and `tool_call_parser`: the names of the
    formats of reasoning and of tool calls in answers; "auto" chooses the format that the chat
    template uses. `no_special_tokens_in_text`: texts of clients never become special tokens.
    `no_store`: responses are not kept for later requests.
    """

    chat_template: Path | None = None
    trust_request_chat_template: bool = False
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"
    no_special_tokens_in_text: bool = False
    no_store: bool = False
