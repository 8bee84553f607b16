"""`TextEncoder`: encodes the texts of a request as token ids, and rejects texts that are too long.

The encoding of a text does not depend on where the text is from.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import orjson
from tokenizers import Tokenizer, pre_tokenizers

from gptmanager.errors import InvalidRequestError, error_summary, quoted

LONG_TEXT = 1 << 16  # characters; encoding them takes a tenth of a second
# pre-tokenizers that keep every character of a text
_KEEPING = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_NFC = 9  # a text has at most 9 times the bytes of its NFC form


class TextTooLongError(InvalidRequestError):
    """The text has more bytes than the tokens of any request can represent. It was not encoded.

    `num_tokens` is a lower bound on the number of tokens of the text.
    """

    num_tokens = 0


class TextEncoder:
    """Encodes texts with `tokenizer`. If `tokenizer` is None, every text is refused.

    `max_tokens` is the most tokens of a request, or None for no limit. Texts of at least
    `long_text` characters are encoded in a way that lets other threads run. If `special_in_text` is
    False, the name of a special token in a text is treated as plain text.
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
            tokenizer = Tokenizer.from_str(tokenizer.to_str())  # other code uses the original
            tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._long_text = long_text
        self._max_tokens = max_tokens

    def encode(self, name: str, text: Any, *, special: bool) -> list[int]:
        """Return the token ids of `text`. Raise InvalidRequestError for an invalid text.

        If `special`, the tokenizer adds its special tokens. The message of the error calls the text
        `name`.
        """
        if not isinstance(text, str):
            raise InvalidRequestError(f"{name} must be a string, got {quoted(text)}")
        if self._tokenizer is None:
            raise InvalidRequestError(f"{name} is a text, but the model has no tokenizer")
        is_long = len(text) >= self._long_text
        if is_long:
            self._refuse_endless(name, text)
        try:
            if not is_long:
                ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
                return ids
            return self._batch(text, special)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: B036 - a panic of Rust is a BaseException
            text = f"{name} cannot be encoded: {error_summary(error)}"
            raise InvalidRequestError(text) from error

    def _batch(self, text: str, special: bool) -> list[int]:
        """Encode as a batch: unlike `Tokenizer.encode`, this lets other threads run."""
        assert self._tokenizer is not None
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=special)
        ids: list[int] = encoding.ids
        return ids

    def _refuse_endless(self, name: str, text: str) -> None:
        if self._max_tokens is None or self._longest_token is None:
            return
        size = len(text.encode(errors="surrogatepass"))
        limit = self._max_tokens * self._longest_token
        if size > limit:
            error = TextTooLongError(
                f"{name} has {size} bytes: a request may have {self._max_tokens} tokens "
                f"of at most {self._longest_token} bytes each, which is {limit} bytes"
            )
            error.num_tokens = -(-size // self._longest_token)
            raise error

    @functools.cached_property
    def _longest_token(self) -> int | None:
        return None if self._tokenizer is None else longest_token(self._tokenizer)


def added_tokens(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the special tokens that a tokenizer adds before each text, and those after it."""
    found = tokenizer.encode("a")
    own = [place for place, is_added in enumerate(found.special_tokens_mask) if not is_added]
    first, last = (own[0], own[-1]) if own else (len(found.ids), len(found.ids))
    return found.ids[:first], found.ids[last + 1 :]


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Return the most bytes of text that one token can represent, or None without a known limit.

    No limit is known if a part of the tokenizer may drop text or shorten it by an unknown factor,
    if a byte has no token, or if the tokenizer's model is not BPE.
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
    """Return the largest factor by which the normalizer can shorten a text; None if unknown."""
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
    """Return whether every byte has a token, so that no text becomes an unknown token."""
    if model["type"] != "BPE":
        return False
    vocabulary = tokenizer.get_vocab().keys()
    if any(part["type"] == "ByteLevel" for part in splitting):
        return vocabulary >= set(pre_tokenizers.ByteLevel.alphabet())
    return bool(model["byte_fallback"]) and vocabulary >= _BYTES
