"""Lists all formats of tool calls, and finds the format that a chat template describes."""

from __future__ import annotations

from gptmanager.callbacks.answers.tool_format import ToolFormat
from gptmanager.callbacks.answers.tool_formats.deepseek import DeepSeek, DeepSeekV32
from gptmanager.callbacks.answers.tool_formats.gemma4 import FunctionGemma, Gemma4
from gptmanager.callbacks.answers.tool_formats.harmony import Harmony
from gptmanager.callbacks.answers.tool_formats.hermes import Hermes
from gptmanager.callbacks.answers.tool_formats.json_lists import Apertus, Cohere, JsonList
from gptmanager.callbacks.answers.tool_formats.kimi import KimiK2
from gptmanager.callbacks.answers.tool_formats.llama3 import Functionary, Llama3
from gptmanager.callbacks.answers.tool_formats.mistral import Mistral
from gptmanager.callbacks.answers.tool_formats.pythonic import Lfm2, Olmo3, Pythonic
from gptmanager.callbacks.answers.tool_formats.solar_open import SolarOpen
from gptmanager.callbacks.answers.tool_formats.tagged_values import (
    Glm45,
    Hy3,
    MiniCpm5,
    MiniMaxM2,
    Qwen3Coder,
    SeedOss,
)

# In the order in which `format_of` looks for them in a template.
FORMATS: tuple[type[ToolFormat], ...] = (
    Harmony,
    DeepSeek,
    DeepSeekV32,
    KimiK2,
    Apertus,
    SolarOpen,
    Gemma4,
    FunctionGemma,
    Cohere,
    Glm45,
    Hy3,
    MiniMaxM2,
    MiniCpm5,
    SeedOss,
    Qwen3Coder,
    Functionary,
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
