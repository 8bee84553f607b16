"""Thoughts in answers: parsed from any pieces of text, told from templates and prompts."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_checkpoint import byte_tokenizer

from gptmanager.callbacks.answers.parsing.harmony_parser import HarmonyParser
from gptmanager.callbacks.answers.parsing.thought_tags import ThoughtTags
from gptmanager.callbacks.answers.reasoning import (
    AnswerStart,
    Reasoning,
    reasoning_of,
    special_tags,
    with_thoughts,
)
from gptmanager.callbacks.answers.tool_formats.hermes import Hermes, HermesParser
from gptmanager.decoding.guided.grammar_start import GrammarStart
from gptmanager.server.chat.chat_answer import ChatAnswer
from gptmanager.server.chat.tools import read_tools

TEMPLATES = Path(__file__).parents[1] / "server" / "chat_templates"
HEAD = "<|start|>assistant"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "</think>"}}\n</tool_call>'
TO_ADD = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": [1]}'
NAMES = {"add"}
TOOLS = read_tools([{"type": "function", "function": {"name": "add"}}], None)


def tags(*, is_open=False):
    return ThoughtTags(HermesParser(NAMES), is_open=is_open)


def within(*, is_open=False):
    """The parser of a whole answer, which also finds calls after a thought that is not closed."""
    return AnswerStart(Reasoning.THINK, is_open=is_open).parser(TOOLS, Hermes())


def read(parser, text, size=None):
    """Thought, content, calls, and the number of characters in thoughts."""
    answer = ChatAnswer(parser)
    deltas = []
    for at in range(0, len(text), size or 10**9):
        deltas += answer.push(text[at : at + (size or 10**9)])
        answer.num_reasoning_tokens(range(min(at + (size or 10**9), len(text))))
    deltas += answer.flush()
    message = answer.message()
    thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
    content = "".join(delta.get("content", "") for delta in deltas)
    calls = [call["function"] for call in message.get("tool_calls", ())]
    assert message.get("reasoning_content", "") == message.get("reasoning", "") == thought
    assert (message["content"] or "") == content
    told = [one["tool_calls"][0]["function"] for one in deltas if "tool_calls" in one]
    assert "".join(it["arguments"] for it in told) == "".join(it["arguments"] for it in calls)
    calls = [(call["name"], call["arguments"]) for call in calls]
    return thought, content, calls, answer.num_reasoning_tokens(range(len(text)))


@pytest.mark.parametrize("size", [1, 2, 3, 7, None])
@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nI add.\n</think>\n\nIt is 3.", False, ("I add.", "It is 3.", [], 8)),
        ("\n<think>a</think>b", False, ("a", "b", [], 1)),
        ("I add.\n</think>\n\nIt is 3.", True, ("I add.", "It is 3.", [], 7)),
        ("<think>\nI add.</think>3", True, ("I add.", "3", [], 7)),
        ("It is <think>3</think>.", False, ("", "It is <think>3</think>.", [], 0)),
        ("<think>\n\n</think>\n\n3", False, ("", "3", [], 2)),
        ("<think>cut </thi", False, ("cut </thi", "", [], 9)),
        ("<think>cut \n", False, ("cut", "", [], 5)),
        ("  <thi", False, ("", "  <thi", [], 0)),
        ("  ", True, ("", "", [], 2)),
        ("<think>a</think>  ", False, ("a", "", [], 1)),
        (f"<think>{CALL.replace('</think>', '')}</think>{CALL}", False,
         (CALL.replace("</think>", ""), "", [("add", '{"a": "</think>"}')], 64)),
        (f"<think>x < y, a </b></think>3 {CALL} 4", False,
         ("x < y, a </b>", "3 4", [("add", '{"a": "</think>"}')], 13)),
    ],
)  # fmt: skip
def test_thoughts_in_tags(text, is_open, size, expected):
    assert read(tags(is_open=is_open), text, size) == expected


ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADDED, N = ("add", '{"a": 1}'), len(ADD)


@pytest.mark.parametrize("size", [1, 2, 3, 7, None])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"I add.\n{ADD}\n", ("I add.", "", [ADDED], 7)),
        (f"{ADD} {ADD}", ("", "", [ADDED] * 2, 0)),
        (f"{ADD}</think>3", (ADD, "3", [], N)),  # the thought is closed
        (f"a {ADD} b", (f"a {ADD} b", "", [], N + 4)),  # something follows
        (f"a {ADD} b {ADD}", (f"a {ADD} b", "", [ADDED], N + 5)),
        (f"a {ADD[:-24]}", (f"a {ADD[:-24]}", "", [], N - 22)),  # it is cut
        (f"a <tool_call> {ADD}", ("a <tool_call>", "", [ADDED], 14)),
        (f"a <tool_call>{ADD.replace('add', 'sub')}", None),  # no tool of this name
        (f"{'<tool_call> ' * 15}{ADD}", ("<tool_call> " * 14 + "<tool_call>", "", [ADDED], 180)),
        (f"{'<tool_call> ' * 16}{ADD}", None),
        ("a <tool_", None),
    ],
)
def test_calls_end_a_thought_that_is_not_closed(text, size, expected):
    found = read(within(), f"<think>{text}", size)
    assert found == (expected or (text, "", [], len(text)))
    assert read(within(is_open=True), text, size)[:3] == found[:3]


def test_a_call_in_a_thought_is_read_once(monkeypatch):
    lengths = []
    push = HermesParser.push
    monkeypatch.setattr(
        HermesParser, "push", lambda self, text: lengths.append(len(text)) or push(self, text)
    )
    text = ADD.replace("1", "1" * 1000)
    found = read(within(is_open=True), text, 8)
    assert found[2] == [("add", '{"a": %s}' % ("1" * 1000))] and sum(lengths) == len(text)


def test_calls_after_a_thought_are_a_reason_to_run_them():
    for text, reason in ((ADD, "tool_calls"), (ADD[:-16], "stop")):
        answer = ChatAnswer(within())
        answer.push(f"<think>Hm.{text}")
        answer.flush()
        assert answer.finish_reason("stop") == reason


@pytest.mark.parametrize("size", [1, 2, 5, None])
@pytest.mark.parametrize(
    ("name", "text", "prompt", "expected"),
    [
        ("mistral", "[THINK]I add.[/THINK]It is 3.", "", ("I add.", "It is 3.", [], 6)),
        ("seed_oss", "<seed:think>a</seed:think>\n3", "", ("a", "3", [], 1)),
        ("gemma4", "<|channel>thought\nI add.\n<channel|>It is 3.", "",
         ("I add.", "It is 3.", [], 8)),
        ("gemma4", "<|channel>thought<channel|>3", "", ("", "3", [], 0)),
        ("gemma4", "a</think>3", "<|channel>thought\n<channel|>", ("", "a</think>3", [], 0)),
        ("gemma4", "a<channel|>3", "<|channel>thought\n", ("a", "3", [], 1)),
        ("cohere", f"<|START_THINKING|>I add.<|END_THINKING|><|START_RESPONSE|>It <| is{CALL}"
         "<|END_RESPONSE|>", "", ("I add.", "It <| is", [("add", '{"a": "</think>"}')], 6)),
        ("cohere", "<|START_RESPONSE|>3 <|END_RESPONSE|>", "<|START_THINKING|><|END_THINKING|>",
         ("", "3 ", [], 0)),
        ("cohere", "<|START_TEXT|> 3<|END_TE", "", ("", " 3<|END_TE", [], 0)),
        ("apertus", "<|inner_prefix|>I add.<|inner_suffix|>3", "", ("I add.", "3", [], 6)),
        ("apertus", "<|inner_prefix|>a <|<|tools_prefix|>3", "",
         ("a <|", "<|tools_prefix|>3", [], 4)),
        ("solar_open", f"<|think|>a<|end|><|begin|>assistant<|content|>3<|begin|>{CALL}<|end|>", "",
         ("a", "3", [("add", '{"a": "</think>"}')], 1)),
        ("solar_open", "<|content|>3<|flush|><|begin|>assist",
         "<|begin|>assistant<|think|><|end|><|begin|>assistant", ("", "3<|begin|>assist", [], 0)),
        ("hy3", "a</think:opensource>3", "<think:opensource>", ("a", "3", [], 1)),
    ],
)  # fmt: skip
def test_other_tags_of_thoughts(name, text, prompt, size, expected):
    start = AnswerStart.of_prompt(Reasoning(name), prompt, None)
    assert read(start.parser(TOOLS, Hermes()), text, size) == expected
    if size is None:
        form = Reasoning(name).form
        for shown in form.shown or (form.closer,):
            assert reasoning_of("auto", f"{shown} </think>") is Reasoning(name)


def test_thoughts_have_all_keys_that_templates_read():
    """Harmony's template refuses a message with calls that has both `thinking` and content."""
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [{}]},
        {"role": "assistant", "content": "3", "reasoning_content": "Hm.", "tool_calls": [{}]},
    ]

    def added(reasoning):
        found = with_thoughts(messages, reasoning)
        return [{*new} - {*old} for old, new in zip(messages, found, strict=True)]

    assert added(Reasoning.NONE) == [set(), {"reasoning", "thinking"}, {"reasoning", "thinking"}]
    assert added(Reasoning.HARMONY) == [set(), {"reasoning", "thinking"}, {"reasoning"}]


