"""Formats of a model's thoughts (reasoning). `ChatPrompts` chooses the format of a model."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tokenizers import Tokenizer

from gptmanager.callbacks.answers.parsing import harmony_parser as harmony
from gptmanager.callbacks.answers.parsing.answer_parts import AnswerParser
from gptmanager.callbacks.answers.parsing.call_parser import CallParser
from gptmanager.callbacks.answers.parsing.harmony_parser import HarmonyParser
from gptmanager.callbacks.answers.parsing.thought_tags import THINK, ThoughtFormat, ThoughtTags
from gptmanager.callbacks.answers.tool_format import ToolFormat
from gptmanager.callbacks.answers.tools import Tools
from gptmanager.decoding.guided.grammar_start import GrammarStart


class Reasoning(Enum):
    """A format of thoughts; its value is its name for `--reasoning-parser`."""

    NONE = "none"
    THINK = "think"
    MISTRAL = "mistral"
    SEED_OSS = "seed_oss"
    COHERE = "cohere"
    GEMMA4 = "gemma4"
    APERTUS = "apertus"
    SOLAR_OPEN = "solar_open"
    HY3 = "hy3"
    HARMONY = "harmony"

    @property
    def form(self) -> ThoughtFormat | None:
        """The tags around a thought; None for harmony, and without thoughts."""
        return _FORMS.get(self)

    @property
    def tags(self) -> tuple[str, ...]:
        """The texts by which a parser finds thoughts."""
        if self is Reasoning.HARMONY:
            return harmony.TAGS
        return () if self.form is None else self.form.tags


# In the order in which `reasoning_of` looks for them in a template.
_FORMS = {
    Reasoning.GEMMA4: ThoughtFormat("<|channel>", "<channel|>", label="thought"),
    Reasoning.COHERE: ThoughtFormat(
        "<|START_THINKING|>", "<|END_THINKING|>",
        around=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    # Apertus may call a tool within a thought, and continue the thought after the result.
    Reasoning.APERTUS: ThoughtFormat(
        "<|inner_prefix|>", "<|inner_suffix|>", next_tags=("<|tools_prefix|>",)
    ),
    Reasoning.SOLAR_OPEN: ThoughtFormat(
        "<|think|>", "<|end|>", header="<|begin|>assistant", shown=("assistant<|think|>",),
        around=(
            "<|begin|>assistant", "<|begin|>", "<|content|>", "<|tool_calls|>", "<|end|>",
            "<|flush|>", "<|calls|>",
        ),
    ),
    Reasoning.HY3: ThoughtFormat(
        "<think:opensource>", "</think:opensource>", shown=("</think{}>", "</think:opensource>")
    ),
    Reasoning.SEED_OSS: ThoughtFormat("<seed:think>", "</seed:think>"),
    Reasoning.MISTRAL: ThoughtFormat("[THINK]", "[/THINK]"),
    Reasoning.THINK: THINK,
}  # fmt: skip


def reasoning_of(parser: str, template: str) -> Reasoning:
    """Return the format named by `--reasoning-parser`; for `auto`, the chat template's format."""
    if parser != "auto":
        return Reasoning(parser)
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return Reasoning.HARMONY
    found = (name for name, form in _FORMS.items() if form.is_in(template))
    return next(found, Reasoning.NONE)


def with_thoughts(
    messages: Sequence[Mapping[str, Any]], reasoning: Reasoning
) -> list[dict[str, Any]]:
    """Copy the thoughts in `reasoning_content` to the other keys that chat templates read.

    A template decides which thoughts the model sees. In harmony a message with calls has either
    thoughts or content, and the model does not see the thoughts of other messages.
    """
    found = []
    for one in messages:
        more, thoughts = {}, one.get("reasoning_content")
        if thoughts:
            more["reasoning"] = thoughts
            if reasoning is not Reasoning.HARMONY or (one.get("tool_calls") and not one["content"]):
                more["thinking"] = thoughts
        found.append({**one, **more})
    return found


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
        form = reasoning.form
        if form is None:
            return AnswerStart()
        if continued is not None:
            is_open = continued.rfind(form.opener) > continued.rfind(form.closer)
            return AnswerStart(reasoning, is_open=is_open, is_closed=not is_open)
        last = text[-_LONGEST_END:].rstrip()
        is_open = last.endswith((form.opener, form.opener + form.label))
        return AnswerStart(reasoning, is_open, is_closed=last.endswith(form.closer))

    def parser(self, tools: Tools | None, form: ToolFormat | None) -> AnswerParser | None:
        """Return the parser of an answer; None if all text of the answer is content."""
        if self.reasoning is Reasoning.HARMONY:
            return HarmonyParser(() if tools is None else tools.parameters, self.prompt)
        calls = None if tools is None or form is None else form.parser(tools)
        thoughts = self.reasoning.form
        if thoughts is None or (self.is_closed and not thoughts.around):
            return calls
        new_calls: Any = None
        if isinstance(calls, CallParser) and tools and form and not thoughts.next_tags:
            new_calls = functools.partial(form.parser, tools)
        return ThoughtTags(
            calls, thoughts, is_open=self.is_open, is_closed=self.is_closed, new_calls=new_calls
        )

    def grammar_start(self, tokenizer: Tokenizer) -> GrammarStart | None:
        """Return where in the answer a grammar begins; None if it begins with the answer.

        Raises ValueError if the tokenizer lacks a token of harmony or, after a prompt that opens a
        thought, the token that closes it.
        """
        form = self.reasoning.form
        if self.reasoning is Reasoning.HARMONY:
            if harmony.is_in_final(self.prompt):
                return None
            final = tokenizer.encode("final", add_special_tokens=False).ids
            channel, message = (_id(tokenizer, tag) for tag in (harmony.CHANNEL, harmony.MESSAGE))
            return GrammarStart((channel, *final), then=message)
        if form is None or self.is_closed:
            return None
        header = tokenizer.encode(form.header, add_special_tokens=False).ids
        if self.is_open:
            return GrammarStart((_id(tokenizer, form.closer), *header))
        opener, closer = map(tokenizer.token_to_id, (form.opener, form.closer))
        if opener is None or closer is None:  # the model was not trained to think
            return None
        return GrammarStart((closer, *header), opens=opener)


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
