"""The harmony format of gpt-oss. Its grammar allows a thought, then a call or the final answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gptmanager.callbacks.answers.call_grammar import grammar_text
from gptmanager.callbacks.answers.parsing.answer_parts import AnswerParser
from gptmanager.callbacks.answers.parsing.harmony_parser import CHANNEL, TAGS, HarmonyParser
from gptmanager.callbacks.answers.tool_format import ToolFormat
from gptmanager.callbacks.answers.tools import Tools

_CALL = ("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>")
_THOUGHT = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
_FINAL = "<|channel|>final<|message|>"


class Harmony(ToolFormat):
    """The harmony format, with one call in an answer.

    If calls are optional, there is a grammar only if an answer without a call must fit a schema.
    Without a grammar, an answer may begin with a thought, with text or with a call.
    """

    name = "harmony"
    tags = TAGS
    has_thoughts = True

    @staticmethod
    def is_in(template: str) -> bool:
        return CHANNEL in template and "to=functions." in template

    def parser(self, tools: Tools) -> AnswerParser:
        return HarmonyParser(tools.parameters)

    def grammar(
        self, tools: Tools, marks: Mapping[str, int], answer: Any = None
    ) -> tuple[str, dict[str, Any]] | None:
        if answer is None and not tools.required:
            return None
        schemas, before, after = dict(tools.schemas), *(grammar_text(it, marks) for it in _THOUGHT)
        lines = ["start: thought? call", f"thought: {before} TEXT {after}", "TEXT: /(?s:.*)/"]
        if not tools.required:
            lines[0] = "start: thought? (call | final)"
            lines.append(f"final: {grammar_text(_FINAL, marks)} answer")
            schemas["answer"] = answer
        lines.append("call: " + " | ".join(f"call_{it}" for it in range(len(tools.parameters))))
        for index, name in enumerate(tools.parameters):
            header = grammar_text(name.join(_CALL), marks)
            lines.append(f"call_{index}: {header} arguments_{index}")
        return "\n".join(lines), schemas
