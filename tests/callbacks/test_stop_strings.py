"""Stop strings: found in text that arrives in pieces, and in outputs that arrive as tokens."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gptmanager.callbacks.text.stop_strings import StopStrings, checked_stops
from gptmanager.callbacks.text.stopped_text import StoppedText
from gptmanager.errors import InvalidRequestError

TEXTS = st.text(alphabet="ab€ \n", max_size=12)
STOPS = st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), max_size=3)
CUTS = st.lists(st.integers(0, 30), max_size=8)
LETTERS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def pieces_of(items, cuts):
    ends = sorted({min(cut, len(items)) for cut in cuts} | {len(items)})
    return [items[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def test_a_stop_string_that_never_begins_costs_nothing():
    looked_for = StopStrings(["x" * 10**6, "ab" * 10**6])
    assert looked_for.push("aabb" * 100) is None
    assert [len(failures) for _, failures in looked_for._stops] == [0, 2]


def test_a_stop_string_that_overlaps_with_itself_is_found():
    texts = ["".join(letters) for letters in itertools.product("ab", repeat=8)]
    for length in (3, 4, 5):
        for stop in map("".join, itertools.product("ab", repeat=length)):
            for text in texts:
                found = StopStrings([stop]).push(text)
                assert (-1 if found is None else found.begin) == text.find(stop)


@given(text=TEXTS, stops=STOPS, cuts=CUTS)
def test_the_stop_string_that_is_complete_first_is_found_in_any_pieces(text, stops, cuts):
    looked_for = StopStrings(stops)
    found = None
    for piece in pieces_of(text, cuts):
        found = found or looked_for.push(piece)

    expected = None
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            expected = (longest, end - len(longest), end)
            break
    assert found == expected
    if expected is None:
        held = [n for n in range(1, 7) for stop in stops if n < len(stop) and text[-n:] == stop[:n]]
        assert looked_for.num_held == max((n for n in held if n <= len(text)), default=0)


# Outputs in tokens -------------------------------------------------------------------------------


def split_text(text, cuts):
    """Return a tokenizer, the bytes of each token, and the tokens of `text`.

    The tokens are pieces of its UTF-8, so they may end within a character.
    """
    letters = "".join(piece for piece, _ in LETTERS.pre_tokenize_str(text))
    words = [word for word in pieces_of(letters, cuts) if word]
    vocabulary = {word: token for token, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    parts = [part for part in pieces_of(text.encode(), cuts) if part]
    return tokenizer, parts, [vocabulary[word] for word in words]


def read(parts):
    return b"".join(parts).decode(errors="replace")


def first_stop(text, stops):
    """(begin, end) of the stop string that is complete first, the longest of several; or None."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return min(ends)[::-1] if ends else None


def num_held(text, stops):
    sizes = range(1, len(text) + 1)
    starts = (n for n in sizes for stop in stops if n < len(stop) and text.endswith(stop[:n]))
    return max(starts, default=0)


@given(text=TEXTS, stops=STOPS, cuts=CUTS, prompt_len=st.integers(0, 4), pushes=CUTS)
def test_an_output_ends_before_the_first_stop_string(text, stops, cuts, prompt_len, pushes):
    # Given an output after a prompt, in any tokens
    tokenizer, parts, tokens = split_text(text, cuts)
    prompt, tokens = tokens[:prompt_len], tokens[prompt_len:]
    start = len(read(parts[:prompt_len]))
    output = read(parts)[start:]
    found = first_stop(output, stops)

    # When the tokens are pushed in any pieces
    stopped = StoppedText(tokenizer, prompt, stops)
    num_kept = 0
    for piece in pieces_of(tokens, pushes):
        num_kept += stopped.push(piece)

        # Then what cannot belong to a stop string is released at once
        complete = read(parts[: prompt_len + num_kept]).rstrip("\N{REPLACEMENT CHARACTER}")[start:]
        if stopped.is_stopped:
            assert found is not None
        else:
            assert first_stop(complete, stops) is None
            assert stopped.text == complete[: len(complete) - num_held(complete, stops)]
    stopped.finish()

    # And text and tokens are those that a search in the whole text finds
    assert stopped.is_stopped == (found is not None)
    if found is None:
        assert (stopped.text, num_kept) == (output, len(tokens))
    else:
        begin, end = found
        assert stopped.text == output[:begin]
        until = (
            len(read(parts[: prompt_len + n])[start:].rstrip("\N{REPLACEMENT CHARACTER}"))
            for n in range(1, len(tokens) + 1)
        )
        assert num_kept == next(n for n, length in enumerate(until, 1) if length >= end)


def test_the_longest_of_the_stop_strings_that_end_together_is_found():
    for stops in itertools.permutations(["b", "ab", "xab"]):
        assert StopStrings(stops).push("aab") == ("ab", 1, 3)


def test_the_text_before_an_incomplete_character_is_released():
    tokenizer, parts, tokens = split_text("ab€ab", [3, 4])
    assert parts == ["ab€ab".encode()[:3], "ab€ab".encode()[3:4], "ab€ab".encode()[4:]]

    text = StoppedText(tokenizer, [], ["b"])
    assert (text.push(tokens[:1]), text.text, text.is_stopped) == (1, "a", True)
    text = StoppedText(tokenizer, [], ["€a"])
    assert [(text.push([token]), text.text) for token in tokens] == [(1, "ab")] * 3


def test_a_stop_string_in_the_prompt_does_not_count():
    tokenizer, _, tokens = split_text("stop here", [2, 4, 6])

    output = StoppedText(tokenizer, tokens[:1], ["stop"])
    output.push(tokens[1:])
    output.finish()

    assert (output.text, output.is_stopped) == ("op here", False)


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("abc", "stop = 'abc' must be a list of strings"),
        (7, "stop = 7 must be a list of strings"),
        ({"a"}, "stop = {'a'} must be a list of strings"),
        (["a", ""], "stop[1] has 0 characters, it must have 1 to 4096"),
        (["x" * 4097], "stop[0] has 4097 characters, it must have 1 to 4096"),
        (["a", b"b"], "stop[1] = b'b' must be a string"),
        (["a"] * 65, "stop has 65 strings, at most 64 are allowed"),
    ],
)
def test_invalid_stop_strings_are_refused(stop, text):
    with pytest.raises(InvalidRequestError) as caught:
        checked_stops(stop)
    assert str(caught.value) == text


def test_stop_strings_up_to_the_limits_are_accepted():
    assert checked_stops([]) == ()
    assert checked_stops(["x" * 4096] * 64) == ("x" * 4096,) * 64
