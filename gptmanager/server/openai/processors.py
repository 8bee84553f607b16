"""The logits post-processor of a request: what its output has to fit, or must not contain."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from gptmanager.callbacks import BannedTexts
from gptmanager.server.engine import Engine
from gptmanager.server.fields import AsItIs, Field, wrong
from gptmanager.server.openai.structured import StructuredOutputs, read_output_rule

_OBJECT = AsItIs({"type": "object"})
STRUCTURED = (
    Field("response_format", _OBJECT, "text, json_object, or json_schema"),
    Field("structured_outputs", _OBJECT, "one of json, regex, choice, grammar, json_object"),
    Field("guided_json", AsItIs({"type": ["object", "string", "boolean"]}), "a JSON schema"),
    Field("guided_regex", AsItIs({"type": "string"}), "a regular expression"),
    Field("guided_choice", AsItIs({"type": "array", "items": {"type": "string"}})),
    Field("guided_grammar", AsItIs({"type": "string"}), "a grammar in the syntax of Lark"),
)


class Processors:
    """Those of one model; what takes long to prepare is prepared once."""

    def __init__(self, engine: Engine) -> None:
        self.structured = StructuredOutputs.of(engine)
        self._card = engine.card

    async def of(self, given: Mapping[str, Any]) -> Any:
        """None: the model says what it likes. Raises ApiError 400."""
        rule = read_output_rule(given)
        if rule is not None:
            if "bad_words" in given:
                raise wrong("bad_words", f"bad_words stands beside {rule.where}: one is possible")
            return await self.structured.processor(rule)
        return self.banned(given)

    def banned(self, given: Mapping[str, Any]) -> Any:
        """For `bad_words` alone."""
        words = given.get("bad_words")
        if not words:
            return None
        if self._card.tokenizer is None:
            raise wrong("bad_words", "bad_words needs a tokenizer, and the model has none")
        return self._texts.bind(words)

    @cached_property
    def _texts(self) -> BannedTexts:
        assert self._card.tokenizer is not None
        return BannedTexts(self._card.tokenizer)
