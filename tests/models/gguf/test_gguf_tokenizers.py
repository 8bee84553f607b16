"""Tokenizers of GGUF files return the ids of llama.cpp, and know what ends a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_tokenizers import KINDS, TEXTS, expected_ids, metadata_of, write_vocabulary

from gptmanager.callbacks import ChatTemplate, TokenDefaults, load_tokenizer
from gptmanager.errors import ConfigError
from gptmanager.models.checkpoint_parts import read_part
from gptmanager.models.gguf.pre_tokenizers import PRE_TOKENIZERS


def saved(tmp_path: Path, name: str = "llama-bpe", **changes: Any) -> Path:
    """A file with this tokenizer; None removes a key."""
    keys = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    metadata = {**metadata_of(name), **keys}
    kept = {key: value for key, value in metadata.items() if value is not None}
    return write_vocabulary(tmp_path / "a.gguf", kept)


@pytest.mark.parametrize("name", KINDS)
def test_the_ids_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(saved(tmp_path, name))
    for text, expected in zip(TEXTS, expected_ids(name), strict=True):
        ids = tokenizer.encode(text).ids
        assert ids == expected, text
        if name == "sentencepiece" and "[INST]" in text:
            continue  # behind such a token there is a space more, as in llama.cpp
        begins = int(tokenizer.id_to_token(ids[0]) in ("<|begin_of_text|>", "<s>"))
        assert tokenizer.decode(ids[begins:], skip_special_tokens=False) == text


def test_every_pre_tokenizer_cuts_any_text_without_a_loss(tmp_path: Path) -> None:
    for name in PRE_TOKENIZERS:
        tokenizer = load_tokenizer(saved(tmp_path, pre=name))
        assert [
            tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, False)
            for text in TEXTS
        ] == TEXTS


def test_runs_of_spaces_are_cut_into_powers_of_two(tmp_path: Path) -> None:
    cut = load_tokenizer(saved(tmp_path, pre="jais-2")).pre_tokenizer.pre_tokenize_str
    assert [len(piece) for piece, _ in cut(1023 * " ")] == [2**i for i in range(9, -1, -1)]
    assert [len(piece) for piece, _ in cut("a      b")] == [1, 4, 1, 2]


def test_merges_of_other_texts_than_tokens_are_left_out(tmp_path: Path) -> None:
    merges = metadata_of("llama-bpe")["tokenizer.ggml.merges"]
    plain = load_tokenizer(saved(tmp_path))
    changed = load_tokenizer(saved(tmp_path, merges=["no-token t", "nothing", *merges]))
    assert [changed.encode(text).ids for text in TEXTS] == [
        plain.encode(text).ids for text in TEXTS
    ]


def test_a_text_may_begin_and_end_with_special_tokens(tmp_path: Path) -> None:
    def ids(**changes: Any) -> list[int]:
        found: list[int] = load_tokenizer(saved(tmp_path, **changes)).encode("Hi").ids
        return found

    plain = ids(add_bos_token=False)
    metadata = metadata_of("llama-bpe")
    bos, eos = (metadata[f"tokenizer.ggml.{role}_token_id"] for role in ("bos", "eos"))
    assert ids() == [bos, *plain]  # which this pre-tokenizer implies
    assert ids(add_eos_token=True) == [bos, *plain, eos]
    assert ids(add_bos_token=True, bos_token_id=None) == plain


def test_sentencepiece_puts_a_space_before_a_text_by_default(tmp_path: Path) -> None:
    name = "sentencepiece"
    spaced = load_tokenizer(saved(tmp_path, name)).encode("Hello")
    bare = load_tokenizer(saved(tmp_path, name, add_space_prefix=False)).encode("Hello")
    assert spaced.tokens[1].startswith("\u2581") and not bare.tokens[1].startswith("\u2581")


def test_control_tokens_in_a_text_may_be_plain_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(saved(tmp_path))
    tokenizer.encode_special_tokens = True
    ids = tokenizer.encode("<|eot_id|><tag>").ids
    texts = metadata_of("llama-bpe")["tokenizer.ggml.tokens"]
    assert texts.index("<|eot_id|>") not in ids
    assert texts.index("<tag>") in ids  # which is no control token


def test_the_tokens_that_end_a_text_are_those_given_and_those_known(tmp_path: Path) -> None:
    metadata = metadata_of("llama-bpe")
    texts = metadata["tokenizer.ggml.tokens"]
    eos = metadata["tokenizer.ggml.eos_token_id"]
    path = saved(tmp_path, eot_token_id=5, padding_token_id=7)

    defaults = TokenDefaults.of_folder(path)

    assert defaults.end_ids == (eos, 5, texts.index("<|im_end|>"))
    assert defaults.pad_id == 7
    assert read_part(path, "generation_config.json")["bos_token_id"] == eos - 1
    names = read_part(path, "tokenizer_config.json")
    assert names["bos_token"] == "<|begin_of_text|>" and names["eos_token"] == "<|eot_id|>"
    path = saved(tmp_path, eot_token_id=2**32 - 1)  # no token
    assert TokenDefaults.of_folder(path).end_ids == (eos, texts.index("<|im_end|>"))


def test_the_chat_template_is_that_of_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path)
    tokenizer = load_tokenizer(path)
    with ChatTemplate.of_folder(path) as template:
        ids = template.render([{"role": "user", "content": "Hello <|eot_id|>"}])
    assert tokenizer.decode(ids) == "Hello <|eot_id|>"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"pre": "strange"}, "pre = 'strange': this pre-tokenizer is not supported; supported: "),
        ({"model": "t5"}, "ggml.model = 't5': not supported; supported: gpt2, llama, gemma4"),
        ({"tokens": None}, "holds no tokenizer: pass token ids"),
        ({"tokens": "a not there:"}, "tokens = 'a not there:': must be an array of strings"),
        ({"tokens": 3}, "tokenizer.ggml.tokens = 3: must be an array of strings"),
        ({"merges": None}, "tokenizer.ggml.merges is missing: must be an array of strings"),
        ({"token_type": np.zeros(3, np.int32)}, "token_type = .*: must be an array of 905 numbers"),
        ({"eos_token_id": 905}, "eos_token_id = 905: must be the id of one of 905 tokens"),
        ({"eos_token_id": "x"}, "eos_token_id = 'x': must be an integer"),
        ({"add_bos_token": 1}, "add_bos_token = 1: must be true or false"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = saved(tmp_path, **changes)
    with pytest.raises(ConfigError, match=told):
        load_tokenizer(path)
        TokenDefaults.of_folder(path)
