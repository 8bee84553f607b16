"""Lists all formats of tool calls, and finds the format that a chat template describes."""

from __future__ import annotations

from gptmanager.server.tool_formats.deepseek import DeepSeek
from gptmanager.server.tool_formats.gemma4 import Gemma4
from gptmanager.server.tool_formats.harmony import Harmony
from gptmanager.server.tool_formats.hermes import Hermes
from gptmanager.server.tool_formats.json_lists import Cohere, JsonList
from gptmanager.server.tool_formats.llama3 import Llama3
from gptmanager.server.tool_formats.mistral import Mistral
from gptmanager.server.tool_formats.pythonic import Lfm2, Olmo3, Pythonic
from gptmanager.server.tool_formats.tagged_values import Glm45, MiniMaxM2, Qwen3Coder, SeedOss
from gptmanager.server.tool_formats.tool_format import ToolFormat

# In the order in which `format_of` looks for them in a template.
FORMATS: tuple[type[ToolFormat], ...] = (
    Harmony,
    DeepSeek,
    Gemma4,
    Cohere,
    Glm45,
    MiniMaxM2,
    SeedOss,
    Qwen3Coder,
    JsonList,
    Hermes,
    Mistral,
    Olmo3,
    Lfm2,
    Pythonic,
    Llama3,
)


def format_of(parser: str, template: str) -> ToolFormat | None:
    """Return the format named `parser`, a value of `--tool-call-parser`, or None for other names.

    If `parser` is "auto", return the first of `FORMATS` that the chat template `template`
    describes, or None if it describes none.
    """
    for own in FORMATS:
        if own.name == parser or (parser == "auto" and own.is_in(template)):
            return own(template)
    return None
