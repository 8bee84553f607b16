"""`TextStream`: decodes token ids to text incrementally, and holds back incomplete characters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# number of prompt tokens that can affect the first space or the first character of the output
_CONTEXT = 8
_MAX_BYTES = 4  # bytes of a character in UTF-8
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token for a byte
_CONTINUED = re.compile("<0x[89AB][0-9A-F]>")  # one that begins no character


class TextStream:
    """Decodes a sequence token by token. The pieces that it returns add up to the text.

    A token may be a part of a character (byte-level tokens, byte fallback). The character is held
    back until it is complete, or until `flush`. If `prompt_ids` are given, the text continues the
    prompt, so a leading space is neither lost nor doubled. `special_texts` maps the ids of special
    tokens to their texts: these tokens stay in the text in spite of `skip_special_tokens`.

        stream = TextStream(tokenizer, prompt_ids)
        for token in generation:
            print(stream.push(token), end="", flush=True)
        print(stream.flush())
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        special_texts: Mapping[int, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._special_texts = special_texts if skip_special_tokens and special_texts else {}
        # the tokens of the text returned last, then the held-back tokens; all are decoded together
        size = self._size_of_last_character(prompt_ids) or _CONTEXT
        self._window = list(prompt_ids[-size:])
        self._num_returned = len(self._window)
        self._num_characters = 0  # returned characters of the held-back tokens' text

    def push(self, tokens: int | Iterable[int]) -> str:
        """Add tokens; return the text that is now complete, which may be ""."""
        new = [int(tokens)] if isinstance(tokens, (int, np.integer)) else tokens
        return "".join(map(self._next, new)) if self._special_texts else self._push(new)

    def _next(self, token: int) -> str:
        special = self._special_texts.get(token)
        return self._push([token]) if special is None else self.flush() + special

    def _push(self, tokens: Iterable[int]) -> str:
        self._window.extend(tokens)
        text = self._held_text()
        if not text or text.endswith(_REPLACEMENT):
            complete = text.rstrip(_REPLACEMENT)
            piece = complete[self._num_characters :]
            self._num_characters = max(self._num_characters, len(complete))
            return piece
        return self._flush(text)

    def flush(self) -> str:
        """Return the text held back; an incomplete last character becomes U+FFFD."""
        return self._flush(self._held_text())

    def _size_of_last_character(self, tokens: Sequence[int]) -> int:
        """Return how many of the last tokens are bytes of one character, which may be incomplete.

        Return 0 if the last token is not a byte. With byte fallback, if one byte in a row is
        invalid, all are. So bytes are decoded after a whole character, or at the start of one.
        """
        for size, token in enumerate(reversed(tokens[-_MAX_BYTES:]), 1):
            text = self._token(token)
            if not _BYTE.fullmatch(text):
                break
            if not _CONTINUED.fullmatch(text):
                return size
        return 0

    def _token(self, token: int) -> str:
        return self._tokenizer.id_to_token(int(token)) or ""

    def _held_text(self) -> str:
        returned, text = (
            self._decode(self._window[: self._num_returned]),
            self._decode(self._window),
        )
        if text.startswith(returned):
            return text[len(returned) :]
        if returned.endswith(_REPLACEMENT):  # held-back tokens complete the prompt's last character
            return text[len(returned.rstrip(_REPLACEMENT)) :]
        # held-back bytes are invalid, and with them the returned bytes before them
        return self._decode(self._window[self._num_returned :])

    def _flush(self, text: str) -> str:
        """Release the held-back tokens. Return the part of their `text` not returned so far."""
        piece, self._num_characters = text[self._num_characters :], 0
        num_held = len(self._window) - self._num_returned
        size = self._size_of_last_character(self._window) or num_held
        self._window = self._window[len(self._window) - size :]
        self._num_returned = size
        return piece

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special_tokens)
