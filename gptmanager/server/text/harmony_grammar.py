"""The grammar of an answer in the harmony format: a thought, then a call or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gptmanager.server.text.tools import HARMONY, Tools, grammar_text

_THOUGHT = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
_FINAL = "<|channel|>final<|message|>"


def harmony_grammar(
    tools: Tools, marks: Mapping[str, int], answer: Any = None
) -> tuple[str, dict[str, Any]]:
    """Return the grammar, in Lark's form, and the JSON schemas of its rules.

    `marks`: text -> id of added tokens. `answer`: JSON of this schema may take the place of a call,
    unless a call is required.
    """
    schemas, before, after = dict(tools.schemas), *(grammar_text(it, marks) for it in _THOUGHT)
    lines = ["start: thought? call", f"thought: {before} TEXT {after}", "TEXT: /(?s:.*)/"]
    if answer is not None and not tools.required:
        lines[0] = "start: thought? (call | final)"
        lines.append(f"final: {grammar_text(_FINAL, marks)} answer")
        schemas["answer"] = answer
    lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools.parameters))))
    for index, name in enumerate(tools.parameters):
        header = grammar_text(HARMONY.before + name + HARMONY.between, marks)
        lines.append(f"call_{index}: {header} arguments_{index}")
    return "\n".join(lines), schemas
