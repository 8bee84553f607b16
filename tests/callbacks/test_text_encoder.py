"""Texts as token ids, and the bound that tells which fit into no request."""

from __future__ import annotations

import random

import pytest
from text_checkpoint import byte_tokenizer
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from gptmanager.callbacks.text.text_encoder import LONG_TEXT, TextEncoder, longest_token
from gptmanager.errors import InvalidRequestError

CORPUS = ["the rain in spain stays mainly in the plain " * 20, "ああ é 日本語 " * 20]


def trained(**parts) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def with_bytes() -> Tokenizer:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer


BOUNDED = {
    "bytes": byte_tokenizer(),
    "trained": trained(),
    "composed": trained(normalizer=normalizers.NFC()),
    "fallback": with_bytes(),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_no_token_covers_more_bytes_than_the_bound(name):
    tokenizer, chance = BOUNDED[name], random.Random(0)
    longest = longest_token(tokenizer)
    pieces = ["the rain in spain", " ", "é", "e\u0301", "日本語", "\x00", "Å", "`", "<|end|>", "😀"]
    for _ in range(200):
        text = "".join(chance.choice(pieces) for _ in range(chance.randrange(1, 30)))
        assert len(text.encode()) <= longest * len(tokenizer.encode(text).ids)


UNBOUNDED = {
    "stripped": trained(normalizer=normalizers.Strip()),
    "replaced": trained(normalizer=normalizers.Replace("  ", "")),
    "lower": trained(normalizer=normalizers.Lowercase()),
    "white space": trained(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
    "split": trained(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
    "no alphabet": trained(pre_tokenizer=None),
    "words": Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_without_a_bound_there_is_none(name):
    assert longest_token(UNBOUNDED[name]) is None


def test_an_added_token_that_takes_white_space_with_it_has_no_bound():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<x>", rstrip=True)])
    assert longest_token(tokenizer) is None


def test_a_long_text_is_refused_only_if_it_cannot_fit():
    encoder = TextEncoder(byte_tokenizer(), max_tokens=LONG_TEXT // 7)  # "<|end|>" has 7 bytes
    limit = 7 * (LONG_TEXT // 7)
    with pytest.raises(
        InvalidRequestError,
        match=f"^prompt has {limit + 7} bytes: a request may have .* which is {limit} bytes",
    ):
        encoder.encode("prompt", "x" * (limit + 7), special=True)
    roomy = TextEncoder(byte_tokenizer(), max_tokens=LONG_TEXT)
    assert len(roomy.encode("prompt", "x" * (limit + 7), special=True)) == limit + 7
    with pytest.raises(InvalidRequestError, match="^prompt cannot be encoded"):
        roomy.encode("prompt", "\ud800" * LONG_TEXT, special=True)
    boundless = TextEncoder(UNBOUNDED["stripped"], max_tokens=1)
    assert boundless.encode("prompt", " " * LONG_TEXT, special=True) == []


def test_errors_of_the_tokenizer_are_reported():
    broken = Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))
    with pytest.raises(InvalidRequestError, match="^prompt cannot be encoded: WordLevel error"):
        TextEncoder(broken).encode("prompt", "b", special=True)
