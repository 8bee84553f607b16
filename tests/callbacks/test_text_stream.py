import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gptmanager.callbacks import TextStream

END = 0
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def fallback_tokenizer():
    """Words with a leading mark for the space, and bytes for all else, as Llama 2 has."""
    words = ["<unk>", "▁once", "▁upon", "a"]
    vocabulary = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE({word: index for index, word in enumerate(vocabulary)}, [], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def pieces(stream, ids):
    return [*map(stream.push, ids), stream.flush()]


def byte_ids(text):
    return [4 + byte for byte in text.encode()]


def byte_tokens(tokenizer, character):
    assert character == "🙂"
    return [tokenizer.token_to_id(letter) for letter in "ðŁĻĤ"]


@pytest.mark.parametrize("text", ["once upon a time", "café 🙂 naïve", "日本語", "12 + 30 = 42"])
def test_the_pieces_are_the_text(tokenizer, text):
    ids = tokenizer.encode(text).ids

    assert "".join(pieces(TextStream(tokenizer), ids)) == text


def test_an_incomplete_character_is_held_back(tokenizer):
    ids = byte_tokens(tokenizer, "🙂")
    stream = TextStream(tokenizer)

    assert [stream.push(token) for token in ids] == ["", "", "", "🙂"]
    assert stream.push(ids[0]) == ""
    assert stream.flush() == REPLACEMENT
    assert stream.flush() == ""


def test_broken_bytes_do_not_hold_back_for_ever(tokenizer):
    first_byte, letter = tokenizer.token_to_id("ð"), tokenizer.token_to_id("x")
    stream = TextStream(tokenizer)

    assert [stream.push(token) for token in (first_byte, first_byte, letter)] == [
        "",
        "",
        f"{REPLACEMENT * 2}x",
    ]


def test_special_tokens_are_not_text(tokenizer):
    ids = tokenizer.encode("once").ids

    assert "".join(pieces(TextStream(tokenizer), [END, *ids, END, *ids])) == "onceonce"
    shown = TextStream(tokenizer, skip_special_tokens=False)
    assert "".join(pieces(shown, [*ids, END])) == "once<|end|>"
    some = TextStream(tokenizer, special_texts={END: "</think>"})
    first_byte = tokenizer.token_to_id("ð")
    assert some.push([*ids, END, first_byte, END, *ids]) == (
        f"once</think>{REPLACEMENT}</think>once"
    )


def test_several_tokens_at_once(tokenizer):
    stream = TextStream(tokenizer)

    assert stream.push(tokenizer.encode("once upon").ids) == "once upon"
    assert stream.push([]) == ""


def test_tokens_may_be_numbers_of_numpy(tokenizer):
    ids = np.array(tokenizer.encode("once upon").ids, dtype=np.int32)
    assert "".join(pieces(TextStream(tokenizer), ids)) == "once upon"
    assert TextStream(tokenizer).push(ids) == "once upon"


@given(data=st.data())
def test_any_tokens_in_any_portions_give_the_text_of_all(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=30))
    stream, text, rest = TextStream(tokenizer), "", list(ids)
    while rest:
        size = data.draw(st.integers(1, 4))
        text += stream.push(rest[:size])
        rest = rest[size:]

    assert text + stream.flush() == tokenizer.decode(ids)


def test_the_space_after_the_prompt_is_kept(fallback_tokenizer):
    assert "".join(pieces(TextStream(fallback_tokenizer), [1, 2])) == "once upon"
    assert "".join(pieces(TextStream(fallback_tokenizer, [1]), [2, 1])) == " upon once"


@pytest.mark.parametrize("prompt", ["日本語日本語", "a🙂日本🙂", "ééééééé", "日本語日本語a"])
@pytest.mark.parametrize("text", ["語", "🙂é", "a語"])
def test_bytes_of_the_prompt_do_not_spoil_the_next_ones(fallback_tokenizer, prompt, text):
    """The last tokens of a prompt may begin within a character."""
    stream = TextStream(fallback_tokenizer, byte_ids(prompt))
    assert "".join(pieces(stream, byte_ids(text))) == text


@pytest.mark.parametrize("before", ["", "日本語日本語", "aéa", "éééééé"])
@pytest.mark.parametrize("character", ["é", "語", "🙂"])
def test_bytes_complete_a_character_that_begins_in_the_prompt(
    fallback_tokenizer, before, character
):
    ids = byte_ids(character)
    for size in range(1, len(ids)):
        prompt, rest = byte_ids(before) + ids[:size], ids[size:]
        stream = TextStream(fallback_tokenizer, prompt)
        following = [*rest, *byte_ids("日本"), 2]
        assert "".join(pieces(stream, following)) == f"{character}日本 upon"
        at_once = TextStream(fallback_tokenizer, prompt)
        assert at_once.push(following[:-4]) == f"{character}日"
        assert at_once.push(following[-4:]) == "本 upon"
        broken = TextStream(fallback_tokenizer, prompt)
        assert "".join(pieces(broken, [2])) == " upon"
        whole, part = map(
            fallback_tokenizer.decode, ([*ids[:size], *byte_ids("日"), 2], ids[:size])
        )
        broken = TextStream(fallback_tokenizer, prompt)
        assert "".join(pieces(broken, [*byte_ids("日"), 2])) == whole.removeprefix(part)


def test_invalid_bytes_after_valid_ones_are_one_replacement_each(fallback_tokenizer):
    """The decoder makes all bytes in a row invalid, also those that have been returned."""
    for prompt, valid in (("", "日本"), ("日本", ""), ("日", "本語日本語")):
        first, *_ = byte_ids("日")
        stream = TextStream(fallback_tokenizer, byte_ids(prompt))
        assert stream.push(byte_ids(valid)) == valid
        assert stream.push([first, first]) == ""
        assert stream.push([2]) == f"{REPLACEMENT * 2} upon"
        assert stream.push([first]) + stream.flush() == REPLACEMENT


def test_a_character_that_begins_in_the_prompt_is_completed(tokenizer):
    before, (first, *rest) = tokenizer.encode("12 ").ids, byte_tokens(tokenizer, "🙂")
    for num_rest in range(4):
        prompt = [*before, first, *rest[:num_rest]]
        found = pieces(TextStream(tokenizer, prompt), [*rest[num_rest:], *before])
        assert "".join(found) == ("🙂" if num_rest < 3 else "") + "12 "
    broken = TextStream(tokenizer, [*before, first])
    assert "".join(pieces(broken, before)) == "12 "


def test_a_long_prompt_costs_no_more_than_its_end(fallback_tokenizer):
    stream = TextStream(fallback_tokenizer, [1] * 10_000)

    assert stream.push(2) == " upon"
    assert len(stream._window) < 20


@pytest.mark.parametrize("text", ["aéa", "é🙂", "日本a"])
def test_byte_fallback(fallback_tokenizer, text):
    ids = [token for letter in text for token in ([3] if letter == "a" else byte_ids(letter))]

    assert "".join(pieces(TextStream(fallback_tokenizer), ids)) == text
