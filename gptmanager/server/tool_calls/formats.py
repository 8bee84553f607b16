"""All formats of calls, and the one that a chat template describes."""

from __future__ import annotations

from gptmanager.server.tool_calls.call_format import ToolFormat
from gptmanager.server.tool_calls.deepseek import DeepSeek
from gptmanager.server.tool_calls.harmony import Harmony
from gptmanager.server.tool_calls.hermes import Hermes
from gptmanager.server.tool_calls.llama3 import Llama3
from gptmanager.server.tool_calls.mistral import Mistral
from gptmanager.server.tool_calls.pythonic import Pythonic
from gptmanager.server.tool_calls.qwen3_coder import Qwen3Coder

# the first one that a template describes is used
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
    """Return the format that `--tool-call-parser` names; for `auto`, that of a chat template, or
    None if the template describes none.
    """
    for own in FORMATS:
        if own.name == parser or (parser == "auto" and own.is_in(template)):
            return own(template)
    return None
