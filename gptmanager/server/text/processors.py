"""The logits post-processor of a request, which enforces a grammar or bans texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gptmanager.callbacks.answers.tool_format import ToolFormat
from gptmanager.callbacks.answers.tools import Tools
from gptmanager.decoding.guided.grammar_start import GrammarStart
from gptmanager.server.engine.engine import Engine
from gptmanager.server.fields import AsItIs, Field, bad_request
from gptmanager.server.http.warning_header import Warnings
from gptmanager.server.text.structured import (
    OutputRule,
    StructuredOutputs,
    prepared,
    read_output_rule,
)

_OBJECT = AsItIs({"type": "object"})
STRUCTURED = (
    Field("response_format", _OBJECT, "text, json_object, or json_schema"),
    Field("structured_outputs", _OBJECT, "one of json, regex, choice, grammar, json_object"),
    Field("guided_json", AsItIs({"type": ["object", "string", "boolean"]}), "a JSON schema"),
    Field("guided_regex", AsItIs({"type": "string"}), "a regular expression"),
    Field("guided_choice", AsItIs({"type": "array", "items": {"type": "string"}})),
    Field("guided_grammar", AsItIs({"type": "string"}), "a grammar in GBNF or Lark"),
    Field("json_schema", AsItIs({"type": ["object", "string", "boolean"]}), "as guided_json"),
    Field("regex", AsItIs({"type": "string"}), "as guided_regex"),
    Field("grammar", AsItIs({"type": "string"}), "as guided_grammar"),
    Field("ebnf", AsItIs({"type": "string"}), "as guided_grammar"),
)


class Processors:
    """Makes the logits post-processors of requests for one model.

    If `lenient`, schema keywords that cannot be enforced are ignored and reported.
    """

    def __init__(self, engine: Engine, *, lenient: bool) -> None:
        self._engine = engine
        self._is_lenient = lenient
        self._structured = StructuredOutputs.of(engine)

    async def of(
        self,
        given: Mapping[str, Any],
        warnings: Warnings,
        tools: Tools | None = None,
        form: ToolFormat | None = None,
        start: Callable[[], GrammarStart | None] | None = None,
    ) -> Any:
        """Return the post-processor of a request, or None if its output is unconstrained.

        `tools` are the tools that the model may call, in the format `form`. `start` returns the
        `GrammarStart` of a rule, or None if the rule applies from the first token. If `start`
        raises ValueError, the rule applies from the first token, and `warnings` gets the reason.
        Rules that are not enforced are added to `warnings`. Raises ApiError: 400 for a rule that
        cannot be compiled, and 429 and 503 as `Engine.preparing` and `prepared` do.
        """
        rule, words = read_output_rule(given), given.get("bad_words")
        is_guided = rule is not None or (tools is not None and form is not None)
        if not words and not is_guided:
            return None
        with self._engine.preparing():
            bans = await self._bans(words)
            grammar = await self._grammar(rule, warnings, tools, form)
        if grammar is not None and start is not None:
            may_end = rule is None and not (tools is not None and tools.required)
            grammar = _started(grammar, start, warnings, may_end)
        if grammar is None or bans is None:
            return bans if grammar is None else grammar
        return grammar.without(bans)

    async def _grammar(
        self,
        rule: OutputRule | None,
        warnings: Warnings,
        tools: Tools | None,
        form: ToolFormat | None,
    ) -> Any:
        if self._is_lenient:
            rule = rule and replace(rule, lenient=True)
            tools = tools and replace(tools, lenient=True)
        if tools is not None and form is not None:
            return await self._structured.processor_with_tools(rule, tools, form, warnings)
        return None if rule is None else await self._structured.processor(rule, warnings)

    async def _bans(self, words: Sequence[str] | None) -> Any:
        texts = self._engine.banned_texts
        if not words:
            return None
        if texts is None:
            raise bad_request("bad_words", "bad_words needs a tokenizer, and the model has none")
        return await prepared("bad_words", lambda: texts.bind(words))


def _started(
    grammar: Any, start: Callable[[], GrammarStart | None], warnings: Warnings, may_end: bool
) -> Any:
    """Return the grammar, which applies after the thought (reasoning) if the answer has one.

    `may_end`: the answer may end in its thought, because no rule has to hold after it.
    """
    try:
        found = start()
    except ValueError as error:
        warnings.add(f"the answer has no thought, because it must fit a rule: {error}")
        return grammar
    return grammar if found is None else grammar.after(found._replace(may_end=may_end))