def test_content_between_dropped_tags_keeps_its_place():
    text = "a<|START_RESPONSE|>bc<|END_RESPONSE|><|END"
    parser = AnswerStart(Reasoning.COHERE, is_closed=True).parser(None, None)
    pieces = [one for letter in text for one in parser.push(letter)] + parser.flush()
    assert [text[one.begin : one.end] for one in pieces] == [one.text for one in pieces]
    assert "".join(one.text for one in pieces) == "abc<|END"


@pytest.mark.parametrize("size", [1, 2, 3, 7, None])
@pytest.mark.parametrize(
    ("text", "prompt", "expected"),
    [
        (f"<|channel|>analysis<|message|>Hm.<|end|>{HEAD}<|channel|>final<|message|>It is 3.",
         HEAD, ("Hm.", "It is 3.", [], 3)),
        (f"<|channel|>analysis<|message|>Hm.<|end|>{HEAD}{TO_ADD}", HEAD,
         ("Hm.", "", [("add", '{"a": [1]}')], 3)),
        (f"<|channel|>analysis<|message|>Hm.<|end|>{HEAD} to=functions.add<|channel|>commentary "
         'json<|message|>{"a": [1]}<|call|>', HEAD, ("Hm.", "", [("add", '{"a": [1]}')], 3)),
        (f"<|channel|>analysis<|message|>A{HEAD}<|channel|>analysis<|message|>B<|end|>{HEAD}"
         f"<|channel|>commentary<|message|>I call.<|end|>{HEAD}{TO_ADD}<|call|>", HEAD,
         ("A\nB", "I call.", [("add", '{"a": [1]}')], 2)),
        (f"<|channel|>commentary<|message|>One<|end|>{HEAD}<|channel|>final<|message|>Two"
         "<|return|>", HEAD, ("", "One\nTwo", [], 0)),
        ("<|channel|>commentary to=functions.other<|message|>{}", HEAD, ("", "{}", [], 0)),
        ("<|message|>Hi", HEAD, ("", "Hi", [], 0)),
        ("Just text", HEAD, ("", "Just text", [], 0)),
        ("ass", "", ("", "ass", [], 0)),
        ("<", "", ("", "<", [], 0)),
        ("<|channel|>anal", HEAD, ("", "", [], 0)),
        (f"a<b{'<|'}<|end|>", f"{HEAD}<|channel|>analysis<|message|>", ("a<b<|", "", [], 5)),
        ("analysis<|message|>Hm.", f"{HEAD}<|channel|>", ("Hm.", "", [], 3)),
        ("more.", f"{HEAD}<|channel|>final<|message|>", ("", "more.", [], 0)),
        ('1}', f'{HEAD}{TO_ADD[:-10]}', ("", "1}", [], 0)),
    ],
)  # fmt: skip
def test_harmony(text, prompt, size, expected):
    assert read(HarmonyParser(NAMES, prompt), text, size) == expected


