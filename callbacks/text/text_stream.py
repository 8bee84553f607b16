"""`TextStream`: token ids in, text out, as they come.

Decides how much of the text is complete. Knows nothing of requests and of models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# as far back as a tokenizer looks to decide on a space or on a character that the prompt began
_CONTEXT = 8


class TextStream:
    """Decodes a sequence token by token; its pieces, joined, are the text.

    A token may hold a part of a character (byte-level tokens, byte fallback). Such text is held
    back until the character is complete, or until `flush`. With `prompt_ids` the text continues
    the prompt, so a leading space is neither lost nor doubled.

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
        # the tokens given out last, then those held back; all are decoded together
        self._window = list(prompt_ids[-_CONTEXT:])
        self._num_given = len(self._window)

    def push(self, tokens: int | Iterable[int]) -> str:
        """The text that became complete with these tokens; sometimes ""."""
        self._window.extend([tokens] if isinstance(tokens, int) else tokens)
        text = self._held_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._give()
        return text

    def flush(self) -> str:
        """The text held back; its incomplete last character becomes U+FFFD."""
        text = self._held_text()
        self._give()
        return text

    def _held_text(self) -> str:
        given = self._decode(self._window[: self._num_given])
        return self._decode(self._window)[len(given) :]

    def _give(self) -> None:
        del self._window[: self._num_given]
        self._num_given = len(self._window)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special_tokens)
