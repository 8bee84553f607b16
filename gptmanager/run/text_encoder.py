"""`TextEncoder`: the texts of a request as token ids, and which are too long for any request.

Decides how a text is encoded; knows nothing of lines and fields.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import orjson
from tokenizers import Tokenizer, pre_tokenizers

from gptmanager.errors import InvalidRequestError, error_summary, quoted

LONG_TEXT = 1 << 16  # characters: it takes a tenth of a second to encode them
# parts of a tokenizer that pass on all of a text
_KEEPING = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_NFC = 9  # a text has at most as many times the bytes of its composed form


class TextTooLongError(InvalidRequestError):
    """A text has more bytes than the tokens of any request could hold, and was not encoded.

    `num_tokens`: it has at least as many.
    """

    num_tokens = 0


class TextEncoder:
    """Encodes with `tokenizer`, None: there is none. `max_tokens`: more fit into no request.

    Texts of at least `long_text` characters are encoded so that other threads run meanwhile.
    `special_in_text` False: the name of a special token in a text is plain text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        max_tokens: int | None = None,
        *,
        long_text: int = LONG_TEXT,
        special_in_text: bool = True,
    ) -> None:
        if tokenizer is not None and not special_in_text:
            tokenizer = Tokenizer.from_str(tokenizer.to_str())  # others use the given one
            tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._long_text = long_text
        self._max_tokens = max_tokens

    def encode(self, name: str, text: Any, *, special: bool) -> list[int]:
        """Return token ids. InvalidRequestError names the field if it is not a text or too long."""
        if not isinstance(text, str):
            raise InvalidRequestError(f"{name} = {quoted(text)} is not a text")
        if self._tokenizer is None:
            raise InvalidRequestError(
                f"{name} is a text, but the model folder has no tokenizer.json"
            )
        is_long = len(text) >= self._long_text
        if is_long:
            self._refuse_endless(name, text)
        try:
            if not is_long:
                ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
                return ids
            return self._batch(text, special)
        except BaseException as error:  # bare Exceptions, and panics of Rust, which are none
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise InvalidRequestError(
                f"{name} cannot be encoded: {error_summary(error)}"
            ) from error

    def _batch(self, text: str, special: bool) -> list[int]:
        """Unlike `Tokenizer.encode`, that of a batch lets other threads run."""
        assert self._tokenizer is not None
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=special)
        ids: list[int] = encoding.ids
        return ids

    def _refuse_endless(self, name: str, text: str) -> None:
        if self._max_tokens is None or self._longest_token is None:
            return
        size, limit = len(text.encode()), self._max_tokens * self._longest_token
        if size > limit:
            error = TextTooLongError(
                f"{name} has {size} bytes: the {self._max_tokens} tokens that a request may have, "
                f"of at most {self._longest_token} bytes each, hold {limit}"
            )
            error.num_tokens = -(-size // self._longest_token)
            raise error

    @functools.cached_property
    def _longest_token(self) -> int | None:
        return None if self._tokenizer is None else longest_token(self._tokenizer)


def longest_token(tokenizer: Tokenizer) -> int | None:
    """The most bytes of a text that one token may stand for.

    None where a part of the tokenizer may drop or shorten what it gets, so that there is no bound.
    """
    parts = orjson.loads(tokenizer.to_str())
    factor = _shrinking(parts["normalizer"])
    if factor is None or any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"]):
        return None
    splitting = list(_flat(parts["pre_tokenizer"], "pretokenizers"))
    if not all(map(_keeps, splitting)) or not _knows_all(tokenizer, parts["model"], splitting):
        return None
    return factor * max(len(token.encode()) for token in tokenizer.get_vocab())


def _flat(part: Mapping[str, Any] | None, inner: str) -> Iterable[Mapping[str, Any]]:
    if part is None:
        return
    if part["type"] == "Sequence":
        for child in part[inner]:
            yield from _flat(child, inner)
    else:
        yield part


def _shrinking(normalizer: Mapping[str, Any] | None) -> int | None:
    """By what factor it makes a text shorter at most."""
    factor = 1
    for part in _flat(normalizer, "normalizers"):
        replaced = part.get("pattern", {}).get("String") if part["type"] == "Replace" else None
        if part["type"] == "NFC":
            factor *= _NFC
        elif part["type"] != "Prepend" and (
            replaced is None or len(part["content"].encode()) < len(replaced.encode())
        ):
            return None
    return factor


def _keeps(pre_tokenizer: Mapping[str, Any]) -> bool:
    if pre_tokenizer["type"] == "Split":
        return bool(pre_tokenizer["behavior"] != "Removed")
    return pre_tokenizer["type"] in _KEEPING


def _knows_all(
    tokenizer: Tokenizer, model: Mapping[str, Any], splitting: Iterable[Mapping[str, Any]]
) -> bool:
    """Whether every byte has a token, so that none is lost in one for what is unknown."""
    if model["type"] != "BPE":
        return False
    vocabulary = tokenizer.get_vocab().keys()
    if any(part["type"] == "ByteLevel" for part in splitting):
        return vocabulary >= set(pre_tokenizers.ByteLevel.alphabet())
    return bool(model["byte_fallback"]) and vocabulary >= _BYTES