@pytest.mark.parametrize("size", [1, 100, None])
def test_a_header_of_harmony_without_an_end_is_content(size):
    for header in ("<|channel|>" + "<" * 1100, f"<|channel|>final{'x' * 1100}<|message|>3"):
        assert read(HarmonyParser(NAMES, HEAD), header, size) == ("", header, [], 0)


@pytest.mark.parametrize(
    ("arguments", "reason"), [('{"a": [1', "stop"), ('{"a": [1]}', "tool_calls")]
)
def test_a_cut_call_of_harmony_does_not_finish_as_tool_calls(arguments, reason):
    answer = ChatAnswer(HarmonyParser(NAMES, HEAD))
    answer.push(TO_ADD.replace('{"a": [1]}', arguments))
    answer.flush()
    assert answer.finish_reason("stop") == reason


PIECES = [
    *("<think>", "</think>", "\n", " ", "a", "<", "</", "<|", "|>", '{"a": 1}', "é", CALL, TO_ADD),
    *(HEAD, "<|start|>", "<|channel|>", "analysis", "final", "commentary", " to=functions.add"),
    *("<|message|>", "<|end|>", "<|call|>", "<|return|>", "<tool_call>", "</tool_call>"),
]


@given(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.sets(st.integers(1, 200)),
    st.sampled_from(
        [
            tags,
            lambda: tags(is_open=True),
            lambda: HarmonyParser(NAMES, HEAD),
            within,
            lambda: within(is_open=True),
        ]
    ),
)
def test_an_answer_in_any_pieces_is_the_whole(text, cuts, make):
    answer, whole = ChatAnswer(make()), read(make(), text)
    deltas = []
    at = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    for begin, end in zip(at, at[1:], strict=False):
        deltas += answer.push(text[begin:end])
        answer.num_reasoning_tokens(range(end))
    deltas += answer.flush()
    message = answer.message()
    assert message.get("reasoning", "") == whole[0] and (message["content"] or "") == whole[1]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    assert [(call["name"], call["arguments"]) for call in calls] == whole[2]
    assert answer.num_reasoning_tokens(range(len(text))) == whole[3]


