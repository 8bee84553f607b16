"""Formats of a model's thoughts (reasoning). `ChatPrompts` chooses the format of a model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tokenizers import Tokenizer

from gptmanager.decoding.guided.grammar_start import GrammarStart
from gptmanager.server.answer_parsing import harmony_parser as harmony
from gptmanager.server.answer_parsing import thought_tags
from gptmanager.server.answer_parsing.answer_parts import AnswerParser
from gptmanager.server.answer_parsing.harmony_parser import HarmonyParser
from gptmanager.server.answer_parsing.thought_tags import ThoughtTags
from gptmanager.server.tool_formats.tool_format import ToolFormat
from gptmanager.server.tool_formats.tools import Tools


class Reasoning(Enum):
    """A format of thoughts; its value is its name for `--reasoning-parser`."""

    NONE = "none"
    THINK = "think"
    HARMONY = "harmony"

    @property
    def tags(self) -> tuple[str, ...]:
        """The texts by which a parser finds thoughts."""
        if self is Reasoning.HARMONY:
            return harmony.TAGS
        tags = (thought_tags.OPENER, thought_tags.CLOSER)
        return tags if self is Reasoning.THINK else ()


def reasoning_of(parser: str, template: str) -> Reasoning:
    """Return the format named by `--reasoning-parser`; for `auto`, the chat template's format."""
    if parser != "auto":
        return Reasoning(parser)
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return Reasoning.HARMONY
    return Reasoning.THINK if thought_tags.CLOSER in template else Reasoning.NONE


@dataclass(frozen=True, slots=True)
class AnswerStart:
    """How an answer begins, as its prompt decides.

    `is_open`: the answer begins within a thought. `is_closed`: the answer begins after the thought.
    Both are used only for thoughts in tags. For harmony, `prompt` is the last message header of the
    rendered prompt, from `<|start|>` on. The answer continues this header.
    """

    reasoning: Reasoning = Reasoning.NONE
    is_open: bool = False
    is_closed: bool = False
    prompt: str = ""

    @staticmethod
    def of_prompt(reasoning: Reasoning, text: str, continued: str | None) -> AnswerStart:
        """Read the end of the rendered prompt `text`.

        `continued`: the content of the message that the answer continues, or None.
        """
        if reasoning is Reasoning.HARMONY:
            begin, found = text.rfind(harmony.START), text.rfind(harmony.MESSAGE)
            end = found + len(harmony.MESSAGE) if found > begin else len(text)
            return AnswerStart(reasoning, prompt=text[begin:end] if begin >= 0 else "")
        if reasoning is Reasoning.NONE:
            return AnswerStart()
        if continued is not None:
            is_open = continued.rfind(thought_tags.OPENER) > continued.rfind(thought_tags.CLOSER)
            return AnswerStart(reasoning, is_open=is_open, is_closed=not is_open)
        last = text[-_LONGEST_END:].rstrip()
        is_closed = last.endswith(thought_tags.CLOSER)
        return AnswerStart(reasoning, last.endswith(thought_tags.OPENER), is_closed)

    def parser(self, tools: Tools | None, form: ToolFormat | None) -> AnswerParser | None:
        """Return the parser of an answer; None if all text of the answer is content."""
        if self.reasoning is Reasoning.HARMONY:
            return HarmonyParser(() if tools is None else tools.parameters, self.prompt)
        calls = None if tools is None or form is None else form.parser(tools)
        if self.reasoning is Reasoning.NONE or self.is_closed:
            return calls
        return ThoughtTags(calls, is_open=self.is_open)

    def grammar_start(self, tokenizer: Tokenizer) -> GrammarStart | None:
        """Return where in the answer a grammar begins; None if it begins with the answer.

        Raises ValueError if the tokenizer lacks a token of harmony or, after a prompt that opens a
        thought, the token that closes it.
        """
        if self.reasoning is Reasoning.NONE or self.is_closed:
            return None
        if self.reasoning is Reasoning.HARMONY:
            if harmony.is_in_final(self.prompt):
                return None
            final = tokenizer.encode("final", add_special_tokens=False).ids
            channel, message = (_id(tokenizer, tag) for tag in (harmony.CHANNEL, harmony.MESSAGE))
            return GrammarStart((channel, *final), then=message)
        if self.is_open:
            return GrammarStart((_id(tokenizer, thought_tags.CLOSER),))
        opener, closer = map(tokenizer.token_to_id, (thought_tags.OPENER, thought_tags.CLOSER))
        # A model without these tokens was not trained to think.
        return None if opener is None or closer is None else GrammarStart((closer,), opens=opener)


_LONGEST_END = 64  # characters at the end of a prompt in which a tag is looked for


def _id(tokenizer: Tokenizer, tag: str) -> int:
    found = tokenizer.token_to_id(tag)
    if found is None:
        raise ValueError(f"the tokenizer has no token {tag}")
    return int(found)


def special_tags(tokenizer: Tokenizer, tags: tuple[str, ...]) -> dict[int, str]:
    """Return token id -> text of the tags that are special tokens, which decoding leaves out."""
    added = tokenizer.get_added_tokens_decoder().items()
    return {index: one.content for index, one in added if one.special and one.content in tags}
