"""Lists all formats of tool calls, and finds the format that a chat template describes."""

from __future__ import annotations

from gptmanager.server.tool_formats.deepseek import DeepSeek
from gptmanager.server.tool_formats.harmony import Harmony
from gptmanager.server.tool_formats.hermes import Hermes
from gptmanager.server.tool_formats.llama3 import Llama3
from gptmanager.server.tool_formats.mistral import Mistral
from gptmanager.server.tool_formats.pythonic import Pythonic
from gptmanager.server.tool_formats.qwen3_coder import Qwen3Coder
from gptmanager.server.tool_formats.tool_format import ToolFormat

# The first format that a template describes is used.
FORMATS: tuple[type[ToolFormat], ...] = (
    Harmony,
    DeepSeek,
    Qwen3Coder,
    Hermes,
    Mistral,
    Pythonic,
    Llama3,
)


def format_of(parser: str, template: str) -> ToolFormat | None:
    """Return the format that `--tool-call-parser` names. For `auto`, return the format that a chat
    template describes, or None if it describes none.
    """
    for own in FORMATS:
        if own.name == parser or (parser == "auto" and own.is_in(template)):
            return own(template)
    return None
