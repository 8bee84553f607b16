"""Reads the vocabulary of a GGUF file: tokens and their types, end tokens, chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gptmanager.models.gguf.header import Header
from gptmanager.models.gguf.metadata import Metadata

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_GGML = "tokenizer.ggml."
_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")
# A token with one of these texts ends an output, regardless of the token's type, as in llama.cpp.
# `_without_message_end` makes the only exception.
_ENDS = frozenset(
    """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn>
    <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance>
    <eos> <turn|> <｜end▁of▁sentence｜>
    """.split()
)


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file. `texts` and `types` hold the text and the type of each token.

    `ids` maps a role, such as "bos", to a token id that the file states, or that the vocabulary's
    kind implies. `ends` holds the ids of the tokens that end an output.
    """

    texts: list[str]
    types: list[int]
    ids: Mapping[str, int]
    ends: tuple[int, ...]

    def text(self, role: str) -> str | None:
        """Return the text of the token with this role, or None if no token has it."""
        number = self.ids.get(role)
        return None if number is None else self.texts[number]


def read_vocabulary(header: Header) -> Vocabulary | None:
    """Return the vocabulary; None if the file has none."""
    metadata = Metadata(header.path, header.metadata)
    if f"{_GGML}tokens" not in metadata:
        return None
    texts = metadata.texts(f"{_GGML}tokens")
    types = [NORMAL] * len(texts)
    if f"{_GGML}token_type" in metadata:
        types = metadata.numbers(f"{_GGML}token_type", len(texts))
    ids = _ids(metadata, len(texts))
    named = [number for number, text in enumerate(texts) if text in _ENDS]
    given = [ids[role] for role in ("eos", "eot", "eom") if role in ids]
    ends = tuple(dict.fromkeys([*given, *named]))
    for number in named:
        types[number] = CONTROL
    return Vocabulary(texts, types, ids, _without_message_end(ends, texts))


def _ids(metadata: Metadata, count: int) -> dict[str, int]:
    is_spm = metadata.text(f"{_GGML}model") == "llama"
    found = {"unknown": 0, "bos": 1, "eos": 2} if is_spm else {}
    found = {role: number for role, number in found.items() if number < count}
    for role in _IDS:
        key = f"{_GGML}{role}_token_id"
        number = metadata.integer(key)
        if number is None or number in (-1, 2**32 - 1):  # some files use these for "none"
            continue
        if not 0 <= number < count:
            raise metadata.error(key, f"must be the id of one of {count} tokens")
        found[role] = number
    return found


def _without_message_end(ends: tuple[int, ...], texts: list[str]) -> tuple[int, ...]:
    """Remove <|end|> from the end tokens if both <|return|> and <|call|> are among them.

    These two tokens belong to the harmony format of gpt-oss. In this format <|end|> ends a message,
    but not the output.
    """
    by_text = {texts[number]: number for number in ends}
    if {"<|return|>", "<|call|>"} <= by_text.keys():
        return tuple(number for number in ends if texts[number] != "<|end|>")
    return ends


def tokenizer_config_of(header: Header) -> dict[str, Any]:
    """Return what `tokenizer_config.json` would hold: texts of special tokens, chat templates."""
    metadata, vocabulary = Metadata(header.path, header.metadata), read_vocabulary(header)
    config: dict[str, Any] = {}
    if vocabulary is not None:
        names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
        for role, name in names.items():
            if (text := vocabulary.text(role)) is not None:
                config[f"{name}_token"] = text
    key = "tokenizer.chat_template"
    templates = {"default": metadata.text(key)} if key in metadata else {}
    if f"{key}s" in metadata:
        for name in metadata.texts(f"{key}s"):
            templates[name] = metadata.text(f"{key}.{name}")
    if templates:
        config["chat_template"] = [
            {"name": name, "template": text} for name, text in templates.items() if text is not None
        ]
    return config


def generation_config_of(header: Header) -> dict[str, Any]:
    """Return what `generation_config.json` would hold: the ids of BOS, end and padding tokens."""
    vocabulary = read_vocabulary(header)
    if vocabulary is None:
        return {}
    names = {"bos": "bos_token_id", "padding": "pad_token_id"}
    config: dict[str, Any] = {
        name: vocabulary.ids[role] for role, name in names.items() if role in vocabulary.ids
    }
    if vocabulary.ends:
        config["eos_token_id"] = list(vocabulary.ends)
    return config