@pytest.mark.parametrize(
    ("parser", "template", "expected"),
    [
        ("auto", "{{ content.split('</think>')[-1] }}", Reasoning.THINK),
        ("auto", "<|start|>assistant<|channel|>final<|message|>", Reasoning.HARMONY),
        ("auto", (TEMPLATES / "llama3.jinja").read_text(), Reasoning.NONE),
        ("none", "</think>", Reasoning.NONE),
        ("think", "", Reasoning.THINK),
        ("harmony", "</think>", Reasoning.HARMONY),
    ],
)
def test_the_template_determines_the_format(parser, template, expected):
    assert reasoning_of(parser, template) is expected


@pytest.mark.parametrize(
    ("text", "continued", "is_open", "is_closed"),
    [
        ("<|im_start|>assistant\n", None, False, False),
        ("say <think>.<|im_start|>assistant\n", None, False, False),
        ("<|im_start|>assistant\n<think>\n", None, True, False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", None, False, True),
        ("assistant\n<think>\nHm", "<think>\nHm", True, False),
        ("assistant\n<think>\nHm</think>\nYes", "<think>\nHm</think>\nYes", False, True),
        ("assistant\nYes", "Yes", False, True),
    ],
)
def test_what_a_prompt_says(text, continued, is_open, is_closed):
    found = AnswerStart.of_prompt(Reasoning.THINK, text, continued)
    assert (found.is_open, found.is_closed) == (is_open, is_closed)
    assert AnswerStart.of_prompt(Reasoning.NONE, text, continued).parser(None, None) is None


def test_where_a_grammar_begins():
    tokenizer = byte_tokenizer()
    may, is_open = AnswerStart(Reasoning.THINK), AnswerStart(Reasoning.THINK, is_open=True)
    assert may.grammar_start(tokenizer) is None
    for start, tag in ((is_open, "</think>"), (AnswerStart(Reasoning.HARMONY), r"<\|channel\|>")):
        with pytest.raises(ValueError, match=f"no token {tag}"):
            start.grammar_start(tokenizer)
    tokenizer.add_tokens(["<think>", "</think>"])
    opener, closer = map(tokenizer.token_to_id, ("<think>", "</think>"))
    assert may.grammar_start(tokenizer) == GrammarStart((closer,), opens=opener)
    assert is_open.grammar_start(tokenizer) == GrammarStart((closer,))
    closed = AnswerStart(Reasoning.THINK, is_closed=True)
    assert (
        closed.grammar_start(tokenizer) is None and AnswerStart().grammar_start(tokenizer) is None
    )
    assert special_tags(tokenizer, may.reasoning.tags) == {}
    tokenizer.add_special_tokens(list(Reasoning.HARMONY.tags))
    ids = special_tags(tokenizer, Reasoning.HARMONY.tags)
    assert {*ids.values()} == {*Reasoning.HARMONY.tags}
    within = "<|start|>assistant<|channel|>final<|message|>It"
    for text, has_start in (
        ("<|start|>assistant", True),
        ("<|start|>assistant<|channel|>final", True),
        ("<|start|>assistant<|channel|>analysis<|message|>Hm", True),
        (within, False),
        (within + "<|end|><|start|>assistant", True),
    ):
        begun = AnswerStart.of_prompt(Reasoning.HARMONY, text, None)
        assert (begun.grammar_start(tokenizer) is not None) == has_start, text
    start = AnswerStart(Reasoning.HARMONY).grammar_start(tokenizer)
    named = {tag: token for token, tag in ids.items()}
    final = (named["<|channel|>"], *tokenizer.encode("final").ids)
    assert start == GrammarStart(final, then=named["<|message|>"])
    tokenizer.add_special_tokens(["<|think|>", "<|begin|>"])
    closes = tokenizer.encode("<|end|><|begin|>assistant").ids
    start = AnswerStart(Reasoning.SOLAR_OPEN).grammar_start(tokenizer)
    assert start == GrammarStart(tuple(closes), opens=tokenizer.token_to_id("<|think|>"))


def test_the_last_header_of_a_prompt():
    text = f"<|start|>user<|message|>{'x' * 99}<|end|>{HEAD}"
    assert AnswerStart.of_prompt(Reasoning.HARMONY, text, None).prompt == HEAD
    header = f"{HEAD}<|channel|>final<|message|>"
    found = AnswerStart.of_prompt(Reasoning.HARMONY, f"{text}{header[len(HEAD) :]}It", "It")
    assert found.prompt == header
    assert AnswerStart.of_prompt(Reasoning.HARMONY, "no header", None).prompt == ""
