"""A grammar that begins after a thought: the thought is free, the text after it is guided."""

import pytest
from guided_requests import allowed, encoded, ids
from text_checkpoint import END_ID, byte_tokenizer

from gptmanager.callbacks import BannedTexts
from gptmanager.decoding.guided.grammar_start import GrammarStart
from gptmanager.request.post_processor import RequestProcessor

OPENS, CLOSES, THEN = encoded("[]:")
ANY = set(range(END_ID))  # all tokens but the end
IS_OPEN = GrammarStart((CLOSES,))
MAY_OPEN = GrammarStart((CLOSES,), opens=OPENS)
IN_STEPS = GrammarStart((CLOSES, CLOSES), THEN)


def after(processor, text, **more):
    return allowed(processor, [7, 8, *encoded(text)], **more)


@pytest.mark.parametrize(
    ("start", "generated", "expected"),
    [
        (IS_OPEN, "", ANY),
        (IS_OPEN, "abc[", ANY),
        (IS_OPEN, "abc]", ids("a")),
        (IS_OPEN, "]a", ids("b") | {END_ID}),
        (MAY_OPEN, "", ids("a[")),
        (MAY_OPEN, "a", ids("b") | {END_ID}),
        (MAY_OPEN, "[", ANY),
        (MAY_OPEN, "[a[", ANY),
        (MAY_OPEN, "[]", ids("a")),
        (MAY_OPEN, "[x]ab", {END_ID}),
        (MAY_OPEN._replace(may_end=True), "[a", ANY | {END_ID}),
        (MAY_OPEN._replace(may_end=True), "[a]", ids("a")),
        (IN_STEPS, "]x]:", ANY),
        (IN_STEPS, "x]]", ANY),
        (IN_STEPS, "x]]json", ANY),
        (IN_STEPS, "x]]json:", ids("a")),
    ],
)
def test_what_may_follow(byte_guided, start, generated, expected):
    assert after(byte_guided.regex("ab?").after(start), generated, vocab_size=300) == expected


def test_a_thought_cannot_end_the_output_with_an_end_of_the_request(byte_guided):
    regex = byte_guided.regex("ab?").after(IS_OPEN)
    assert after(regex, "x", end_id=9) == ANY - {9}


@pytest.mark.parametrize("start", [IS_OPEN, MAY_OPEN])
def test_a_history_that_is_shorter_than_before(byte_guided, start):
    regex = byte_guided.regex("abc").after(start)
    handle = RequestProcessor(regex)
    expected = {"[xy]": "a", "[xy]ab": "c", "[xy]a": "b", "[x": None, "[]": "a"}
    for text, letters in {**expected, "[": None, "[xyz]a": "b"}.items():
        found = after(regex, text, handle=handle)
        assert found == (ANY if letters is None else ids(letters)), text


def test_bans_hold_in_the_thought_too(byte_guided):
    bans = BannedTexts(byte_tokenizer()).bind(["q"])
    bans.prepare("cpu").result(20)
    regex = byte_guided.regex("[a-z]").after(IS_OPEN).without(bans)
    assert after(regex, "x") == ANY - ids("q")
    assert after(regex, "x]") == ids("abcdefghijklmnoprstuvwxyz")
