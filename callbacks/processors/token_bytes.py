"""The bytes that each token of a vocabulary adds to a text.

The decoders of byte-level vocabularies (GPT-2, Llama 3, Qwen) and of SentencePiece (Llama 2,
Mistral, Gemma) are supported. The bytes of a token may be only a part of a UTF-8 character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

from gptmanager.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Return the bytes of each token id; b"" for special tokens and for ids without a token.

    The text of a sequence is the joined bytes of its tokens, decoded as UTF-8. (SentencePiece omits
    a space at the start of a text.) Raise ConfigError for an unsupported decoder.
    """
    read = json.loads(tokenizer.to_str())
    kinds = {part["type"]: part for part in _parts(read["decoder"])}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    found = [b""] * (max(vocabulary.values(), default=-1) + 1)
    added = {token["id"]: token for token in read["added_tokens"]}
    if "ByteLevel" in kinds:
        letters = _letters()
        for text, token in vocabulary.items():
            found[token] = b"".join(letters.get(one) or one.encode() for one in text)
    elif "Metaspace" in kinds or "ByteFallback" in kinds:
        space = kinds.get("Metaspace", {}).get("replacement", "\N{LOWER ONE EIGHTH BLOCK}")
        for text, token in vocabulary.items():
            byte = _BYTE_TOKEN.fullmatch(text) if "ByteFallback" in kinds else None
            plain = text.replace(space, " ").encode()
            found[token] = bytes([int(byte[1], 16)]) if byte else plain
    else:
        raise ConfigError(
            f"the tokenizer's decoder is {', '.join(kinds) or 'none'}: it must be ByteLevel, "
            "Metaspace or ByteFallback"
        )
    for token, one in added.items():
        found[token] = b"" if one["special"] else one["content"].encode()
    return found


def _parts(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    yield decoder
    for part in decoder.get("decoders", ()):
        yield from _parts(part)


def _letters() -> dict[str, bytes]:
    """Return GPT-2's map from characters to bytes.

    The code point of a character is its byte, if the byte is printable in Latin-1. The other bytes
    have the code points from 256 on, in ascending order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): bytes([byte]) for byte in printable}
    letters.update({chr(256 + index): bytes([byte]) for index, byte in enumerate(others)})
    return letters
