"""`TextStream`: decodes token ids to text incrementally, and holds back incomplete characters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# number of prompt tokens that can affect the first space or the first character of the output
_CONTEXT = 8
_MAX_BYTES = 4  # of a character in UTF-8
_CONTINUED = re.compile("<0x[89AB][0-9A-F]>")  # a token for a byte that begins no character


class TextStream:
    """Decodes a sequence token by token. The pieces that it returns add up to the text.

    A token may be a part of a character (byte-level tokens, byte fallback). The character is held
    back until it is complete, or until `flush`. If `prompt_ids` are given, the text continues the
    prompt, so a leading space is neither lost nor doubled.

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
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # the tokens of the text returned last, then the held-back tokens; all are decoded together
        self._window = self._context(prompt_ids)
        self._num_returned = len(self._window)
        self._num_characters = 0  # returned characters of the held-back tokens' text

    def push(self, tokens: int | Iterable[int]) -> str:
        """Add tokens; return the text that is now complete, which may be ""."""
        self._window.extend([tokens] if isinstance(tokens, int) else tokens)
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

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the last tokens of the prompt, which do not begin within a character.

        With byte fallback, a part of a character would make all bytes after it invalid.
        """
        start = max(0, len(prompt_ids) - _CONTEXT)
        for _ in range(_MAX_BYTES - 1):
            if start == 0 or not _CONTINUED.fullmatch(self._token(prompt_ids[start])):
                break
            start -= 1
        return list(prompt_ids[start:])

    def _token(self, token: int) -> str:
        return self._tokenizer.id_to_token(int(token)) or ""

    def _held_text(self) -> str:
        returned, text = (
            self._decode(self._window[: self._num_returned]),
            self._decode(self._window),
        )
        if not text.startswith(returned):  # held-back tokens complete the prompt's last character
            returned = returned.rstrip(_REPLACEMENT)
        return text[len(returned) :]

    def _flush(self, text: str) -> str:
        """Release the held-back tokens. Return the part of their `text` not returned so far."""
        piece, self._num_characters = text[self._num_characters :], 0
        del self._window[: self._num_returned]
        self._num_returned = len(self._window)
        return piece

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special_tokens)
